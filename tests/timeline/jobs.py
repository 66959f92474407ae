"""Handmade jobs: the traces that workers would have stamped, and the report that goes with them. Times in ms."""

from pathlib import Path

import msgspec

from relight.core.account.report import (
    FailureReport,
    JobReport,
    RecoveryReport,
    RecoveryStages,
    encode_report,
)
from relight.core.protocol.position import Phase
from relight.timeline.model.spans import Chunk, History, Record, Selection, SpanCollector

MS = 1_000_000
WALL = 1_750_000_000  # Unix seconds at the job's start
MONOTONIC = 5_000 * MS  # the host's monotonic clock at the job's start


class Worker:
    """Stamps of one process, in ms since the job's start."""

    def __init__(self, process: str, rank: int, generation: int = 1) -> None:
        self.process, self.rank, self.generation = process, rank, generation
        self.records: list[Record] = []

    def stamp(self, at: float, phase: Phase, step: int, version: int | None = None) -> "Worker":
        self.records.append(
            (
                MONOTONIC + round(at * MS),
                self.generation,
                step,
                int(phase),
                step if version is None else version,
            )
        )
        return self

    def step(self, at: float, step: int, forward: float = 40, backward: float = 40) -> "Worker":
        """A whole step: forward, backward, 5 ms barrier, 10 ms optimizer, then OUTSIDE at the next version."""
        self.stamp(at, Phase.FORWARD, step)
        self.stamp(at + forward, Phase.BACKWARD, step)
        self.stamp(at + forward + backward, Phase.BARRIER, step)
        self.stamp(at + forward + backward + 5, Phase.OPTIMIZER, step)
        return self.stamp(at + forward + backward + 15, Phase.OUTSIDE, step, step + 1)

    def in_generation(self, generation: int) -> "Worker":
        self.generation = generation
        return self

    def chunk(self) -> Chunk:
        return Chunk(self.process, self.rank, tuple(self.records), WALL * 1000 * MS - MONOTONIC)


def plain() -> tuple[JobReport, list[Chunk]]:
    """Two ranks, three steps of 100 ms, nothing fails."""
    workers = [Worker(f"w{rank}", rank) for rank in range(2)]
    for worker in workers:
        for step in range(3):
            worker.step(100 * step, step)
        worker.stamp(300, Phase.DONE, 3)
    report = JobReport(
        job="plain", started_wall=WALL, wall_seconds=0.32, world_size=2, steps=3, until=3, final_version=3
    )
    return report, [worker.chunk() for worker in workers]


def rolled_back() -> tuple[JobReport, list[Chunk]]:
    """Rank 1 of 3 is killed in FORWARD of step 7: everybody goes back to version 7, standby s0 takes over."""
    survivors = [Worker("w0", 0), Worker("w2", 2)]
    victim = Worker("w1", 1)
    for worker in (*survivors, victim):
        worker.step(600, 6)
    victim.stamp(700, Phase.FORWARD, 7)
    for worker in survivors:
        worker.stamp(700, Phase.FORWARD, 7).stamp(740, Phase.BACKWARD, 7)
        worker.in_generation(2).stamp(750, Phase.PARKED, 7)
        worker.step(800, 7).step(900, 8)
    standby = Worker("s0", 1, generation=0)
    standby.stamp(10, Phase.STARTING, 0).stamp(30, Phase.FORWARD, 0).stamp(60, Phase.STANDBY, 0)
    standby.in_generation(2).stamp(752, Phase.PARKED, 0).stamp(790, Phase.PARKED, 7)
    standby.step(800, 7).step(900, 8)
    failure = FailureReport(
        number=1,
        rank=1,
        process="w1",
        kind="killed",
        step=7,
        phase="FORWARD",
        evidence="killed by SIGKILL",
        generation=1,
        noticed_seconds=0.742,
        detect_seconds=0.012,
    )
    recovery = RecoveryReport(
        number=1,
        generation=2,
        failures=(1,),
        decision="back",
        target_version=7,
        reason="rank 0 was not prepared for step 7",
        survivors=(0, 2),
        replaced=(1,),
        replacement_kind="standby",
        sources=(0, 2),
        stages=RecoveryStages(
            detect_seconds=0.012,
            stop_seconds=0.008,
            replace_seconds=0.002,
            copy_seconds=0.030,
            resume_seconds=0.001,
            redo_seconds=0.095,
            total_seconds=0.070,
        ),
        steps_repeated=1,
        moved_bytes=3 * 2**20,
    )
    return _job("rolled-back", failure, recovery), [w.chunk() for w in (*survivors, victim, standby)]


def taken_over() -> tuple[JobReport, list[Chunk]]:
    """Rank 2 of 3 is killed in OPTIMIZER of step 7: the others finish the step, it is taken over at version 8."""
    survivors = [Worker("w0", 0), Worker("w1", 1)]
    victim = Worker("w2", 2)
    for worker in (*survivors, victim):
        worker.step(600, 6)
        worker.stamp(700, Phase.FORWARD, 7).stamp(740, Phase.BACKWARD, 7).stamp(780, Phase.BARRIER, 7)
    victim.stamp(785, Phase.OPTIMIZER, 7)
    survivors[0].stamp(785, Phase.OPTIMIZER, 7).stamp(795, Phase.OUTSIDE, 7, 8)
    survivors[0].stamp(800, Phase.FORWARD, 8).in_generation(2).stamp(806, Phase.PARKED, 8)
    survivors[1].in_generation(2).stamp(805, Phase.PARKED, 7)  # its barrier broke: it finishes locally
    survivors[1].stamp(812, Phase.OPTIMIZER, 7).stamp(822, Phase.PARKED, 8)
    standby = Worker("s0", 2, generation=0).stamp(10, Phase.STARTING, 0).stamp(60, Phase.STANDBY, 0)
    standby.in_generation(2).stamp(807, Phase.PARKED, 0).stamp(840, Phase.PARKED, 8)
    for worker in (*survivors, standby):
        worker.step(850, 8).step(950, 9)
    failure = FailureReport(
        number=1,
        rank=2,
        process="w2",
        kind="killed",
        step=7,
        phase="OPTIMIZER",
        evidence="killed by SIGKILL",
        generation=1,
        noticed_seconds=0.800,
        detect_seconds=0.010,
    )
    recovery = RecoveryReport(
        number=1,
        generation=2,
        failures=(1,),
        decision="forward",
        target_version=8,
        reason="every survivor was prepared for step 7",
        survivors=(0, 1),
        replaced=(2,),
        replacement_kind="standby",
        sources=(0,),
        stages=RecoveryStages(
            detect_seconds=0.010,
            stop_seconds=0.006,
            finish_seconds=0.010,
            copy_seconds=0.030,
            redo_seconds=0.095,
            total_seconds=0.060,
        ),
        moved_bytes=2**20,
    )
    return _job("taken-over", failure, recovery), [w.chunk() for w in (*survivors, victim, standby)]


def hung() -> tuple[JobReport, list[Chunk]]:
    """Rank 0 of 2 hangs in BACKWARD of step 7, noticed after 30 s; a fresh process takes 8 s to start."""
    hanging, survivor = Worker("w0", 0), Worker("w1", 1)
    for worker in (hanging, survivor):
        worker.step(600, 6).stamp(700, Phase.FORWARD, 7).stamp(740, Phase.BACKWARD, 7)
    survivor.in_generation(2).stamp(30_755, Phase.PARKED, 7)
    fresh = Worker("f0", 0, generation=2).stamp(30_800, Phase.STARTING, 0).stamp(38_800, Phase.PARKED, 0)
    for worker in (survivor, fresh):
        worker.step(38_840, 7).step(38_940, 8)
    failure = FailureReport(
        number=1,
        rank=0,
        process="w0",
        kind="hang",
        step=7,
        phase="BACKWARD",
        evidence="no progress for 30 s while its peer waits",
        generation=1,
        noticed_seconds=30.750,
        detect_seconds=30.0,
    )
    recovery = RecoveryReport(
        number=1,
        generation=2,
        failures=(1,),
        decision="back",
        target_version=7,
        reason="rank 1 was not prepared for step 7",
        survivors=(1,),
        replaced=(0,),
        replacement_kind="fresh process",
        sources=(1,),
        stages=RecoveryStages(
            detect_seconds=30.0, stop_seconds=0.005, replace_seconds=8.0, redo_seconds=0.095, total_seconds=38.09
        ),
        steps_repeated=1,
    )
    report = msgspec.structs.replace(_job("hung", failure, recovery), world_size=2, wall_seconds=39.04)
    return report, [w.chunk() for w in (hanging, survivor, fresh)]


def _job(job: str, failure: FailureReport, recovery: RecoveryReport) -> JobReport:
    return JobReport(
        job=job,
        started_wall=WALL,
        wall_seconds=1.05,
        world_size=3,
        standbys=1,
        steps=10,
        until=10,
        failures=(failure,),
        recoveries=(recovery,),
        steps_repeated=recovery.steps_repeated,
        moved_bytes=recovery.moved_bytes,
        final_version=10,
        final_state_digest="0123456789abcdef",
        final_lineage="fedcba9876543210",
        time_lost_seconds=recovery.stages.total_seconds,
        versions={"python": "3.11.9"},
    )


def history(report: JobReport, chunks: list[Chunk], selection: Selection | None = None) -> History:
    collector = SpanCollector(WALL * 1000 * MS, selection)
    for chunk in chunks:
        collector.add(chunk)
    return collector.history(report)


def write_run(run_dir: Path, report: JobReport | None, chunks: list[Chunk]) -> Path:
    """The files a run leaves behind."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if report is not None:
        write_report(run_dir, report)
    lines = [msgspec.json.encode({"type": "TraceChunk", **msgspec.structs.asdict(c)}) for c in chunks]
    (run_dir / "trace.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return run_dir


def write_report(run_dir: Path, report: JobReport) -> None:
    (run_dir / "report.json").write_bytes(encode_report(report))
