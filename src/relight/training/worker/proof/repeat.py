"""Computes one early step of a job twice from the same start, and compares the bits.

What a recovery does to a survivor is to undo a step and have the script compute it again. If the script keeps something
that relight does not know of, which the step reads and changes, the second attempt ends differently. So that is tried
once, in a job's second step, while little is lost. A failure that comes first puts it off to the next attempt. A job
that goes on from a checkpoint is not ended for it: it would never get past that step.
"""

import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import msgspec
import torch
import xxhash

from relight.device.choose import accelerator
from relight.errors import UsageError
from relight.script_files import is_user_type
from relight.training.carried.code.source import user_frames
from relight.training.process.runtime import Runtime
from relight.training.state.tracked import TrackedState
from relight.transfer.io.codec import Flat, local_part, tensor_digests

_NAMED = 3  # tensors, in the message
_GRADIENT = "the gradient of "
_ATTRIBUTE = "attribute "
_RESUMED = "in the second step after a start from a checkpoint: "


class RepeatCheck:
    """For the main thread. All ranks take the step twice, without having to agree on it."""

    def __init__(self, runtime: Runtime, state: TrackedState) -> None:
        self._runtime = runtime
        self._state = state
        self._worker = runtime.worker
        self._is_over = (
            not runtime.settings.repeat_check or runtime.settings.evidence
        )  # `relight prove` sees for itself
        self._first: dict[str, int] | None = None
        self._generation = 0  # in which that was computed

    @property
    def is_due(self) -> bool:
        """True if the step that is about to begin may be made twice."""
        return not self._is_over and self._worker.version == self._step

    @property
    def _step(self) -> int:
        # All ranks know the version from which a generation began, but after a recovery only of 0 and 1 that the job's
        # second step comes after it.
        return self._worker.began + 1 if self._runtime.generation == 1 else 1

    def wants_another(self) -> bool:
        """At the end of a block, in front of its barrier: whether this attempt is to be undone and made again.

        Raises UsageError if it was, early in a job, and this one ended with other bits.
        """
        worker, runtime = self._worker, self._runtime
        if self._is_over:
            return False
        if worker.version > self._step:
            self._is_over = True
            return False
        if runtime.closed or worker.version != self._step:
            return False
        if self._generation != runtime.generation:  # a replacement has not computed the step before
            self._first, self._generation = self._digests(), runtime.generation
            return True
        if self._first is not None:
            self._compare(self._first, self._digests())
            self._first = None
        return False

    def see_undone(self, lasting: str | None, doubt: str) -> None:
        """The attempt is undone. Raises UsageError for `lasting`, early in a job: why the next one may differ.

        Where other threads of the script run, such as one that writes statistics, these may have made the change, and
        no step depend on it: then it is a doubt. `doubt`: a reason that ends no job.
        """
        if lasting is not None and _has_threads_of_script():
            self._runtime.notices.doubt(lasting)
        elif lasting is not None:
            self._object(lasting)
        if doubt:
            self._runtime.notices.doubt(doubt)

    def _object(self, reason: str) -> None:
        """A step cannot be repeated. Raises UsageError, early in a job."""
        if self._worker.version <= 1:
            raise UsageError(reason)
        self._runtime.notices.doubt(f"{_RESUMED}{reason}")

    def _digests(self) -> dict[str, int]:
        """Digests of each tensor and object after the step, by its path."""
        state = self._state
        own = Flat({"buffers": state.rank_private.tree()["buffers"], "per_rank": state.rank_private.tree()["per_rank"]})
        found = {**state.replica.digests_by_tensor()}
        found |= {path: _digest(tensor) for path, tensor in zip(own.paths, own.tensors, strict=True)}
        if not self._worker.wrote:
            for (owner, name), parameter in state.slots.parameters.items():
                if parameter.grad is not None:
                    found[f"{_GRADIENT}{owner}.{name}"] = _digest(local_part(parameter.grad))
        for name, thing in (*state.objects.items(), *state.per_rank.items()):
            found |= {f"{_ATTRIBUTE}{name}.{attribute}": count for attribute, count in _counts_of(thing)}
        return found

    def _compare(self, first: Mapping[str, int], second: Mapping[str, int]) -> None:
        different = [path for path in second if first.get(path) != second[path]]
        different += [path for path in first if path not in second]
        if not different:
            return
        if all(path.startswith(_GRADIENT) for path in different):
            self._object(
                f"step {self._worker.version} adds to the gradients that the step before has left, and a recovery "
                "throws gradients away. Accumulate inside one step: relight.Training(accumulate=K) gives the block a "
                "list of K batches, and the optimizer steps once at its end (docs/TRAINING.md)"
            )
            return
        if lacking := [path.removeprefix(_ATTRIBUTE) for path in different if path.startswith(_ATTRIBUTE)]:
            self._object(
                f"{', '.join(lacking[:_NAMED])}: counted by steps, and not in the state_dict() of what was "
                "handed over. A step that is computed again counts twice, and a replacement counts from the beginning. "
                "Put it into state_dict() and load_state_dict(), or do not hand the object over: attributes of objects "
                "of your own are carried (docs/CARRIED.md)"
            )
            return
        more = f" and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
        self._object(
            f"step {self._worker.version} was computed twice from the same start, and ended with other bits in "
            f"{', '.join(different[:_NAMED])}{more}. So a recovery could not repeat a step: the block reads something "
            "that its own first attempt has changed, and that relight does not put back. Often this is a generator of "
            "random numbers without a seed, a file, a clock, gradients that the step before has left (zero them in "
            "it), or an object that was not handed over: hand it over, declare it (training.carry(...)), or compute it "
            f"from step.number (docs/CARRIED.md). {_of_device()}"
        )


def _counts_of(thing: Any) -> Iterator[tuple[str, int]]:
    """Whole numbers that an object of a class of the script's has as attributes."""
    if is_user_type(type(thing)):
        for name, value in list(getattr(thing, "__dict__", {}).items()):
            if type(value) is int:
                yield name, value


def _has_threads_of_script() -> bool:
    """Return whether a thread other than the main one runs code of the script."""
    frames = sys._current_frames()
    frames.pop(threading.main_thread().ident or 0, None)
    return any(map(_runs_script, frames.values()))


def _runs_script(frame: FrameType) -> bool:
    return next(iter(user_frames(frame)), None) is not None


def _of_device() -> str:
    """Return what to do if the device, and not the script, computes other bits."""
    goes_on = (
        "`relight run --no-repeat-check` goes on, and bits after a failure may differ from those of an undisturbed run"
    )
    if accelerator().is_host or torch.are_deterministic_algorithms_enabled():
        return f"If operations of the device are not deterministic, {goes_on}"
    return (
        f"Or the device ({accelerator().type}) adds in any order, as many of its operations do unless the script calls "
        f"torch.use_deterministic_algorithms(True) (docs/GPU.md). Otherwise {goes_on}"
    )


def _digest(tensor: Any) -> int:
    if not isinstance(tensor, torch.Tensor):
        return 0
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(tensor_digests(tensor)))
