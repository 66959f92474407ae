"""Schedule to seconds: what an update costs in each form, and which form to take. Pure, without torch or a clock.

The simulation follows the schedule's dependencies alone, as the engine does. Tests hold closed forms against it, for
equal full buckets whose stages have hardware of their own.
"""

import heapq
from collections.abc import Mapping, Sequence

import msgspec

from relight.errors import UsageError
from relight.transfer.plan.plan import DEFAULT_BUCKET_BYTES, Bucket
from relight.transfer.plan.schedule import Form, Kind, Operation, Schedule, make_schedule
from relight.words import count

NEAR = 1.02  # a simpler form that takes at most so many times the fastest one's time is preferred


class Costs(msgspec.Struct, frozen=True):
    """Seconds of one full bucket in each stage when nothing else runs."""

    h2d_seconds: float
    broadcast_seconds: float
    reload_seconds: float  # one engine alone
    engines: int = 1  # reload at once
    cores: int | None = None  # None: every stage has its own hardware; otherwise all stages share so many cores
    crowding: float = 1.0  # how many times as long a copy takes while every core copies: they share the memory
    operation_seconds: float = 0.0  # of each operation, whatever its size
    bucket_bytes: int = DEFAULT_BUCKET_BYTES  # of a full bucket


class Span(msgspec.Struct, frozen=True, array_like=True):
    """The time in which one operation of a schedule runs."""

    index: int
    start_seconds: float
    end_seconds: float


class Choice(msgspec.Struct, frozen=True):
    """A form, and the reason for it."""

    form: Form
    seconds: float
    why: str
    seconds_by_form: dict[str, float]  # in the order of Form


def check_costs(costs: Costs) -> None:
    """Raises UsageError for numbers that no machine has."""
    times = (costs.h2d_seconds, costs.broadcast_seconds, costs.reload_seconds, costs.operation_seconds)
    if not all(0 <= seconds < float("inf") for seconds in times):
        raise UsageError(f"stages of {times} seconds: none may be negative, infinite or not a number")
    if costs.engines < 1 or costs.bucket_bytes < 1 or (costs.cores is not None and costs.cores < 1):
        raise UsageError("engines, cores and the bytes of a bucket must be at least 1")
    if not 1 <= costs.crowding < float("inf"):
        raise UsageError(
            f"copies that take {costs.crowding} times as long while every core copies: at least 1 is needed"
        )


def simulate(schedule: Schedule, buckets: Sequence[Bucket], costs: Costs) -> tuple[Span, ...]:
    """Return the time of each operation: at once when all it waits for is over, slower while it shares cores.

    What runs at once shares the cores evenly, and the bandwidth of memory, so every running operation does the same
    work in the same time. `done` is the work that one which began at zero would have done by now; each ends when `done`
    has grown by its own work.
    """
    check_costs(costs)
    if len(buckets) != schedule.buckets:
        raise UsageError(f"a schedule for {schedule.buckets} buckets cannot move {len(buckets)}")
    waits = [len(operation.after) for operation in schedule.operations]
    next_ones: list[list[int]] = [[] for _ in schedule.operations]
    for operation in schedule.operations:
        for index in operation.after:
            next_ones[index].append(operation.index)
    starts, ends = [0.0] * len(waits), [0.0] * len(waits)
    now = done = 0.0
    busy_cores = 0
    running: list[tuple[float, int]] = []  # (`done` at its end, index)
    ready = [index for index, count in enumerate(waits) if not count]
    while ready or running:
        for index in ready:
            operation = schedule.operations[index]
            starts[index] = now
            busy_cores += _cores_of(operation, costs)
            heapq.heappush(running, (done + _work_seconds(operation, buckets, costs), index))
        end, index = heapq.heappop(running)
        slowdown = _slowdown(busy_cores, costs)
        now, done = now + (end - done) * slowdown, end
        ends[index] = now
        busy_cores -= _cores_of(schedule.operations[index], costs)
        ready = []
        for other in next_ones[index]:
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)
    return tuple(Span(index, start, end) for index, (start, end) in enumerate(zip(starts, ends, strict=True)))


def predict(schedule: Schedule, buckets: Sequence[Bucket], costs: Costs) -> float:
    """Seconds from the first operation's start to the last one's end."""
    return max((span.end_seconds for span in simulate(schedule, buckets, costs)), default=0.0)


def choose(buckets: Sequence[Bucket], costs: Costs, *, devices: int, from_host: bool = False) -> Choice:
    """The fastest form; a simpler one if it is within 2 %."""
    seconds = {}
    for form in Form:
        schedule = make_schedule(form, devices=devices, buckets=len(buckets), from_host=from_host)
        seconds[form] = predict(schedule, buckets, costs)
    limit = NEAR * min(seconds.values())
    chosen = next(form for form in Form if seconds[form] <= limit)
    why = explain(chosen, seconds, buckets, costs, devices=devices, from_host=from_host)
    return Choice(chosen, seconds[chosen], why, {str(form): seconds[form] for form in Form})


def explain(
    form: Form,
    seconds: Mapping[Form, float],
    buckets: Sequence[Bucket],
    costs: Costs,
    *,
    devices: int,
    from_host: bool = False,
) -> str:
    """Explain the choice of a form in one sentence: which stage hides which, and the time of the other forms."""
    if len(buckets) < 2:
        return f"{form}: there is nothing to overlap in {count(len(buckets), 'bucket')}"
    fulls = sum(bucket.nbytes for bucket in buckets) / costs.bucket_bytes
    broadcast = fulls * costs.broadcast_seconds + len(buckets) * costs.operation_seconds
    reload = fulls * costs.reload_seconds + len(buckets) * costs.operation_seconds
    reload *= 1.0 if costs.cores is None else max(1.0, costs.engines / costs.cores)
    rounds = -(-len(buckets) // devices)
    copy = rounds * (costs.h2d_seconds + costs.operation_seconds)
    stages = (("broadcasts", broadcast), ("reloads", reload))
    (shorter, short), (longer, long) = sorted(stages, key=lambda stage: stage[1])
    hidden = f"the {shorter} ({describe_seconds(short)} in all) hide behind the {longer} ({describe_seconds(long)})"
    others = ", ".join(f"{other} {describe_seconds(seconds[other])}" for other in seconds if other is not form)
    shared = "" if costs.cores is None else f" on {count(costs.cores, 'shared core')}"
    took = f"{describe_seconds(seconds[form])}{shared} against {others}"
    if seconds[form] > NEAR * min(seconds.values()):
        return f"{form}, as asked for: {took}"
    if form is Form.SERIAL:
        return f"serial: overlapping the stages would gain at most 2 %: {took}"
    if form is Form.TWO_STAGE:
        rest = "" if from_host else ", and copying during broadcasts as well would gain at most 2 %"
        return f"two-stage: {hidden}{rest}: {took}"
    rest = (
        "" if from_host else f", and the next round's copies ({describe_seconds(copy)}) behind both if the bus is free"
    )
    return f"three-stage: {hidden}{rest}: {took}"


def describe_seconds(seconds: float) -> str:
    """ "1.5 s" or "12.3 ms"."""
    if seconds >= 99.95:
        return f"{seconds:.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{seconds * 1e3:.3g} ms"


def _work_seconds(operation: Operation, buckets: Sequence[Bucket], costs: Costs) -> float:
    seconds = {
        Kind.H2D: costs.h2d_seconds,
        Kind.BROADCAST: costs.broadcast_seconds,
        Kind.RELOAD: costs.reload_seconds,
    }[operation.kind]
    return costs.operation_seconds + seconds * (buckets[operation.bucket].nbytes / costs.bucket_bytes)


def _slowdown(busy_cores: int, costs: Costs) -> float:
    """Return how much longer an operation takes beside others; `busy_cores` are those that all of them want.

    A core alone does not use up the bandwidth of memory. How much of it the last core finds missing is measured
    (`Costs.crowding`); in between it is taken to grow with each core.
    """
    if costs.cores is None:
        return 1.0
    others = min(busy_cores, costs.cores) - 1
    crowding = 1.0 + (costs.crowding - 1.0) * others / (costs.cores - 1) if others > 0 else 1.0
    return max(1.0, busy_cores / costs.cores) * crowding


def _cores_of(operation: Operation, costs: Costs) -> int:
    return costs.engines if operation.kind is Kind.RELOAD else 1
