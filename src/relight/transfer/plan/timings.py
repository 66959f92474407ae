"""The stages of an update as they were measured, added up: who worked how long on how much. Pure, without torch.

Stages come partly from other processes, so nothing of them is believed that cannot be: one of a bucket that does not
exist is left out.
"""

from collections.abc import Iterable, Sequence

import msgspec

from relight.transfer.plan.cost import Costs, Span, simulate
from relight.transfer.plan.plan import Bucket
from relight.transfer.plan.schedule import Form, Schedule, make_schedule
from relight.transfer.plan.update.result import Published, Stage

Interval = tuple[int, int]


class Work(msgspec.Struct, frozen=True):
    """The buckets that one source wrote, or one engine reloaded."""

    member: str
    buckets: int  # different ones
    repeats: int  # stages beyond the first of a bucket: it arrived damaged, or was written again
    nbytes: int  # of all these stages, with the gaps that alignment leaves
    seconds: float  # spent in them; what lies between them does not count


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The time of an update, by stages. The first three follow one another and are all of it."""

    ask_seconds: float  # until the first bucket was begun
    move_seconds: float  # from there until the last engine had the last bucket
    take_seconds: float  # from there until every engine answered with the version, or would not
    written: tuple[Work, ...]  # by source, in the order of their first bucket
    reloaded: tuple[Work, ...]  # by engine, by name
    write_seconds: float  # mean of one full bucket
    reload_seconds: float  # the same, of one engine
    overlapped: float  # share of the time of writing in which an engine reloaded, 0 to 1


def measure(result: Published, buckets: Sequence[Bucket]) -> Measured:
    """`buckets` as they were planned for this update: `plan_buckets(manifest, result.bucket_bytes)`."""
    writes, reloads = stages_of(result, "broadcast"), stages_of(result, "reload")
    end_ns = result.started_ns + round(result.seconds * 1e9)
    commits = [stage.start_ns for stage in result.stages if stage.kind == "commit"]
    begun_ns = min((stage.start_ns for stage in writes), default=min(commits, default=end_ns))
    moved_ns = max((stage.end_ns for stage in (*writes, *reloads)), default=begun_ns)
    written, reloaded = _work(writes, buckets), _work(reloads, buckets)
    return Measured(
        ask_seconds=max(0, begun_ns - result.started_ns) / 1e9,
        move_seconds=(moved_ns - begun_ns) / 1e9,
        take_seconds=max(0, end_ns - moved_ns) / 1e9,
        written=written,
        reloaded=tuple(sorted(reloaded, key=lambda work: work.member)),
        write_seconds=_mean_seconds(written, result.bucket_bytes),
        reload_seconds=_mean_seconds(reloaded, result.bucket_bytes),
        overlapped=overlap(writes, reloads),
    )


def plan_again(
    measured: Measured, buckets: Sequence[Bucket], bucket_bytes: int, form: Form = Form.TWO_STAGE
) -> tuple[Schedule, tuple[Span, ...]]:
    """Return schedule and times of the update if each bucket took the measured means, and nothing else took any time.

    The engines together are one device, whose IPC buffers all sources write into; no stage slows another one down,
    beyond what the means hold of it already.
    """
    schedule = make_schedule(form, devices=1, buckets=len(buckets), from_host=True)
    costs = Costs(0.0, measured.write_seconds, measured.reload_seconds, bucket_bytes=max(1, bucket_bytes))
    return schedule, simulate(schedule, buckets, costs)


def stages_of(result: Published, kind: str) -> list[Stage]:
    """The "broadcast" or "reload" stages, of buckets that exist, in the order of their starts."""
    found = (stage for stage in result.stages if stage.kind == kind and 0 <= stage.bucket < result.buckets)
    return sorted(found, key=lambda stage: (stage.start_ns, stage.end_ns, stage.member))


def overlap(stages: Iterable[Stage], others: Iterable[Stage]) -> float:
    """The share, 0 to 1, of the time of `stages` in which one of `others` ran too. No time at all: 0."""
    mine, theirs = _union(stages), _union(others)
    total = sum(end - start for start, end in mine)
    return _shared_ns(mine, theirs) / total if total else 0.0


def _work(stages: Iterable[Stage], buckets: Sequence[Bucket]) -> tuple[Work, ...]:
    by_member: dict[str, list[Stage]] = {}
    for stage in stages:
        by_member.setdefault(stage.member, []).append(stage)
    return tuple(_sum_up(member, its, buckets) for member, its in by_member.items())


def _sum_up(member: str, stages: Sequence[Stage], buckets: Sequence[Bucket]) -> Work:
    different = len({stage.bucket for stage in stages})
    return Work(
        member=member,
        buckets=different,
        repeats=len(stages) - different,
        nbytes=sum(buckets[stage.bucket].nbytes for stage in stages),
        seconds=sum(stage.end_ns - stage.start_ns for stage in stages) / 1e9,
    )


def _mean_seconds(works: Sequence[Work], bucket_bytes: int) -> float:
    fulls = sum(work.nbytes for work in works) / max(1, bucket_bytes)
    return sum(work.seconds for work in works) / fulls if fulls else 0.0


def _union(stages: Iterable[Stage]) -> list[Interval]:
    """Return the intervals in which any of them ran: apart from each other, in order."""
    merged: list[Interval] = []
    for start, end in sorted((stage.start_ns, stage.end_ns) for stage in stages):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _shared_ns(one: Sequence[Interval], other: Sequence[Interval]) -> int:
    shared = i = j = 0
    while i < len(one) and j < len(other):
        shared += max(0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return shared
