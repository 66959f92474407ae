"""Code between two epochs, which a replacement can run: the state with which it began, and its first collective.

A rank waits in that collective until all others have come to it, if the code has changed nothing so far that replicas
share, and reads nothing that the steps have set and no rank keeps: docs/PROTOCOL.md, "A collective between two steps".
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from relight.training.carried.carried import Carried
from relight.training.process.private import PrivateState
from relight.training.process.runtime import Runtime
from relight.training.state.tracked import TrackedState

_MOST_BYTES = 2**26  # of tensors that a collective gets
# Code of torch that cannot be left in the middle of a call, and gone on with after a recovery has reset its objects.
_IN_PROGRESS = tuple(
    f"/torch/{path}" for path in ("autograd/", "nn/parallel/", "distributed/fsdp/", "distributed/tensor/", "_dynamo/")
)


class CodeBetween:
    """Says whether the script is in such code, and may wait there. `begin` and `end` are called around it."""

    def __init__(self, runtime: Runtime, state: TrackedState, private: PrivateState, carried: Carried) -> None:
        self._runtime = runtime
        self._state = state
        self._private = private
        self._carried = carried
        self.recover: Callable[[], bool] = lambda: False  # inside the collective; False: go on alone
        self._has_integration = any(hasattr(thing, "join_training") for thing in state.per_rank.values())
        self._is_open = False
        self._is_new = True  # the code was not run yet
        self._has_come = False  # to a collective: the state of a script without one is not looked at
        self._collectives = 0  # that the code has come to
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] | None = []  # what the first one gets; None: too much
        self._digest = ""
        self._has_shown = False  # this process has seen the code come to a collective in which it could wait
        self.description: dict[str, Any] = {}  # of the state with which the code began, besides tensors

    def begin(self) -> None:
        """The steps of an epoch are over, here or in the process whose rank this one has taken."""
        self.end()
        if not (self._has_come or self._is_new) or not self._is_known or self._private.streams.have_moved:
            return
        worker, state = self._runtime.worker, self._state
        self._is_open = True
        self._digest = state.replica.digest()
        self.description = {
            **state.describe(worker.lineage, worker.until),
            "noticed": self._private.noticed(),
            **self._private.late_values(worker.version),
            "runs_code": True,
        }

    def end(self) -> None:
        """The next epoch's steps begin."""
        self._is_new = self._is_new and not self._is_open
        self._is_open, self._collectives, self._kept = False, 0, []

    def follows(self, version: int) -> bool:
        """Return whether such code comes after the step to `version`, and to a collective in which this rank waits."""
        is_last = version >= self._runtime.worker.until
        return self._has_shown and self._carried.ends_epoch(version) and not is_last and self._is_known

    @property
    def _is_known(self) -> bool:
        """True if a replacement can run this code, and a recovery resets nothing that it uses."""
        state = self._state
        divides = state.sharded or state.pipelines or state.zero or self._has_integration
        is_alone = self._runtime.is_rehearsing or self._runtime.world_size == 1
        return self._carried.keeper.ends.lacks == [] and not (divides or is_alone)

    # --- for process groups -----------------------------------------------------------------------------------------
    @property
    def may_wait(self) -> bool:
        """True if the collective that is called next, or was called last, is one in which this rank can wait."""
        return self._is_open and self._collectives <= 1

    def come(self, arguments: Iterable[Any]) -> None:
        """The script calls a collective that a recovery cannot repeat."""
        self._has_come = True
        if not self._is_open:
            return
        self._collectives += 1
        if self._collectives == 1:
            found = list(_tensors(arguments))
            is_small = sum(tensor.nbytes for tensor in found) <= _MOST_BYTES
            self._kept = [(tensor, tensor.detach().clone()) for tensor in found] if is_small else None
            self._has_shown = self._has_shown or self._can_meet()
        else:
            self._kept = []

    def meet(self) -> bool:
        """Recover inside the collective that was cut, so that it can be called again. False: go on alone."""
        if not (self._can_meet() and self.recover()):
            return False
        with torch.no_grad():
            for tensor, before in self._kept or ():
                tensor.copy_(before)
        return True

    def _can_meet(self) -> bool:
        if not (self._is_open and self._collectives == 1 and self._kept is not None):
            return False
        if threading.current_thread() is not threading.main_thread() or _is_in_progress():
            return False
        with torch.inference_mode(mode=False):
            return self._state.replica.digest() == self._digest


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for one in arguments:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)


def _is_in_progress() -> bool:
    """Return whether the collective is called by something of torch that a recovery resets."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if any(part in frame.f_code.co_filename for part in _IN_PROGRESS):
            return True
    return False
