"""A fault as a value: what, to whom, where, and at which attempt or recovery. No randomness, no process here."""

import enum

import msgspec


class Action(enum.StrEnum):
    KILL = "kill"  # SIGKILL
    SEGFAULT = "segfault"  # SIGSEGV
    FREEZE = "freeze"  # SIGSTOP
    RAISE = "raise"  # an exception in the script
    EXIT = "exit"  # os._exit(0), too early
    LOOP = "loop"  # busy forever
    BLOCK = "block"  # waits forever for I/O that never comes
    FLIP_PARAMETER = "flip-parameter"  # one bit of a parameter changes, unnoticed
    FLIP_OPTIMIZER = "flip-optimizer"  # the same in the optimizer's state
    FLIP_BUFFER = "flip-buffer"  # the same in a buffer that all replicas share
    SLOW = "slow"  # from here on it takes longer at this point, in every step
    CUT = "cut"  # loses this rank's side of the collective in flight; the process itself lives


class Point(enum.StrEnum):
    """Places where a worker looks whether a fault is planned for it."""

    BETWEEN_STEPS = "BETWEEN_STEPS"
    FORWARD = "FORWARD"
    BACKWARD = "BACKWARD"
    BEFORE_BARRIER = "BEFORE_BARRIER"  # prepared, barrier not entered
    BARRIER = "BARRIER"  # own contribution sent, proof not yet received
    OPTIMIZER = "OPTIMIZER"  # barrier passed, write begun
    AFTER_WRITE = "AFTER_WRITE"  # optimizer done, step not committed
    AFTER_STEP = "AFTER_STEP"  # committed
    # stages of a recovery
    STOP = "STOP"  # Stop received, not yet acknowledged
    FINISH = "FINISH"  # a prepared survivor is about to finish its step
    REFORM = "REFORM"  # about to form the new group
    RESTORE_SEND = "RESTORE_SEND"  # a source, half of the bytes sent
    RESTORE_RECEIVE = "RESTORE_RECEIVE"  # a target, half of the bytes received
    ROLLBACK = "ROLLBACK"
    RESUME = "RESUME"  # Resume received, the step not yet started
    # life of a standby
    WARMUP = "WARMUP"
    IDLE = "IDLE"  # warm, waiting
    PROMOTED = "PROMOTED"  # just after it was given a rank


STEP_POINTS = frozenset(
    {
        Point.BETWEEN_STEPS,
        Point.FORWARD,
        Point.BACKWARD,
        Point.BEFORE_BARRIER,
        Point.BARRIER,
        Point.OPTIMIZER,
        Point.AFTER_WRITE,
        Point.AFTER_STEP,
    }
)
RECOVERY_POINTS = frozenset(
    {
        Point.STOP,
        Point.FINISH,
        Point.REFORM,
        Point.RESTORE_SEND,
        Point.RESTORE_RECEIVE,
        Point.ROLLBACK,
        Point.RESUME,
        Point.PROMOTED,
    }
)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One planned fault.

    In a step it strikes `rank` at `point` of `step`, the `attempt`-th time (0: the first) that step is tried.
    In a recovery it strikes at `point` of recovery number `recovery` (1: the first of the job), whichever rank
    gets there if `rank` is None. A standby's fault names its index in `standby`.
    """

    action: Action
    point: Point
    rank: int | None = None
    step: int | None = None
    attempt: int = 0
    recovery: int | None = None
    standby: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a job: listed ones, and random ones that are a pure function of (seed, step, attempt)."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0
    rate_per_step: float = 0.0
    world_size: int = 0
