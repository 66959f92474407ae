from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from relight.core.account.report import FailureReport, JobReport
from relight.core.protocol.position import Phase
from relight.timeline.model.spans import Activity, Chunk, History, Selection, Span, SpanCollector
from tests.timeline import jobs
from tests.timeline.jobs import MS, WALL, Worker


def activities(history: History, rank: int) -> list[tuple[str, int, int]]:
    """(activity, start, end) of a row, in ms."""
    row = next(row for row in history.rows if row.rank == rank)
    return [(str(s.activity), round(s.start_ns / MS), round(s.end_ns / MS)) for s in row.spans]


def versions(history: History, rank: int) -> list[int]:
    row = next(row for row in history.rows if row.rank == rank)
    return [span.version for span in row.spans]


# --- the three figures ------------------------------------------------------------------------------------------
def test_a_plain_step_passes_the_barrier_and_then_writes() -> None:
    history = jobs.history(*jobs.plain())
    expected = [
        ("FORWARD", 0, 40),
        ("BACKWARD", 40, 80),
        ("BARRIER", 80, 85),
        ("OPTIMIZER", 85, 95),
        ("OUTSIDE", 95, 100),
    ]
    assert activities(history, 0)[:5] == expected
    assert activities(history, 1)[:5] == expected
    assert versions(history, 0)[:6] == [0, 0, 0, 0, 1, 1]
    assert activities(history, 0)[-1] == ("DONE", 300, 320)  # up to the end of the job
    assert history.strikes == ()


def test_a_failure_in_forward_is_rolled_back_to_the_start_of_its_step() -> None:
    history = jobs.history(*jobs.rolled_back())
    assert activities(history, 1)[5:] == [
        ("FORWARD", 700, 730),
        ("DEAD", 730, 752),
        ("PARKED", 752, 790),  # the replacement, blank
        ("PARKED", 790, 800),  # restored
        ("FORWARD", 800, 840),
        ("BACKWARD", 840, 880),
        ("BARRIER", 880, 885),
        ("OPTIMIZER", 885, 895),
        ("OUTSIDE", 895, 900),
        ("FORWARD", 900, 940),
        ("BACKWARD", 940, 980),
        ("BARRIER", 980, 985),
        ("OPTIMIZER", 985, 995),
        ("OUTSIDE", 995, 1050),
    ]
    assert activities(history, 0)[5:9] == [
        ("FORWARD", 700, 740),
        ("BACKWARD", 740, 750),
        ("PARKED", 750, 800),
        ("FORWARD", 800, 840),
    ]
    assert versions(history, 0)[5:9] == [7, 7, 7, 7]
    (strike,) = history.strikes
    assert (strike.rank, strike.at_ns, strike.kind) == (1, 730 * MS, "killed")


def test_a_death_told_before_the_last_stamp_hides_no_activity() -> None:
    """The clocks of the dead process and of the agent that saw it differ by more than the activity lasted."""
    report, chunks = jobs.rolled_back()
    (killed,) = report.failures
    early = msgspec.structs.replace(killed, noticed_seconds=killed.noticed_seconds - 0.031)
    history = jobs.history(msgspec.structs.replace(report, failures=(early,)), chunks)
    row = history.rows[1].spans
    dead = next(index for index, span in enumerate(row) if span.activity is Activity.DEAD)
    assert (row[dead - 1].activity, row[dead - 1].start_ns // MS) == (Activity.FORWARD, 700)


def test_a_failure_in_optimizer_is_taken_over_at_the_next_version() -> None:
    history = jobs.history(*jobs.taken_over())
    assert activities(history, 2)[5:12] == [
        ("FORWARD", 700, 740),
        ("BACKWARD", 740, 780),
        ("BARRIER", 780, 785),
        ("OPTIMIZER", 785, 790),
        ("DEAD", 790, 807),
        ("PARKED", 807, 840),
        ("PARKED", 840, 850),
    ]
    assert versions(history, 2)[9:13] == [0, 0, 8, 8]  # no process, blank, restored, training
    assert ("OPTIMIZER", 812, 822) in activities(history, 1)  # a prepared survivor finishes on its own
    assert versions(history, 1)[-5:] == [9, 9, 9, 9, 10]


# --- who holds a rank -------------------------------------------------------------------------------------------
def test_warm_up_of_a_standby_is_no_rank_s_work() -> None:
    history = jobs.history(*jobs.rolled_back())
    row = next(row for row in history.rows if row.rank == 1)
    assert min(span.start_ns for span in row.spans if span.process == "s0") == 752 * MS


def test_a_standby_that_was_never_needed_has_no_row() -> None:
    report, chunks = jobs.plain()
    standby = Worker("s0", -1).stamp(5, Phase.STARTING, 0).stamp(50, Phase.STANDBY, 0)
    assert jobs.history(report, [*chunks, standby.chunk()]) == jobs.history(report, chunks)


def test_a_fresh_process_is_seen_starting_once_its_predecessor_is_dead() -> None:
    first = Worker("w0", 0).step(0, 0)
    fresh = Worker("f0", 0).stamp(90, Phase.STARTING, 0).stamp(200, Phase.PARKED, 0).stamp(220, Phase.FORWARD, 1)
    report = JobReport(
        job="j",
        started_wall=WALL,
        wall_seconds=0.3,
        world_size=1,
        failures=(failure("w0", at=0.100),),
    )
    assert activities(jobs.history(report, [first.chunk(), fresh.chunk()]), 0)[-4:] == [
        ("OUTSIDE", 95, 100),
        ("STARTING", 100, 200),
        ("PARKED", 200, 220),
        ("FORWARD", 220, 300),
    ]


def test_a_rank_that_nobody_takes_stays_dead_to_the_end() -> None:
    report = JobReport(job="j", started_wall=WALL, wall_seconds=0.3, world_size=1, failures=(failure("w0", at=0.1),))
    assert activities(jobs.history(report, [Worker("w0", 0).step(0, 0).chunk()]), 0)[-1] == ("DEAD", 100, 300)


def test_a_process_without_a_trace_still_leaves_a_hole() -> None:
    report = JobReport(
        job="j",
        started_wall=WALL,
        wall_seconds=0.4,
        world_size=1,
        failures=(failure("w0", at=0.1), failure("s0", at=0.2)),
    )
    workers = [Worker("w0", 0).step(0, 0), Worker("s1", 0).stamp(250, Phase.PARKED, 1)]
    history = jobs.history(report, [w.chunk() for w in workers])
    assert activities(history, 0)[-3:] == [("DEAD", 100, 200), ("DEAD", 200, 250), ("PARKED", 250, 400)]


def test_a_broken_connection_kills_nobody() -> None:
    report, chunks = jobs.plain()
    broken = FailureReport(
        number=1,
        rank=0,
        process="w0",
        kind="communication",
        step=1,
        phase="BACKWARD",
        evidence="the network",
        generation=1,
        noticed_seconds=0.15,
    )
    history = jobs.history(
        JobReport(job="j", started_wall=WALL, wall_seconds=report.wall_seconds, world_size=2, failures=(broken,)),
        chunks,
    )
    assert all(span.activity is not Activity.DEAD for row in history.rows for span in row.spans)
    assert history.strikes[0].at_ns == 150 * MS


def test_a_clock_set_anew_during_the_job_does_not_bend_the_row() -> None:
    chunk = Worker("w0", 0).step(0, 0).chunk()
    earlier, later = chunk.records[:2], chunk.records[2:]
    one = [
        Chunk("w0", 0, earlier, chunk.clock_offset_ns),
        Chunk("w0", 0, later, chunk.clock_offset_ns - 10**12),
    ]
    report = JobReport(job="j", started_wall=WALL)
    assert jobs.history(report, one) == jobs.history(report, [chunk])


def test_a_phase_from_a_newer_version_is_drawn_as_outside() -> None:
    chunk = Chunk("w0", 0, ((0, 1, 0, 77, 0), (5, 1, 0, 2, 0)))
    collector = SpanCollector(0)
    collector.add(chunk)
    assert collector.history(JobReport(job="j")).rows[0].spans[0].activity is Activity.OUTSIDE


def test_spans_read_well() -> None:
    span = Span(0, 40 * MS, Activity.FORWARD, 7, 7, 1, "w0")
    assert str(span) == "FORWARD of step 7 at version 7, 0.000 to 40.000 ms (generation 1, w0)"


# --- properties -------------------------------------------------------------------------------------------------
PHASES = [int(phase) for phase in Phase if phase is not Phase.STANDBY]


@st.composite
def processes(draw: st.DrawFn) -> list[Chunk]:
    """Chunks of a few processes at a few ranks; steps go up, and at most one back from the highest so far."""
    chunks = []
    for index in range(draw(st.integers(1, 4))):
        at, step = draw(st.integers(0, 50)), draw(st.integers(0, 3))
        peak = step
        phases = draw(st.lists(st.sampled_from([*PHASES, int(Phase.STANDBY)]), min_size=1, max_size=25))
        records = []
        for phase in phases:
            records.append((at, 1, step, phase, step))
            at += draw(st.integers(0, 10))
            step = max(0, peak - 1, step + draw(st.sampled_from([-1, 0, 0, 0, 1, 2])))
            peak = max(peak, step)
        rank = draw(st.integers(-1, 2))
        while records:
            size = draw(st.integers(1, 10))
            chunks.append(Chunk(f"p{index}", rank, tuple(records[:size])))
            records = records[size:]
    return chunks


def failure(process: str, at: float) -> FailureReport:
    return FailureReport(
        number=1,
        rank=0,
        process=process,
        kind="killed",
        step=0,
        phase="FORWARD",
        evidence="killed by SIGKILL",
        generation=1,
        noticed_seconds=at,
    )


def collect(chunks: list[Chunk], report: JobReport, selection: Selection | None = None) -> History:
    collector = SpanCollector(0, selection)
    for chunk in chunks:
        collector.add(chunk)
    return collector.history(report)


@given(processes(), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 200)), max_size=3))
def test_spans_of_a_row_never_overlap_and_are_ordered(chunks: list[Chunk], struck: list[tuple[int, int]]) -> None:
    failures = tuple(failure(f"p{index}", at / 1e9) for index, at in struck)
    for row in collect(chunks, JobReport(job="j", failures=failures)).rows:
        assert all(span.start_ns < span.end_ns for span in row.spans)
        assert all(one.end_ns <= other.start_ns for one, other in pairwise(row.spans))


@given(processes())
def test_a_row_held_by_one_process_covers_its_records(chunks: list[Chunk]) -> None:
    alone = [Chunk("p0", 0, chunk.records) for chunk in chunks if chunk.process == "p0"]
    records = [record for chunk in alone for record in chunk.records]
    standby = max((i for i, record in enumerate(records) if record[3] == Phase.STANDBY), default=-1)
    records = records[standby + 1 :]
    rows = collect(alone, JobReport(job="j")).rows
    spans = rows[0].spans if rows else ()
    if not records or records[0][0] == records[-1][0]:
        assert spans == ()
        return
    assert (spans[0].start_ns, spans[-1].end_ns) == (records[0][0], records[-1][0])
    assert all(one.end_ns == other.start_ns for one, other in pairwise(spans))
    for record, after in pairwise(records):
        if record[0] < after[0]:
            (held,) = [span for span in spans if span.start_ns <= record[0] < span.end_ns]
            assert (held.activity, held.step, held.version) == (Phase(record[3]).name, record[2], record[4])


@given(processes(), st.integers(0, 8), st.integers(0, 3))
def test_a_selection_leaves_out_nothing_it_selects(chunks: list[Chunk], first: int, more: int) -> None:
    report = JobReport(job="j")
    everything = collect(chunks, report)
    selected = collect(chunks, report, Selection(steps=((first, first + more),)))
    for whole, part in zip(everything.rows, selected.rows, strict=True):
        wanted = [span for span in whole.spans if first <= span.step <= first + more]
        assert [(s.activity, s.end_ns) for s in part.spans] == [(s.activity, s.end_ns) for s in wanted]


def test_a_selection_by_time_keeps_what_overlaps() -> None:
    report, chunks = jobs.plain()
    history = jobs.history(report, chunks, Selection(times_ns=((45 * MS, 82 * MS),)))
    assert activities(history, 0) == [("BACKWARD", 40, 80), ("BARRIER", 80, 85)]
