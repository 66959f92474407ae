"""Drives the parts of one worker as its loop does, in one process: transaction, carried state, the watch of writes.

A `Job` is left alone, is interrupted in one step, or is the replacement of one that was lost at a `Moment`.
"""

import os
import random
import sys
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from relight.errors import UsageError
from relight.script_files import adopt_caller
from relight.training.carried.carried import Carried
from relight.training.carried.code.source import mentioned
from relight.training.state.tracked import TrackedState
from relight.training.transaction.needs import listed
from relight.training.transaction.transaction import Transaction
from relight.training.worker.step.left_gradients import LeftGradients
from relight.training.worker.step.writes import WriteWatch
from relight.transfer.io.codec import decode_tree, encode_tree, unflatten
from tests.training.carried_loop import Interrupted

TWICE = 1  # the step that every job computes twice
ABOVE = 1000  # added to the number of a step, for draws between the head of the loop and the block
AT_BARRIER = -1  # where a failure may strike, besides the numbered points of a script


@dataclass(frozen=True)
class Moment:
    """A moment at which a rank is lost: all that its replacement gets, and what survivors tell."""

    place: str
    version: int  # from which training goes on
    private: bytes  # beside the page of the lost rank
    replica: bytes
    noticed: dict[str, int]
    told: str  # by a survivor, at the recovery
    late: bytes = b""  # values of a survivor that the lost rank had not changed yet
    files: dict[str, tuple[bytes, int]] = field(default_factory=dict)  # of the script: contents, and when they changed


class ScriptFiles:
    """The files of a script in one directory, as a process finds them."""

    def __init__(self, directory: Path, contents: dict[str, tuple[bytes, int]] | None = None) -> None:
        """`contents`: as a process left them that was lost; a first one finds none."""
        self._directory = directory
        for path in directory.glob("*"):
            path.unlink()
        for name, (held, changed_ns) in (contents or {}).items():
            (directory / name).write_bytes(held)
            os.utime(directory / name, ns=(changed_ns, changed_ns))

    def make(self, name: str, contents: bytes) -> str:
        """Return the path of a file, which has these contents if it is new."""
        self._directory.mkdir(exist_ok=True)
        path = self._directory / name
        if not path.exists():
            path.write_bytes(contents)
        return str(path)

    def contents(self) -> dict[str, tuple[bytes, int]]:
        """Return what is in them now, and when they were changed."""
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in self._directory.glob("*")}


class JobStep:
    """One attempt at a step."""

    def __init__(self, job: "Job", number: int, *, warmup: bool = False) -> None:
        self._job, self.number, self.warmup = job, number, warmup
        self.committed = False

    def __enter__(self) -> float:
        self._job.enter(self, sys._getframe(1))
        return 1.0 + self.number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._job.exit(self, error)

    def point(self, place: int) -> None:
        """Stands where a failure elsewhere may strike."""
        self._job.pass_point(self, place)


class Job:
    """Offers steps to a script, in which it is called `steps`."""

    def __init__(
        self,
        until: int,
        *,
        fails_in: tuple[int, int] | None = None,
        lost: Moment | None = None,
        recorded: Collection[str] = (),
    ) -> None:
        """`fails_in`: a step, and a point of it. `lost`: this is a replacement. `recorded`: where it may be lost.

        There it tells what it would at a recovery: "before step 3", "after step 3".
        """
        self.until, self._lost, self._recorded = until, lost, recorded
        self._fails_in = fails_in
        self.moments: list[Moment] = []
        self.told: list[str] = []  # refusals are raised
        self.version = self._commits = 0
        self.launches = self.launches_of_all = 0
        self._page: dict[int, bytes] = {}  # private state by version
        self._in_step = self._passed = self._wrote = False
        self._is_struck = False  # by a failure that this step has not noticed
        self._moved = (-1, "")  # the newest step in which values moved on that are only shown
        self._is_moved = False  # what is the rank's own, by code between two steps
        self._first_end: bytes | None = None  # of the step that is computed twice

    # --- what a script sees -----------------------------------------------------------------------------------------
    def offers(self, directory: Path) -> dict[str, Any]:
        """Names for the script, whose files lie in this directory."""
        self._files = ScriptFiles(directory, self._lost.files if self._lost is not None else None)
        return {"steps": self, "hand_over": self.hand_over, "make_file": self._files.make}

    def hand_over(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """As to `relight.Training`."""
        self.state = state = TrackedState({"net": net}, {"opt": optimizer}, {}, {})
        self.carried = Carried(
            self._is_foreign,
            lambda _, text: self.told.append(text),
            is_id=lambda number: number in state.slots.by_id,
            parts=state.references,
        )
        self.transaction = Transaction(state, self, self.carried)
        left = LeftGradients(
            state.optimizers,
            self.told.append,
            state.gradients,
            lambda pattern: mentioned(["carried_script"], pattern),  # and not in this module
        )
        self.writes = WriteWatch(
            state.name_of_writer,
            lambda thing: state.identities.name_of(thing) is not None,
            self._before_write,
            self.transaction.before_unusual_writes,
            lambda: self._in_step,
            left,
        )

    def _is_foreign(self, thing: Any) -> bool:
        if type(thing).__module__.startswith("relight.training.carried."):
            return False
        is_of_job = isinstance(thing, types.GeneratorType) and thing.gi_code is Job.__call__.__code__
        is_own = type(thing).__module__.startswith("relight.") or isinstance(thing, (JobStep, Job))
        return is_own or self.state.identities.keeps(thing) or is_of_job

    def __call__(self) -> Iterator[JobStep]:
        adopt_caller(sys._getframe(1))
        self.writes.install()
        self.transaction.install()
        try:
            if self._lost is None:
                self._keep(0)
            else:
                self._begin_turn(sys._getframe(1), is_rehearsing=True)
                yield JobStep(self, 0, warmup=True)
                self.state.attributes.roll_back()
                self._take(self._lost)
            while self.version < self.until:
                self._begin_turn(sys._getframe(1))
                yield JobStep(self, self.version)
            self._recover_late()
            self._tell(self.carried.turn(sys._getframe(1)) or self.carried.end(computed=self._commits > 0))
            self._tell_later()
        finally:
            self.close()

    def close(self) -> None:
        """Remove all hooks; the script may have failed inside of its loop."""
        self.carried.leave()
        self.transaction.remove()
        self.writes.remove()

    # --- a step ---------------------------------------------------------------------------------------------------
    def _begin_turn(self, frame: FrameType, *, is_rehearsing: bool = False) -> None:
        if not is_rehearsing:
            self.transaction.undo_code()
            self._see_code()
            self._recover_late()
        doubt = self.carried.turn(frame)
        if not is_rehearsing:
            self._tell_later()
        self.carried.compare(self.version)
        if not is_rehearsing:
            self._tell(doubt)
            if self._is_to_be_kept():
                self._keep(self.version, between=True)
        self.carried.remember(compared=not is_rehearsing)
        if self.carried.computes_above:
            seed_step(ABOVE + self.version)
        if is_rehearsing:
            self.state.attributes.begin(learning=True)
            return
        if f"before step {self.version}" in self._recorded:
            self._record("before", self._risk_now())
        self.transaction.begin(keeps_gradients=self.version == TWICE)

    def _see_code(self) -> None:
        """See what code between two steps has changed."""
        changed = self.transaction.see_code_between()
        self._is_moved = self.state.rank_private.see_code(self.version, changed) or self._is_moved

    def _tell_later(self) -> None:
        """Tell what was seen since the last step, or have a survivor tell it if a rank may be lost there."""
        later = self.carried.doubts.later()
        if self.moments and self.moments[-1].place == f"after step {self.version - 1}":
            self.moments[-1] = replace(self.moments[-1], told=self.moments[-1].told or later)
        else:
            self._tell(later)

    def _is_to_be_kept(self) -> bool:
        needs_keeping = self.carried.needs_keeping
        of_torch, of_script = self.state.settings.moved(), self.carried.moved()
        if (moved := of_script or of_torch) is not None:
            self._moved = self.version - 1, moved
            if self.moments and self.moments[-1].version == self.version:  # a survivor tells of a rank lost just there
                self.moments[-1] = replace(self.moments[-1], told=self.moments[-1].told or moved)
        is_moved, self._is_moved = self._is_moved, False
        return is_moved or needs_keeping

    def enter(self, step: JobStep, frame: FrameType) -> None:
        seed_step(step.number)
        self._in_step, self._passed, self._wrote = True, False, False
        self.writes.begin_step()
        doubt = self.carried.enter(frame, self.version)
        if not step.warmup:
            self._tell(doubt)

    def pass_point(self, step: JobStep, place: int) -> None:
        if self._fails_in != (step.number, place) or step.warmup or not self._in_step:
            return
        self._fails_in = None
        if self._passed:  # every rank is prepared, so the step is finished
            self._is_struck = True
        else:
            raise Interrupted

    def _before_write(self, writer: str, optimizer: str | None) -> None:
        is_rehearsing = self._lost is not None
        if optimizer is not None:
            self.state.members.see(optimizer)
        if self._passed:
            return
        if not is_rehearsing and self.transaction.before_write(writer, optimizer):
            self._pass(early=True)
        self._wrote = True

    def _pass(self, *, early: bool) -> None:
        """The barrier."""
        self.transaction.prepare(early=early)
        self._keep(self.version + 1, early=early)
        if self._fails_in == (self.version, AT_BARRIER):
            self._fails_in = None
            raise Interrupted
        self.transaction.count(self.transaction.number, 1)
        attributes = self.state.rank_attributes.number()
        self.state.rank_attributes.compare(attributes, attributes, 1)
        self._passed = True

    def exit(self, step: JobStep, error: BaseException | None) -> bool:
        try:
            if step.warmup:
                return self._end_rehearsal(error)
            if error is None:
                self._complete(step)
            elif isinstance(error, Interrupted):
                self._undo()
            return error is None or isinstance(error, Interrupted)
        except Interrupted:
            self._undo()
            return True
        finally:
            self._in_step = False

    def _end_rehearsal(self, error: BaseException | None) -> bool:
        self.carried.roll_back()
        if error is None:
            return False
        return isinstance(error, Exception) and not isinstance(error, UsageError)

    def _complete(self, step: JobStep) -> None:
        if step.number == TWICE and not self._passed and self._wants_another():
            return
        if not self._passed:
            self._pass(early=False)
        private = self._page[self.version + 1]  # if the rank is lost before the end of the step
        self.transaction.commit()
        self.version += 1
        surprise = self.transaction.surprise
        if surprise:
            self._keep(self.version)
        self.carried.commit()
        self.writes.end_step()
        self._commits += 1
        self._in_step, step.committed = False, True
        is_recorded = f"after step {self.version - 1}" in self._recorded
        if is_recorded or self._is_struck:
            self._is_to_be_kept()
        if is_recorded:
            self._record("after", surprise or self._risk_now(), private)

    def _wants_another(self) -> bool:
        """Compute a step twice, as every job does. Raises UsageError if its bits differ."""
        state = self.state
        gradients = [] if self._wrote else [parameter.grad for parameter in state.parameters]
        end = encode_tree([state.replica.digests_by_tensor(), state.rank_private.tree(), gradients], "state")
        first, self._first_end = self._first_end, end
        if first is not None:
            if first != end:
                raise UsageError("the step was computed twice from the same start, and ended with other bits")
            return False
        self.transaction.roll_back()
        state.gradients.put_back()
        if (lasting := self.carried.roll_back()) is not None:
            raise UsageError(lasting)
        self._tell(self.carried.doubts.of_undone())
        self.transaction.begin_code_after_undo()
        return True

    # --- failures -------------------------------------------------------------------------------------------------
    def _undo(self) -> None:
        """A failure elsewhere has interrupted the step."""
        self.transaction.give_memory_back()
        if changed := self.transaction.unimaged_changes():
            self._tell(f"torn: {listed(changed)}")
        self._tell(self.transaction.changed_state())
        self._tell(self.carried.roll_back())
        self._recover()
        self.transaction.begin_code_after_undo()

    def _recover_late(self) -> None:
        """Recover from a failure at the end of the step before, after the code between steps."""
        if self.moments and self.moments[-1].place == f"after step {self.version - 1}":
            lost = self.moments[-1]
            told = lost.told or self._risk_now()
            late = self.carried.keeper.late_values(decode_tree(lost.private).get("carried"))
            self.moments[-1] = replace(
                lost, replica=self._replica(), noticed=self.carried.noticed(), told=told, late=late
            )
        if self._is_struck:
            self._recover()

    def _recover(self) -> None:
        self._is_struck, self._first_end = False, None
        self._tell(self._risk_now())
        self.transaction.roll_back()
        self.state.gradients.clear()
        self.transaction.reset()

    def _take(self, lost: Moment) -> None:
        """Be the rank that was lost."""
        state = self.state
        self._lost = None
        tree, tensors, meta = decode_tree(lost.replica)
        meta = msgspec.msgpack.decode(meta)
        with torch.no_grad():
            for path, tensor in state.replica.destination().items():
                if path in tensors and tensors[path].shape == tensor.shape:  # received in place
                    tensor.copy_(tensors[path])
                    tensors[path] = tensor
        self._tell(state.adopt(unflatten(tree, list(tensors.values())), meta))
        state.adopt_attributes(meta)
        private = decode_tree(lost.private)
        state.rank_private.adopt(private)
        self._tell(self.carried.adopt(private.get("carried"), lost.noticed, lost.version, lost.late))
        for doubt in state.rank_private.lost(private.get("late")):
            self._tell(doubt)
        self._tell(state.adopt_besides(meta))
        self.transaction.close()
        state.gradients.clear()
        state.gradients.adopt_missing(meta["missing_gradients"])
        self._tell(lost.told)
        self._tell(self._standing_risk())
        self.transaction.reset()
        self.version = lost.version
        self._page[self.version] = lost.private

    def _keep(self, version: int, *, early: bool = False, between: bool = False) -> None:
        carried = self.carried.capture(early=early, compared=between)
        late = {} if between else {"late": self.state.rank_private.late}
        tree = {**self.state.rank_private.tree(), **late, **({"carried": carried} if carried else {})}
        self._page[version] = encode_tree(tree, "rank-private state")

    def _replica(self) -> bytes:
        """Return a copy of the state that all ranks have."""
        flat = self.state.replica.flat()
        tensors = {path: tensor.clone() for path, tensor in zip(flat.paths, flat.tensors, strict=True)}
        meta = msgspec.msgpack.encode(self.state.describe("", self.until))
        return encode_tree((flat.tree, tensors, meta), "replica")

    def _record(self, place: str, told: str, private: bytes | None = None) -> None:
        self.moments.append(
            Moment(
                place=f"{place} step {self.version - (place == 'after')}",
                version=self.version,
                private=private or self._page[self.version],
                replica=self._replica(),
                noticed=self.carried.noticed(),
                told=told,
                files=self._files.contents(),
            )
        )

    def _risk_now(self) -> str:
        """Return what a rank tells at a recovery."""
        step, moved = self._moved
        return self._standing_risk() or (moved if step >= self.version - 1 >= 0 else "")

    def _standing_risk(self) -> str:
        return self.carried.doubts.risk(recovers=True) or self.state.attributes.risk()

    def _tell(self, why: str | None) -> None:
        if why:
            self.told.append(why)


def seed_step(number: int) -> None:
    """Draws of a step follow from its number, as in a job."""
    random.seed(number)
    torch.manual_seed(number)
    np.random.seed(number)


def make_module(path: str, offers: dict[str, Any]) -> types.ModuleType:
    """A module for a script, which code in it finds by its name."""
    made = types.ModuleType("carried_script")
    vars(made).update({"__file__": path, **offers})
    sys.modules["carried_script"] = made
    return made
