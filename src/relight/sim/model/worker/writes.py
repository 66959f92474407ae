"""The writes of a simulated worker: a step's collectives, its writes, the barrier among them, and the commit.

The barrier stands before the last write, or at the end of the step. Writes before it can be undone, from pre-images of
what they write; the one after it is finished by each rank alone. See sim/model/shapes.py.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from relight.core.protocol import events as ev
from relight.core.protocol.position import Phase
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.core.worker.states import State as Stand
from relight.sim.model.contents import (
    State,
    contribution,
    late_private,
    reduce,
)
from relight.sim.model.worker import barrier
from relight.sim.model.worker.barrier import approach_barrier, enter, outcome

if TYPE_CHECKING:
    from relight.sim.model.worker.worker import SimulatedWorker as Worker


# --- collectives --------------------------------------------------------------------------------------------------
def take_gradient(worker: "Worker") -> bool:
    """False if the collective broke, or the generation was closed meanwhile."""
    contributions = outcome(worker)
    if contributions is None:
        worker.await_stop()
        return False
    if worker.machine.closed:
        worker.interrupt()
        return False
    worker.gradient = reduce(contributions)
    worker.world.checker.wrong.follows(worker.gradient, *contributions.values())
    return True


# --- writes before the barrier ------------------------------------------------------------------------------------
def roll_back(worker: "Worker") -> None:
    """The step does not count: what it has written is undone."""
    if worker.undo is not None:
        worker.state, worker.undo = worker.undo, None


def drop_pre_images(worker: "Worker") -> None:
    """The step counts, or its state was replaced as a whole: pre-images are of no more use."""
    worker.undo, worker.surprised = None, False


def applied(worker: "Worker", *, last: bool) -> State:
    """The state after one more write."""
    written = worker.state.written(worker.gradient, last=last)
    worker.world.checker.wrong.follows(written.content, worker.state.content, worker.gradient)
    return written


def write_undoably(worker: "Worker") -> None:
    is_last = worker.shape.script.writes == 1 or worker.point == "SECOND"
    worker.state = applied(worker, last=is_last)
    _halve(worker)
    worker.go_to("LAST_WRITE" if is_last else "FIRST_WRITE")


def _halve(worker: "Worker") -> None:
    """A write begins, or ends."""
    before, worker.state = worker.state, worker.state.halved()
    worker.world.checker.wrong.follows(worker.state.content, before.content)


def _on_first_write(worker: "Worker") -> None:
    if worker.machine.closed or not _enter_second(worker, "SECOND"):
        worker.interrupt()


def _enter_second(worker: "Worker", kind: str) -> bool:
    """The collective between two writes, which depends on the first."""
    _halve(worker)
    mine = contribution(worker.state, worker.next_private, worker.rank)
    worker.world.checker.wrong.follows(mine, worker.state.content, worker.next_private)
    return enter(worker, kind, mine)


def _on_second(worker: "Worker") -> None:
    if not take_gradient(worker):
        return
    if worker.shape.is_at_end:
        write_undoably(worker)
    else:
        approach_barrier(worker)


def _on_last_write(worker: "Worker") -> None:
    if worker.machine.closed:
        worker.interrupt()
        return
    _halve(worker)
    change_private_late(worker)
    approach_barrier(worker)


def change_private_late(worker: "Worker") -> None:
    """Private state changes once more after the last write, in some scripts."""
    if worker.shape.script.changes_private_late:
        before, worker.next_private = worker.next_private, late_private(worker.next_private)
        worker.world.checker.wrong.follows(worker.next_private, before)


def _report_broken_collective(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.world.send(
        worker,
        ev.CollectiveFailed(
            process=worker.name,
            rank=worker.rank,
            generation=worker.machine.generation,
            step=worker.state.version,
            summary="connection reset",
            noticed_ns=1,
        ),
    )


# --- the write after it, and the commit ---------------------------------------------------------------------------
def _finish_step(worker: "Worker", action: act.Action) -> None:
    """Nothing is to be done but to write."""


def _begin_write(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.page.torn = True
    worker.stamp(Phase.OPTIMIZER)
    worker.go_to("AFTER_WRITE" if worker.shape.is_at_end else "OPTIMIZER")


def _on_written(worker: "Worker") -> None:
    if worker.shape.needs_others_late:
        _be_surprised(worker)
    else:
        worker.go_to("AFTER_WRITE")


def all_written(worker: "Worker") -> State:
    """The state after all writes of the step, the last of which may be this one."""
    shape = worker.shape
    return worker.state if shape.is_at_end or shape.needs_others_late else applied(worker, last=True)


def finish(worker: "Worker") -> None:
    """The block ends."""
    surprise = ""
    if worker.shape.is_surprise:
        change_private_late(worker)
        if worker.world.pattern.learns:
            worker.learner = worker.learner.surprised(everywhere=worker.shape.needs_others_late)
        surprise = f"a failure struck in step {worker.state.version}, which was longer than had been learnt"
    worker.feed(happened.StepFinished(all_written(worker).committed().lineage, surprise))
    if worker.machine.state is Stand.OUTSIDE:
        worker.go_to("AFTER_STEP")


def _commit(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.state = all_written(worker).committed(finds=worker.agreed)
    worker.private = worker.next_private
    drop_pre_images(worker)
    page = worker.page
    page.version, page.torn = worker.state.version, False
    page.commits += 1
    worker.stamp(Phase.OUTSIDE)
    worker.world.note("commit", f"{worker.name} (rank {worker.rank}) {worker.state.version}")
    worker.world.checker.committed(worker)


def _report_resumed(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.world.send(
        worker,
        ev.StepResumed(
            process=worker.name,
            rank=worker.rank,
            generation=worker.machine.generation,
            step=worker.machine.started,
            resumed_ns=1,
            forward_ns=2,
            commit_ns=3,
        ),
    )


# --- a surprise: more comes after the barrier than was learnt -----------------------------------------------------
def _be_surprised(worker: "Worker") -> None:
    """Mark a write without a pre-image, whose rest needs the others: a rank that is interrupted now is torn."""
    worker.surprised = worker.knows = True
    worker.learner = worker.learner.surprised(everywhere=True)
    worker.state = applied(worker, last=False)
    _halve(worker)
    if not _enter_second(worker, "EXTRA"):
        worker.interrupt()


def _on_extra(worker: "Worker") -> None:
    if take_gradient(worker):
        worker.state = applied(worker, last=True)
        worker.go_to("EXTRA_WRITE")


def _on_extra_written(worker: "Worker") -> None:
    worker.go_to("AFTER_WRITE")


def _keep_private_anew(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.page.keep_private(worker.machine.version, worker.next_private)


def doubt(worker: "Worker", action: act.Doubt) -> None:
    """Notices.doubt of training/process."""
    if all(said.reason != action.reason for said in worker.doubts):
        step = max(0, worker.machine.started)
        said = ev.BitsDoubted(process=worker.name, rank=worker.rank, step=step, reason=action.reason)
        worker.doubts += (said,)
        worker.world.checker.doubts(worker)
        worker.world.send(worker, said)


# --- publishing (training/publish/publishing.py) ------------------------------------------------------------------
def publish(worker: "Worker") -> None:
    # After all went back engines may have newer versions: they keep them.
    is_new = worker.lower is None or worker.world.checker.shown <= worker.state.version
    if worker.rank == 0 and not worker.machine.is_standby and worker.staged != worker.state.version and is_new:
        stage(worker, worker.state)


def stage(worker: "Worker", state: State) -> None:
    """Send a version to the engines, which hold it back."""
    worker.staged, worker.content = state.version, state.content


def confirm(worker: "Worker", version: int) -> None:
    """Every rank is known to hold `version`: the engines may answer with it."""
    if worker.rank == 0 and 0 <= worker.staged <= version:
        worker.world.checker.published(worker, worker.staged, worker.content)


def _confirm_version(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    confirm(worker, worker.state.version)


def _interrupt(worker: "Worker") -> None:
    worker.interrupt()


POINTS: dict[str, Callable[["Worker"], None]] = {
    **barrier.POINTS,
    "FIRST_WRITE": _on_first_write,
    "SECOND": _on_second,
    "LAST_WRITE": _on_last_write,
    "VERDICT": _interrupt,
    "DIFFERS": _interrupt,
    "OPTIMIZER": _on_written,
    "EXTRA": _on_extra,
    "EXTRA_WRITE": _on_extra_written,
    "AFTER_WRITE": finish,
}
CARRY_OUTS: dict[type[act.Action], Callable[..., happened.Event | None]] = {
    **barrier.CARRY_OUTS,
    act.KeepPrivateAnew: _keep_private_anew,
    act.Doubt: doubt,
    act.ReportBrokenCollective: _report_broken_collective,
    act.FinishStep: _finish_step,
    act.ConfirmVersion: _confirm_version,
    act.BeginWrite: _begin_write,
    act.Commit: _commit,
    act.ReportResumed: _report_resumed,
}
