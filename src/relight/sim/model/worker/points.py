"""Points at which the main thread of a simulated worker can stand: there faults strike and schedules differ."""

from relight.core.worker import actions as act
from relight.core.worker.states import State

# Where a main thread can stand, in the order in which it gets there. step.py and recovery.py say what comes next.
STEP_POINTS = (
    "OUTSIDE",  # between two steps
    "FORWARD",
    "GRADIENT",  # in the gradient's all-reduce
    "PREPARE",  # writing the private state of the next version
    "READY",  # prepared, barrier not entered
    "BARRIER",
    "VERDICT",  # a collective broke, and no order explains it yet
    "OPTIMIZER",
    "AFTER_WRITE",
    "AFTER_STEP",
    "DONE",  # last step committed, waiting for the others
)
# Only in steps of several writes, or with the barrier at the end; see shapes.py.
SHAPE_POINTS = (
    "FIRST_WRITE",  # inside a write before the barrier, after which more is to come
    "SECOND",  # in the collective between two writes
    "LAST_WRITE",  # inside the last write, before the barrier
    "EXTRA",  # in a collective after the barrier, against what was learnt
    "EXTRA_WRITE",  # inside a write after that
)
# Only where code between two steps calls a collective. Random schedules of other steps have no faults there.
SHARE_POINTS = (
    "SHARE",  # in a collective between two steps
    "UNSHARED",  # it broke, and no order explains it yet
)
# Only where ranks agree on buffers that are each rank's own.
AGREE_POINTS = ("AGREE",)
RECOVERY_POINTS = (
    "STOP",  # about to report its status
    "PARKED",  # waiting for the decision
    "FINISH",  # about to finish a step by itself
    "OBEY",  # about to form the new group
    "COPY",  # waiting for the source's state, or receiving it
    "TAKE_OVER",  # copied, not yet claimed
    "ROLLBACK",
    "REFORM",
    "RESTORED",  # restored, waiting for Resume; a source may still be serving
    "RESUME",
    "FAILED",  # could not restore, waiting for the next generation
    "PROMOTED",
)
OTHER_POINTS = (
    "START",  # waiting for a rank
    "LOADING",  # running the script up to the first step
    "ENTERED",
    "WARMUP",
    "IDLE",  # warm, waiting for a rank
    "RAISED",  # the script raised, and the process is about to exit
    "RELEASED",  # running to the end of the script
    "EXITING",
)
# At several hosts also PRIVATE: copied, and the rank-private state is on its way from another host. Where states are
# compared also COMPARE: in the all-reduce that does it, and DIFFERS: they differ, and no order explains it yet
# whose is wrong. With checkpoints also STAYS: the script raised, and the process waits for a last one, and SAVING: it
# waits for the pieces of others.
# Where nothing is waited for: the main thread goes on by itself, some time later.
PAUSES = frozenset(
    "OUTSIDE FORWARD PREPARE READY OPTIMIZER AFTER_WRITE AFTER_STEP STOP FINISH OBEY TAKE_OVER ROLLBACK RESUME "
    "PROMOTED LOADING WARMUP RAISED RELEASED EXITING FIRST_WRITE LAST_WRITE EXTRA_WRITE".split()
)
# A pause before an action is carried out.
PAUSE_BEFORE: dict[type[act.Action], str] = {
    act.KeepPrivate: "PREPARE",
    act.EnterBarrier: "READY",
    act.ReportStatus: "STOP",
    act.FinishStep: "FINISH",
    act.LeaveGroups: "OBEY",
    act.AwaitGroups: "ROLLBACK",
}
# Where a worker waits for an order.
WAITS = {
    State.ENTERED: "ENTERED",
    State.IDLE: "IDLE",
    State.DONE: "DONE",
    State.PARKED: "PARKED",
    State.RESTORED: "RESTORED",
    State.FAILED: "FAILED",
}
COLLECTIVES = frozenset("ASK GRADIENT SECOND COMPARE BARRIER AGREE EXTRA SHARE".split())
# Where patience ends, in seconds: runtime.VERDICT_SECONDS and `controller_timeout_seconds`, `restore_timeout_seconds`,
# the store's in group.py, and OTHERS_SECONDS in checkpoint/writer.py.
PATIENCE_SECONDS = {
    "VERDICT": 330.0,
    "UNSHARED": 330.0,
    "COPY": 120.0,
    "PRIVATE": 10.0,
    "REFORM": 60.0,
    "SAVING": 120.0,
}
CONNECT_SECONDS = 300.0
