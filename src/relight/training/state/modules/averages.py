"""Averaged models: which of their buffers belong to one rank alone, and how a replacement gets the newest of them.

An average (torch's AveragedModel, or a copy of a model that the script moves by itself) takes over buffers that
differ between ranks, such as BatchNorm's statistics; so its own differ too. But it takes them over after the first
write of a step, when the rank-private state of the next version has been kept already. So what is kept is what the
average held before, and a replacement repeats the average's last move for these buffers: all that enters it was kept
beside them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from relight.training.state.values.bits import same_bits
from relight.transfer.io.codec import local_part

Key = tuple[str, str]  # of a buffer: the module that was handed over, and the buffer's name in it


@dataclass(frozen=True)
class _Average:
    path: str
    mover: AveragedModel | None  # None: the script moves it by itself
    sources: dict[Key, Key]  # of each of its buffers, the model's that it is an average of


class Buffers(Protocol):
    """The buffers of all modules, by their places."""

    def get(self, key: Key) -> torch.Tensor: ...


class Averages:
    """The modules that are averages of other modules."""

    def __init__(self, modules: Mapping[str, nn.Module], trained: Iterable[torch.Tensor], slots: Buffers) -> None:
        """`trained`: the parameters that some optimizer updates; an average has none of them. `slots`: all buffers."""
        ids = {id(parameter) for parameter in trained}
        models = {n: m for n, m in modules.items() if any(id(p) in ids for p in m.parameters())}
        self._averages = [
            average
            for owner, module in modules.items()
            if owner not in models
            for average in _find(owner, "", module, models)
        ]
        # Of each AveragedModel, how often it was moved: alike on all ranks, whenever in a step that is.
        self.counters = {
            (owner, f"{path}.n_averaged" if path else "n_averaged")
            for owner, module in modules.items()
            for path, part in module.named_modules()
            if isinstance(part, AveragedModel)
        }
        self._slots = slots
        self._before: dict[Key, torch.Tensor] = {}
        self.copied: set[Key] = set()  # those that the newest step's end made equal to the model's

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._averages)

    def like(self, private: set[Key]) -> set[Key]:
        """Return the buffers of averages that are rank-private, since those of their models are."""
        return {key for average in self._averages for key, source in average.sources.items() if source in private}

    def repeated(self) -> set[Key]:
        """Return the buffers whose moves a replacement repeats, whenever they are made: see `repeat`."""
        return {key for average in self._averages if average.mover is not None for key in average.sources}

    def prepare(self, private: set[Key]) -> None:
        """Remember, in front of the first write, the averages that the script may move."""
        self._before = {
            key: self._slots.get(key).clone()
            for average in self._averages
            for key in average.sources
            if average.mover is None and key in private
        }

    def unrepeatable(self, changed: Iterable[Key]) -> list[Key]:
        """Return the buffers that the script averaged in a step, so that only their rank has them.

        A replacement repeats averages of torch's AveragedModel, and copies from the model.
        """
        by_hand = {key: source for a in self._averages if a.mover is None for key, source in a.sources.items()}
        pairs = [(key, by_hand[key]) for key in changed if key in by_hand]
        return [
            key for key, source in pairs if not same_bits(now := self._slots.get(key), self._slots.get(source).to(now))
        ]

    def commit(self) -> list[Key]:
        """See, after the step, how the script moved its averages. Returns those that a replacement could not move."""
        changed = [key for key, before in self._before.items() if not same_bits(before, self._slots.get(key))]
        lost = self.unrepeatable(changed)
        self.copied = set(changed) - set(lost)
        self._before = {}
        return lost

    def forget(self) -> None:
        """Drop the averages that `prepare` remembered: the step does not count, or is another process's."""
        self._before = {}

    def counts(self, private: set[Key]) -> dict[str, int]:
        """Return how often each AveragedModel was moved, if some of its buffers are rank-private."""
        return {
            average.path: int(average.mover.n_averaged)
            for average in self._averages
            if average.mover is not None and not private.isdisjoint(average.sources)
        }

    def repeat(self, counts: Mapping[str, int], private: set[Key]) -> None:
        """Move rank-private buffers of averages on, to where their parameters are.

        Those buffers and the models' are as they were kept with `counts`; all else is that of the version.
        """
        for average in self._averages:
            pairs = [(self._slots.get(k), self._slots.get(s)) for k, s in average.sources.items() if k in private]
            if average.mover is not None and pairs and average.path in counts:
                _move(average.mover, counts[average.path], pairs)
        sources = {key: source for average in self._averages for key, source in average.sources.items()}
        for key in self.copied & sources.keys():
            self._slots.get(key).copy_(self._slots.get(sources[key]))


def _move(mover: AveragedModel, count: int, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """As `mover` would have done from its `count`-th move on: by torch's own code, for these buffers alone."""
    if not mover.use_buffers:  # it copies them
        for own, source in pairs if count < int(mover.n_averaged) else ():
            own.copy_(source)
        return
    mine, model = nn.Module(), nn.Module()
    for number, (own, source) in enumerate(pairs):
        mine.register_buffer(f"buffer_{number}", own)
        model.register_buffer(f"buffer_{number}", source)
    again = AveragedModel(nn.Module(), avg_fn=mover.avg_fn, multi_avg_fn=mover.multi_avg_fn, use_buffers=True)
    again.module = mine
    for done in range(count, int(mover.n_averaged)):
        again.n_averaged = torch.full_like(mover.n_averaged, done)
        again.update_parameters(model)


def _find(owner: str, path: str, part: nn.Module, models: Mapping[str, nn.Module]) -> Iterator[_Average]:
    """The outermost copies, in `part` of a module, of some model or of a part of one."""
    mover, copy, inside = None, part, path
    if isinstance(part, AveragedModel) and type(part).update_parameters is AveragedModel.update_parameters:
        mover, copy, inside = part, part.module, f"{path}module."
    twin = _twin_of(copy, models)
    if twin is not None:
        model, prefix = twin
        names = [name for name, _ in copy.named_buffers()]
        sources = {(owner, inside + name): (model, prefix + name) for name in names}
        yield _Average(f"{owner}.{path}", mover, sources)
        return
    for name, child in part.named_children():
        yield from _find(owner, f"{path}{name}.", child, models)


def _twin_of(copy: nn.Module, models: Mapping[str, nn.Module]) -> tuple[str, str] | None:
    """The model, and the prefix of names in it, whose copy this is; None: it has no buffers, or is no copy."""
    found: list[tuple[str, str, nn.Module]] = []
    shape = _shape(copy)
    if next(copy.buffers(), None) is None:
        return None
    for owner, model in models.items():
        for path, part in model.named_modules():
            if type(part) is type(copy) and _shape(part) == shape:
                found.append((owner, f"{path}." if path else "", part))
    if len(found) > 1:  # built alike: that of which it was made, and is still equal to
        found.sort(key=lambda twin: not _is_equal(copy, twin[2]))
    return found[0][:2] if found else None


def _shape(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(t.shape)) for name, t in (*module.named_parameters(), *module.named_buffers())]


def _is_equal(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(a.device == b.device and torch.equal(local_part(a), local_part(b)) for a, b in pairs)
