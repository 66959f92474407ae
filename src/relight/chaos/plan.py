"""Faults in words and back, and the lookups that tell a worker whether one is planned for it, here and now.

A sentence is easier to type, to read in a report and to keep in a bug's schedule than a tuple of options:
`kill rank 2 in BACKWARD of step 13`, `freeze rank 1 in STOP of recovery 2`, `kill standby 0 when idle`.
"""

import difflib
import hashlib
import re
import struct
from collections.abc import Iterable

from relight.core.protocol.fault import RECOVERY_POINTS, STEP_POINTS, Action, Fault, Plan, Point
from relight.errors import UsageError

ACTION_WORDS = {
    Action.KILL: "SIGKILL: gone without a message",
    Action.SEGFAULT: "SIGSEGV, as from a bad native extension",
    Action.FREEZE: "SIGSTOP: alive, but stopped",
    Action.RAISE: "an exception in the script (written `raise in rank 2 ...`)",
    Action.EXIT: "os._exit(0), as if it had finished",
    Action.LOOP: "an endless loop",
    Action.BLOCK: "waits forever for an event that never comes",
    Action.FLIP_PARAMETER: "one bit of a parameter changes silently (see --verify-every)",
    Action.FLIP_OPTIMIZER: "one bit of the optimizer's state changes silently",
    Action.FLIP_BUFFER: "one bit of a buffer that all ranks share changes silently",
    Action.SLOW: "from that step on, 200 ms longer at this point of each step (see --replace-slow)",
    Action.CUT: "loses its side of the collective in flight, but lives",
}
POINT_WORDS = {
    Point.BETWEEN_STEPS: "before a step begins; reports call this OUTSIDE, or the code before step N",
    Point.FORWARD: "while the loss is computed",
    Point.BACKWARD: "while gradients are computed and reduced",
    Point.BEFORE_BARRIER: "gradient complete, barrier not entered",
    Point.BARRIER: "own part of the barrier sent, proof not yet received",
    Point.OPTIMIZER: "barrier passed, parameters half written",
    Point.AFTER_WRITE: "parameters written, step not committed",
    Point.AFTER_STEP: "step committed",
    Point.STOP: "Stop received, not yet paused",
    Point.FINISH: "a survivor about to finish its step by itself",
    Point.REFORM: "about to form the new group",
    Point.RESTORE_SEND: "a source that has sent half of the state",
    Point.RESTORE_RECEIVE: "a target that has received half of the state",
    Point.ROLLBACK: "putting data position and random streams back",
    Point.RESUME: "Resume received, step not yet begun",
    Point.WARMUP: "a standby in its warm-up step",
    Point.IDLE: "a warm standby that waits",
    Point.PROMOTED: "a standby that was just given a rank",
}
EXAMPLES = (
    "kill rank 2 in BACKWARD of step 13",
    "raise in rank 0 in FORWARD of step 5 attempt 1",
    "exit rank 0 between steps at step 7",
    "segfault rank 1 after step 7",
    "freeze rank 1 in STOP of recovery 2",
    "flip-parameter rank 1 in FORWARD of step 9",
    "slow rank 2 in FORWARD of step 20",
    "kill the restore source during the next restore",
    "block the restore target during restore 3",
    "kill the replacement when promoted in recovery 1",
    "kill standby 0 when idle",
)

_STEP = re.compile(
    r"rank (?P<rank>\d+) "
    r"(?:in (?P<point>\w+) of step|(?P<between>between steps at) step|(?P<after>after) step) (?P<step>\d+)"
    r"(?: attempt (?P<attempt>\d+))?"
)
_RECOVERY = re.compile(r"(?:rank (?P<rank>\d+)|any rank) in (?P<point>\w+) of recovery (?P<recovery>\d+)")
_RESTORE = re.compile(r"the restore (?P<end>source|target) during (?:the next restore|restore (?P<recovery>\d+))")
_PROMOTED = re.compile(r"the replacement when promoted in recovery (?P<recovery>\d+)")
_STANDBY = re.compile(r"standby (?P<standby>\d+) (?P<where>when idle|in warmup|in idle)", re.IGNORECASE)
_ACTION = re.compile(r"(?P<verb>[\w-]+)(?: in(?= (?:rank|the|any|standby)\b))? (?P<rest>.+)")
_MAX_NUMBER = 2**62


def parse_fault(sentence: str) -> Fault:
    """The fault that a sentence describes. Raises UsageError with the nearest words that would have made sense."""
    text = " ".join(sentence.split())
    found = _ACTION.fullmatch(text)
    if found is None:
        raise _misunderstood(sentence, "expected an action, then who and where")
    action = _action(found["verb"].lower(), sentence)
    rest = found["rest"]
    if match := _STEP.fullmatch(rest):
        if match["between"]:
            point = Point.BETWEEN_STEPS
        elif match["after"]:
            point = Point.AFTER_STEP
        else:
            point = _point(match["point"], STEP_POINTS, sentence, "inside a step")
        step, attempt = _number(match["step"], sentence), _number(match["attempt"] or "0", sentence)
        return Fault(action=action, point=point, rank=_number(match["rank"], sentence), step=step, attempt=attempt)
    if match := _RECOVERY.fullmatch(rest):
        point = _point(match["point"], RECOVERY_POINTS, sentence, "inside a recovery")
        rank = None if match["rank"] is None else _number(match["rank"], sentence)
        return Fault(action=action, point=point, rank=rank, recovery=_recovery(match["recovery"], sentence))
    if match := _RESTORE.fullmatch(rest):
        point = Point.RESTORE_SEND if match["end"] == "source" else Point.RESTORE_RECEIVE
        return Fault(action=action, point=point, recovery=_recovery(match["recovery"] or "1", sentence))
    if match := _PROMOTED.fullmatch(rest):
        return Fault(action=action, point=Point.PROMOTED, recovery=_recovery(match["recovery"], sentence))
    if match := _STANDBY.fullmatch(rest):
        point = Point.WARMUP if "warmup" in match["where"].lower() else Point.IDLE
        return Fault(action=action, point=point, standby=_number(match["standby"], sentence))
    raise _misunderstood(sentence, f"cannot tell who {action.value!r} is for, and where")


def describe_fault(fault: Fault) -> str:
    """The sentence for a fault; `parse_fault` gives the fault back."""
    verb = "raise in" if fault.action is Action.RAISE else fault.action.value
    if fault.standby is not None:
        return f"{verb} standby {fault.standby} {'in warmup' if fault.point is Point.WARMUP else 'when idle'}"
    if fault.recovery is not None:
        return f"{verb} {_describe_in_recovery(fault)}"
    attempt = f" attempt {fault.attempt}" if fault.attempt else ""
    if fault.point is Point.BETWEEN_STEPS:
        return f"{verb} rank {fault.rank} between steps at step {fault.step}{attempt}"
    if fault.point is Point.AFTER_STEP:
        return f"{verb} rank {fault.rank} after step {fault.step}{attempt}"
    return f"{verb} rank {fault.rank} in {fault.point.value} of step {fault.step}{attempt}"


def _describe_in_recovery(fault: Fault) -> str:
    if fault.rank is not None:
        return f"rank {fault.rank} in {fault.point.value} of recovery {fault.recovery}"
    match fault.point:
        case Point.RESTORE_SEND:
            return f"the restore source during restore {fault.recovery}"
        case Point.RESTORE_RECEIVE:
            return f"the restore target during restore {fault.recovery}"
        case Point.PROMOTED:
            return f"the replacement when promoted in recovery {fault.recovery}"
    return f"any rank in {fault.point.value} of recovery {fault.recovery}"


def check_fault(fault: Fault, world_size: int, standbys: int) -> None:
    """Raise UsageError if the fault names a rank or standby that the job does not have: it would never strike."""
    if fault.rank is not None and fault.rank >= world_size:
        raise UsageError(
            f"--chaos {describe_fault(fault)!r}: there is no rank {fault.rank}; ranks are 0 to {world_size - 1} "
            "(--nproc-per-node)"
        )
    if fault.standby is not None and fault.standby >= standbys:
        have = f"standbys are 0 to {standbys - 1}" if standbys else "the job has no standby"
        raise UsageError(f"--chaos {describe_fault(fault)!r}: there is no standby {fault.standby}; {have} (--standby)")


# --- lookups ------------------------------------------------------------------------------------------------------
def planned_in_step(plan: Plan, *, rank: int, point: Point, step: int, attempt: int) -> Fault | None:
    """The fault that strikes `rank` at `point` of this attempt at `step`, listed or random."""
    candidates = [*plan.faults]
    drawn = random_fault(plan.seed, plan.rate_per_step, step, plan.world_size)
    if drawn is not None:
        candidates.append(drawn)
    for fault in candidates:
        if (fault.point, fault.step, fault.attempt, fault.rank) == (point, step, attempt, rank):
            return fault
    return None


def planned_in_recovery(plan: Plan, *, rank: int, point: Point, recovery: int) -> Fault | None:
    """The fault that strikes `rank` at `point` of recovery number `recovery` (1: the first of the job)."""
    for fault in plan.faults:
        if (fault.point, fault.recovery) == (point, recovery) and fault.rank in (None, rank):
            return fault
    return None


def planned_for_standby(plan: Plan, *, standby: int, point: Point) -> Fault | None:
    """The fault that strikes standby number `standby` at `point`."""
    for fault in plan.faults:
        if (fault.point, fault.standby) == (point, standby):
            return fault
    return None


_RANDOM_ACTIONS = (Action.KILL, Action.SEGFAULT, Action.FREEZE, Action.EXIT)
_RANDOM_POINTS = tuple(sorted(STEP_POINTS))


def random_fault(seed: int, rate: float, step: int, world_size: int) -> Fault | None:
    """The random fault of a step, if it has one: the same on every rank and in every replay.

    It strikes the first attempt only, so that the step can be repeated.
    """
    if rate <= 0.0 or world_size < 1:
        return None
    digest = hashlib.blake2b(f"relight chaos {seed} {step}".encode(), digest_size=32).digest()
    chance, action, point, rank = struct.unpack("<4Q", digest)
    if chance >= rate * 2**64:
        return None
    return Fault(
        action=_RANDOM_ACTIONS[action % len(_RANDOM_ACTIONS)],
        point=_RANDOM_POINTS[point % len(_RANDOM_POINTS)],
        rank=rank % world_size,
        step=step,
    )


# --- words --------------------------------------------------------------------------------------------------------
def _action(word: str, sentence: str) -> Action:
    try:
        return Action(word)
    except ValueError:
        raise _misunderstood(sentence, f"{word!r} is no action", word, [action.value for action in Action]) from None


def _point(word: str, points: frozenset[Point], sentence: str, where: str) -> Point:
    names = sorted(point.value for point in points)
    if word.upper() in names:
        return Point(word.upper())
    raise _misunderstood(sentence, f"{word!r} is no point {where}", word.upper(), names)


def _number(digits: str, sentence: str) -> int:
    number = int(digits) if len(digits) < 20 else _MAX_NUMBER
    if number >= _MAX_NUMBER:
        raise _misunderstood(sentence, f"{digits[:20]} is too large a number")
    return number


def _recovery(digits: str, sentence: str) -> int:
    number = _number(digits, sentence)
    if number < 1:
        raise _misunderstood(sentence, "recoveries are counted from 1")
    return number


def _misunderstood(sentence: str, why: str, word: str = "", words: Iterable[str] = ()) -> UsageError:
    listed = list(words)
    if listed:
        near = difflib.get_close_matches(word, listed, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return UsageError(f"--chaos {sentence!r}: {why}; {hint}Known: {', '.join(listed)}")
    near = difflib.get_close_matches(" ".join(sentence.split()), EXAMPLES, n=1, cutoff=0.0)
    return UsageError(f"--chaos {sentence!r}: {why}; for example {near[0]!r}. All words: `relight chaos --explain`")
