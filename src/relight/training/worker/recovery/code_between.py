"""Code between two epochs, which a replacement can run: the state with which it began, and results of its collectives.

Kept here until the first step after it is committed, and given to a replacement. A rank waits in a collective until all
others have come to it, if the code has changed no tensor so far that replicas share, and reads nothing that the steps
have set and no rank keeps: docs/PROTOCOL.md, "A collective between two steps".
"""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from relight.core.protocol.commands import Restore
from relight.core.worker.events import CodeRan
from relight.errors import RestoreError
from relight.training.carried.carried import Carried
from relight.training.collectives.policy import Cuttable
from relight.training.collectives.shared_results import (
    SharedResult,
    came_to_another,
    came_to_fewer,
    give,
)
from relight.training.process.private import PrivateState
from relight.training.process.runtime import Runtime
from relight.training.state.tracked import TrackedState
from relight.training.worker.recovery.calls import Call, Calls
from relight.transfer.io.codec import Flat, decode_tree, encode_tree

# Code of torch that cannot be left in the middle of a call, and gone on with after a recovery has reset its objects.
_IN_PROGRESS = tuple(f"/torch/{path}" for path in ("autograd/", "distributed/fsdp/", "distributed/tensor/", "_dynamo/"))
_IN_FORWARD = "/torch/nn/parallel/"  # DDP's reducer has no part in a pass without gradients


class CodeBetween:
    """Knows whether the script is in such code, and may wait there, or has run it: `begin` and `end` are called."""

    def __init__(self, runtime: Runtime, state: TrackedState, private: PrivateState, carried: Carried) -> None:
        self._runtime = runtime
        self._state = state
        self._private = private
        self._carried = carried
        self.recover: Callable[[int], bool] = lambda _: False  # in the collective of a number; False: go on alone
        self._has_integration = any(hasattr(thing, "join_training") for thing in state.per_rank.values())
        self._is_open = False
        self._calls = Calls()
        self._to_give: list[SharedResult] = []  # to this replacement, of those that the other ranks have completed
        self._is_given_all = False  # the other ranks have run all of this code
        self._tree: Any = None  # of the state with which it began: what is no tensor
        self._digest = ""  # of that state
        self._description: dict[str, Any] = {}  # of the state with which the code began, besides tensors

    def begin(self) -> None:
        """The steps of an epoch are over, here or in the process whose rank this one has taken."""
        self._forget()
        if not self._is_known or self._private.streams.have_moved:
            return
        worker, state = self._runtime.worker, self._state
        self._is_open = True
        flat = state.replica.flat()
        self._tree = flat.tree
        self._digest = state.replica.digest(flat=flat)
        self._description = {
            **state.describe(worker.lineage, worker.until),
            "noticed": self._private.noticed(),
            **self._private.late_values(worker.version),
            "runs_code": True,
        }

    def end(self) -> None:
        """The next epoch's steps begin. Raises RuntimeError in a replacement that has called too few collectives."""
        if self._to_give:
            raise came_to_fewer(self._to_give)
        self._is_given_all = False
        if not self._is_open:
            return
        self._is_open = False
        if not self._calls.are_known:
            self._calls.stop()
        self._runtime.handle(CodeRan(self._calls.number if self._calls.can_repeat else -1))

    def _forget(self) -> None:
        self._is_open, self._calls, self._tree = False, Calls(), None

    def follows(self, version: int) -> bool:
        """Return whether code that a replacement can run comes after the step to `version`."""
        return self._carried.ends_epoch(version) and version < self._runtime.worker.until and self._is_known

    @property
    def _is_known(self) -> bool:
        """True if a replacement can run this code, and a recovery resets nothing that it uses."""
        state = self._state
        divides = state.sharded or state.pipelines or state.zero or self._has_integration
        is_alone = self._runtime.is_rehearsing or self._runtime.world_size == 1
        return self._carried.keeper.ends.lacks == [] and not (divides or is_alone)

    # --- for a replacement ------------------------------------------------------------------------------------------
    def began_with(self) -> Flat:
        """Return the state with which the code began, of tensors that are as they were then."""
        flat = self._state.replica.flat()
        flat.tree = self._tree
        return flat

    def has_begun_state(self) -> bool:
        """Return whether the tensors are still those with which the code began, however they were written."""
        if self._tree is None:
            return False
        with torch.inference_mode(mode=False):
            try:
                return self._state.replica.digest(flat=self.began_with()) == self._digest
            except Exception:  # of a state_dict() of the script's, in the middle of a step
                return False

    def describe(self) -> dict[str, Any]:
        """Describe the state with which the code began, and what its collectives have given since, for replacements."""
        given = [[one.operation, [tensor.cpu() for tensor in one.tensors]] for one in self._calls.results]
        return {**self._description, "given": encode_tree(given, "results of collectives") if given else b""}

    def take(self, meta: dict[str, Any], order: Restore) -> None:
        """Take what `describe` returned on another rank, as this order says. Raises RestoreError."""
        given = meta.get("given", b"") if order.runs_code else b""
        results = [SharedResult(*one) for one in decode_tree(given)] if given else []
        if order.meets_at and len(results) != order.meets_at - 1:
            raise RestoreError(f"results of {len(results)} collectives came, not of {order.meets_at - 1}")
        completed = self._runtime.worker.at_collective - 1 if self._runtime.rank in order.given else 0
        self._to_give = results[completed:]
        self._is_given_all = order.runs_code and not order.meets_at

    def forget_given(self) -> None:
        """Drop what was taken by an order that came to nothing."""
        self._to_give, self._is_given_all = [], False

    # --- for process groups -----------------------------------------------------------------------------------------
    @property
    def may_wait(self) -> bool:
        """True if the collective that is called next, or was called last, is one in which this rank can wait."""
        return self._is_open and self._calls.can_repeat

    def come(self, operation: str, arguments: Sequence[Any], ranks: int) -> bool:
        """The script calls a collective that a recovery cannot repeat. Return True if it is given its result here.

        `operation`: empty if this is one of c10d's functions, which calls collectives itself. `ranks`: of the group.
        Raises RuntimeError in a replacement that comes to another collective than the other ranks did.
        """
        if self._to_give and operation:
            give(self._to_give[0], operation, arguments)
            del self._to_give[0]
            self._calls.stop()
            return True
        if self._is_given_all and operation:
            raise came_to_another(operation)
        if self._is_open:
            self._calls.add(Call(operation, arguments, is_of_all=ranks == self._runtime.world_size))
        return False

    def launched(self, work: Cuttable) -> None:
        """The collective that came last is under way."""
        if self._calls.under_way:
            self._calls.under_way[-1].work = work

    def complete(self, work: Cuttable) -> None:
        """A collective is over, and its result has not been changed yet."""
        self._calls.complete(work)

    def took_future(self) -> None:
        """The script has taken a collective's future, and may learn of its end from that instead of waiting for it."""
        self._calls.stop()

    def meet(self) -> bool:
        """Recover inside a collective that was cut, and call again those under way. False: go on alone."""
        calls = self._calls
        if not (self._can_meet() and self.recover(calls.waits_in)):
            return False
        under_way = calls.under_way
        calls.stop()  # it is tried once
        for call in under_way:
            call.put_back()
        for call in under_way:
            if call.work is not None:
                call.work.call_again()
        return True

    def _can_meet(self) -> bool:
        if not (self._is_open and self._calls.waits_in):
            return False
        if threading.current_thread() is not threading.main_thread() or _is_in_progress():
            return False
        return self.has_begun_state()


def _is_in_progress() -> bool:
    """Return whether the collective is called by something of torch that a recovery resets."""
    parts = (*_IN_PROGRESS, _IN_FORWARD) if torch.is_grad_enabled() else _IN_PROGRESS
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if any(part in frame.f_code.co_filename for part in parts):
            return True
    return False
