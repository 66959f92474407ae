"""Plans of composed scripts: one option for each slot, drawn by seed, and the faults that strike it.

The first option of a slot is its simplest one: shrinking goes there.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SLOTS: Mapping[str, tuple[str, ...]] = {
    "shape": (
        *("one", "distill", "momentum", "maml", "two-heads", "actor-critic", "gan", "gan-reversed", "n-critic"),
        *("alternate", "rare-generator", "late-critic"),
    ),
    "net": (
        *("mlp", "batchnorm", "conv", "transformer", "rnn", "rnn-carried", "counter", "assigned-buffer"),
        *("data-write", "spectral", "weight-norm", "history", "tied", "dropout", "checkpointed", "custom-function"),
    ),
    "wrapper": (
        *("ddp", "ddp-view", "ddp-unused", "ddp-local-buffers", "ddp-small-buckets", "ddp-static"),
        *("manual", "manual-flat"),
    ),
    "optimizer": (
        *("sgd", "sgd-momentum", "adamw", "rmsprop", "adagrad", "groups", "two-optimizers", "lbfgs", "sam", "hand"),
        *("hand-momentum", "own-class", "lookahead", "closure"),
    ),
    "schedule": (
        *("none", "step", "cosine", "one-cycle", "plateau", "sequential", "lambda", "edit-before", "edit-after"),
    ),
    "scaler": ("none", "scaler", "overflow"),
    "clip": ("none", "norm", "value"),
    "accumulate": ("one", "two"),
    "data": (
        *("function", "list", "own", "loader", "loader-workers", "stateful", "stateful-workers", "subclass"),
        *("generator", "augmented", "collate"),
    ),
    "ema": ("none", "averaged", "averaged-buffers", "hand-data", "hand-inplace"),
    "carried": (
        *("none", "running-mean", "deque", "counter", "numpy-generator", "torch-generator", "attribute", "global"),
        *("tensor", "list", "dict", "closure", "part", "layer", "best-state", "best-state-shown", "best-copy", "view"),
        *("optimizer-state", "by-parameter", "holder", "of-rank", "reader-of-rank"),
    ),
    "draws": ("none", "torch", "numpy", "random", "all"),
    "before": ("none", "all-reduce", "all-gather", "broadcast", "async"),
    "middle": ("none", "all-reduce", "async"),
    "after": ("none", "all-reduce", "async", "barrier"),
    "evaluate": ("none", "in-block", "after-write", "collective", "between"),
    "flags": ("none", "freeze-until", "freeze-batchnorm", "toggle"),
    "tweak": ("none", "decay-before", "clamp-before", "clamp-after", "noise-after", "prune-after", "data-swap"),
    "per_rank": ("none", "running"),
    "stateful": ("none", "normalizer"),
    "report": ("none", "before", "after"),
    "rng": ("step", "preserve"),
    "between": ("none", "print", "draws", "best"),
    "hooks": ("none", "gradient", "forward", "handle", "late"),
    "scope": ("main", "module"),
}
SIMPLEST = {slot: options[0] for slot, options in SLOTS.items()}

GANS = ("gan", "gan-reversed", "n-critic", "alternate", "rare-generator", "late-critic")
TWO_WRITES = (*GANS, "actor-critic")  # of two networks
_BY_HAND = ("hand", "hand-momentum", "own-class")
_WHOLE_PASS = ("lbfgs", "sam", "closure")  # repeat forward and backward inside the update
_LOADERS = ("loader", "loader-workers", "stateful", "stateful-workers", "subclass", "generator", "augmented", "collate")

Choices = Mapping[str, str]


def _rules() -> tuple[tuple[str, Callable[[Choices], bool]], ...]:
    """Slots that go back to their simplest option where the others leave them no sense, in this order."""
    return (
        ("net", lambda c: c["shape"] != "one" and c["net"] == "rnn-carried"),
        ("net", lambda c: c["optimizer"] in _WHOLE_PASS and c["net"] in ("rnn-carried", "history")),
        ("net", lambda c: c["shape"] == "maml" and c["net"] in ("spectral", "weight-norm", "checkpointed", "rnn")),
        ("net", lambda c: c["wrapper"] == "ddp-static" and c["net"] in ("checkpointed", "rnn-carried")),
        ("optimizer", lambda c: c["shape"] in (*TWO_WRITES, "two-heads", "maml") and c["optimizer"] in _WHOLE_PASS),
        ("optimizer", lambda c: c["shape"] in TWO_WRITES and c["optimizer"] in ("two-optimizers", "lookahead")),
        ("optimizer", lambda c: c["shape"] == "two-heads" and c["optimizer"] in (*_BY_HAND, "two-optimizers")),
        ("wrapper", lambda c: c["shape"] == "maml" and c["wrapper"].startswith("ddp")),
        ("wrapper", lambda c: c["shape"] in GANS and c["wrapper"] == "ddp-static"),
        ("wrapper", lambda c: c["optimizer"] in _WHOLE_PASS and c["wrapper"] == "ddp-static"),
        ("flags", lambda c: c["flags"] == "toggle" and c["shape"] not in GANS),
        ("flags", lambda c: c["flags"] == "freeze-until" and c["wrapper"] not in ("ddp-unused", "manual")),
        ("flags", lambda c: c["flags"] == "freeze-until" and c["net"] in ("spectral", "weight-norm", "tied")),
        ("flags", lambda c: c["flags"] == "freeze-batchnorm" and c["net"] not in ("batchnorm", "conv")),
        ("scaler", lambda c: c["shape"] in (*TWO_WRITES, "two-heads") or c["optimizer"] in (*_WHOLE_PASS, *_BY_HAND)),
        ("scaler", lambda c: c["shape"] == "maml"),
        ("schedule", lambda c: c["optimizer"] in (*_BY_HAND, "lbfgs")),
        ("accumulate", lambda c: c["shape"] in (*TWO_WRITES, "maml") or c["optimizer"] in _WHOLE_PASS),
        ("accumulate", lambda c: c["wrapper"] == "ddp-static" or c["net"] == "rnn-carried"),
        ("middle", lambda c: c["shape"] not in TWO_WRITES),
        ("evaluate", lambda c: c["net"] == "rnn-carried"),
        ("tweak", lambda c: c["net"] in ("spectral", "weight-norm") and c["tweak"] == "data-swap"),
        ("ema", lambda c: c["net"] in ("spectral", "weight-norm", "history", "data-write", "rnn-carried")),
        ("hooks", lambda c: c["flags"] == "freeze-until"),
        ("carried", lambda c: c["carried"] == "optimizer-state" and c["optimizer"] in ("hand", "hand-momentum")),
    )


RULES = _rules()


@dataclass(frozen=True)
class Plan:
    """A script, the size of its job, and its faults."""

    seed: int
    ranks: int
    steps: int
    choices: tuple[tuple[str, str], ...]  # in the order of SLOTS
    faults: tuple[str, ...] = ()  # sentences of --chaos, or "RANK.STEP.PLACE" in the script

    def __getitem__(self, slot: str) -> str:
        return dict(self.choices)[slot]

    def blocks(self) -> list[str]:
        """Slots whose option is not the simplest, as SLOT=OPTION."""
        return [f"{slot}={option}" for slot, option in self.choices if option != SIMPLEST[slot]]

    def describe(self) -> str:
        """One line."""
        blocks = " ".join(self.blocks()) or "nothing but the simplest"
        return f"seed {self.seed}: {self.ranks} ranks, {self.steps} steps: {blocks}"


def settle(chosen: Choices) -> tuple[tuple[str, str], ...]:
    """Choices that fit each other."""
    settled = {slot: chosen.get(slot, SIMPLEST[slot]) for slot in SLOTS}
    for slot, is_nonsense in RULES:
        if is_nonsense(settled):
            settled[slot] = SIMPLEST[slot] if slot != "wrapper" or settled["shape"] != "maml" else "manual"
    return tuple(settled.items())


def compose(seed: int) -> Plan:
    """The script of a seed, without faults. About a third of the slots are not the simplest."""
    chance = random.Random(f"composed {seed}")
    always = set(chance.sample(sorted(SLOTS), 4))
    chosen = {}
    for slot, options in SLOTS.items():
        if slot in always or chance.random() < 0.28:
            chosen[slot] = chance.choice(options[1:])
    return Plan(seed, ranks=chance.choice((2, 2, 3)), steps=chance.randint(8, 12), choices=settle(chosen))
