"""Lines of a journal and a trace become what the page says; nothing here reads a file or a clock."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from relight.core.protocol.events import ProcessSuspected
from relight.core.protocol.position import Phase, Position
from relight.dashboard import follow
from relight.dashboard.follow import Follower
from relight.dashboard.model.job import Job
from relight.dashboard.model.view import ranks, topics
from relight.timeline.model.spans import Chunk
from relight.wire.status import EngineVersion, Gpu, GpuStatus, PublishStatus, RestoreStatus
from tests.dashboard.made_up import BEGUN_SECONDS, MadeUpJob

WALL = 1_750_000_000.0
NS = 10**9


def read(run_dir: Path) -> Job:
    """A job from its files, all of them."""
    follower = Follower(run_dir)

    async def all_of_it() -> None:
        while follower.is_behind:
            await follower.read()

    asyncio.run(all_of_it())
    follower.close()
    assert follower.job.problem == ""
    return follower.job


def test_a_job_without_failures(tmp_path: Path) -> None:
    made = MadeUpJob(tmp_path, ranks=3, wall=WALL, step_seconds=0.5)
    made.steps(20)
    job = read(tmp_path)
    said = topics(job, job.now_ns(round((WALL + 12) * NS)))["summary"]
    assert (said["version"], said["failures"], said["time_lost_seconds"], said["goodput"]) == (20, 0, 0.0, 1.0)
    assert (said["stage"], said["standbys_ready"], said["until"]) == ("training", 1, 100_000)
    assert said["shards"] == [{"name": "all parameters", "copies": 3, "may_fail": 2}]
    lines = ranks(job, {"w1": 7})
    assert [(line["step"], line["version"], line["phase"], line["host"]) for line in lines.values()] == [
        (19, 20, "OUTSIDE", "node-0")
    ] * 3
    assert [line["rss_bytes"] for line in lines.values()] == [0, 7, 0]
    assert all(line["step_ms"] == pytest.approx(500, abs=1) for line in lines.values())


def test_a_rank_dies_and_is_replaced(tmp_path: Path) -> None:
    made = MadeUpJob(tmp_path, ranks=3, wall=WALL, step_seconds=0.5)
    made.steps(4)
    struck = made.at + 0.25
    made.die(1, evidence="was killed by SIGKILL")
    job = read(tmp_path)
    now_ns = job.now_ns(round((WALL + made.at) * NS))
    (found,) = topics(job, now_ns)["failures"]
    assert (found["rank"], found["kind"], found["step"], found["phase"]) == (1, "killed", 4, "BACKWARD")
    assert found["struck_ns"] == pytest.approx(struck * NS, abs=1000)
    assert found["until_ns"] is None  # no process has taken it over so far
    assert job.stage == "stopping"
    assert topics(job, now_ns)["summary"]["shards"][0]["may_fail"] == 1

    made.recover(recovery_seconds=0.4)
    made.steps(3)
    job = read(tmp_path)
    said = topics(job, job.now_ns(round((WALL + made.at) * NS)))
    (found,), (recovery,) = said["failures"], said["recoveries"]
    assert found["until_ns"] == pytest.approx((struck + 0.002 + 0.02) * NS, abs=1000)
    assert recovery["failures"] == (1,)
    assert recovery["replaced"] == (1,)
    assert recovery["decision"] == "back"
    assert recovery["stages"]["copy"] == 0.1
    assert recovery["stages"]["redo"] == pytest.approx(0.5)
    assert recovery["struck_ns"] <= recovery["noticed_ns"] <= recovery["stopped_ns"] <= recovery["resumed_ns"]
    assert said["summary"]["steps_repeated"] == 1
    assert said["summary"]["time_lost_seconds"] == pytest.approx(0.402 + 0.5, abs=0.001)
    assert said["summary"]["goodput"] < 1
    assert job.stage == "training"
    assert ranks(job, {})[1]["process"] == "w3"  # the standby


def test_the_tiles_say_what_each_rank_did(tmp_path: Path) -> None:
    made = MadeUpJob(tmp_path, ranks=2, wall=WALL, step_seconds=2.0)
    made.steps(3)
    job = read(tmp_path)
    shift = 26  # cells of 67 ms
    at = int(BEGUN_SECONDS * NS) >> shift
    cells = job.rows[0].cells(shift, 0, job.edge_ns)
    assert cells[at + 2] == Phase.FORWARD
    assert cells[at + 20] == Phase.BACKWARD
    assert cells[at - 2] == Phase.STARTING
    fine = 22  # cells of 4 ms: a tile is 1.07 s
    tile = int((BEGUN_SECONDS + 2.0) * NS) >> (fine + 8)
    runs = job.rows[0].runs(fine, tile, job.edge_ns)
    quads = [tuple(runs[i : i + 4]) for i in range(0, len(runs), 4)]
    assert (int(Phase.FORWARD), 1, 1) in [quad[1:] for quad in quads]
    assert [quad[0] for quad in quads] == sorted({quad[0] for quad in quads})


def test_a_standby_that_trains_for_warmth_is_not_shown(tmp_path: Path) -> None:
    made = MadeUpJob(tmp_path, ranks=2, wall=WALL, step_seconds=0.5)
    made.steps(2)
    standby = next(process.name for process in made.core.members.standbys())
    job = read(tmp_path)
    before = job.rows[1].last_ns
    offset, made_ns = round(WALL * NS), round(made.at * NS)
    warm = [(before + n * 1000, 0, 0, int(phase), 0) for n, phase in enumerate((Phase.FORWARD, Phase.STANDBY), start=1)]
    job.take_chunk(Chunk(standby, -1, tuple(warm), offset), offset + made_ns)
    assert job.rows[1].last_ns == before
    # The same chunk also tells of its turn: what is before its waiting is warm-up.
    turn = (*warm, (before + 9000, 2, 0, int(Phase.PARKED), 0))
    job.take_chunk(Chunk(standby, 1, turn, offset), offset + made_ns)
    assert job.rows[1].phase == Phase.PARKED
    assert job.rows[1].last_ns == before + 9000
    assert job.rows[1].holders[-1] == (before + 9000, standby)


def test_a_straggler_is_named(tmp_path: Path) -> None:
    made = MadeUpJob(tmp_path, ranks=8, wall=WALL, step_seconds=0.2)
    made.steps(20, slow={5: 1.8})
    job = read(tmp_path)
    (found,) = topics(job, 0)["stragglers"]
    assert found["rank"] == 5
    assert found["forward_seconds"] / found["median_seconds"] == pytest.approx(1.8, abs=0.15)


def test_a_damaged_journal_is_said_to_be(tmp_path: Path) -> None:
    made = MadeUpJob(tmp_path, ranks=2, wall=WALL)
    made.steps(2)
    job = read(tmp_path)
    job.take_journal(b'{"now": 3, "event": {"type": "SomethingNew"}}')
    assert "cannot be read further" in job.problem
    assert topics(job, 0)["summary"]["problem"] == job.problem


@pytest.mark.parametrize(
    "record",
    [(2**63, 1, 1, 2, 1), (2**62, 1, 1, 2, 1), (10**12, 1, 2**70, 2, 1), (10**12, 1, 1, 99, 1), (10**12, 1, 1, -3, 1)],
)
def test_scribbled_words_harm_nobody(tmp_path: Path, record: tuple[int, int, int, int, int]) -> None:
    made = MadeUpJob(tmp_path, ranks=2, wall=WALL)
    made.steps(2)
    job = read(tmp_path)
    job.take_chunk(
        msgspec.json.decode(msgspec.json.encode(Chunk("w0", 0, (record,), 0)), type=Chunk), round((WALL + 60) * NS)
    )
    row = job.rows[0]
    assert len({len(row._times), len(row._codes), len(row._steps), len(row._versions)}) == 1
    assert job.phases.unreadable_records == 1
    assert [line["step"] for line in ranks(job, {}).values()] == [1, 1]


def test_the_end_of_a_long_trace_is_known_first_and_all_of_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeUpJob(tmp_path, ranks=4, wall=WALL, step_seconds=0.5)
    for rank in (1, 3):
        made.steps(100, chunk_steps=2)  # agents report once a second
        made.fail(rank)
    made.steps(100, chunk_steps=2)
    whole = read(tmp_path)
    monkeypatch.setattr(follow, "NEWEST_BYTES", 8_000)
    monkeypatch.setattr(follow, "NEWEST_BYTES_PER_RANK", 0)
    monkeypatch.setattr(follow, "SLICE_BYTES", 8_000)
    follower = Follower(tmp_path)
    rounds = 0
    gaps = []

    async def step() -> None:
        await follower.read()

    while follower.is_behind:
        asyncio.run(step())
        rounds += 1
        gap = follower.job.gap_ns()
        if gap is not None:
            gaps.append(gap)
        # What is known already, at any time, is what is known in the end; what is not known is left open.
        for rank, row in whole.rows.items():
            for tile in range((whole.edge_ns >> 36) + 1):
                partial = follower.job.row(rank)
                assert partial is not None
                now, then = partial.cells(28, tile, whole.edge_ns), row.cells(28, tile, whole.edge_ns)
                outside = [
                    (a, b)
                    for at, (a, b) in enumerate(zip(now, then, strict=True))
                    if gap is None or not gap[0] - 3 * NS <= (tile * 256 + at) << 28 <= gap[1] + 3 * NS
                ]
                assert [n for n, (a, b) in enumerate(outside) if a != b] == [], (rank, tile, gap, outside)
        assert [line["version"] for line in ranks(follower.job, {}).values()] == [302] * 4
        assert [failure["until_ns"] is not None for failure in topics(follower.job, 0)["failures"]] == [True, True]
        assert topics(follower.job, 0)["summary"]["version"] == 302
    follower.close()
    assert rounds > 5
    assert gaps == sorted(gaps)  # it only shrinks
    assert {until for _, until in gaps} == {gaps[0][1]}
    assert gaps[0][1] > 0.8 * whole.edge_ns
    assert follower.job.gap_ns() is None
    assert [f["until_ns"] for f in topics(follower.job, 0)["failures"]] == [
        f["until_ns"] for f in topics(whole, 0)["failures"]
    ]


def test_what_engines_get_is_told(tmp_path: Path) -> None:
    made = MadeUpJob(tmp_path, ranks=2, wall=WALL, step_seconds=0.5)
    made.steps(10)
    assert topics(read(tmp_path), 0)["publishing"] is None
    engines = (EngineVersion(name="a", pid=7, version=8), EngineVersion(name="b", pid=8, version=-1))
    moving = PublishStatus(
        process="w0", engines=engines, version=10, moved_bytes=2**20, total_bytes=2**22, update_seconds=0.5, updates=4
    )
    made.say(made.at, moving)
    said = topics(read(tmp_path), 0)["publishing"]
    assert (said["version"], said["moved_bytes"], said["total_bytes"], said["updates"]) == (10, 2**20, 2**22, 4)
    assert [(each["name"], each["version"], each["behind"]) for each in said["engines"]] == [("a", 8, 2), ("b", -1, 11)]
    assert said["gone"] == ""
    made.fail(0)  # the publisher
    assert topics(read(tmp_path), 0)["publishing"]["gone"] == "w0"
    made.say(made.at, PublishStatus(process="w2", engines=engines[:1], version=10, updates=1, dropped={"b": "slow"}))
    said = topics(read(tmp_path), 0)["publishing"]
    assert (said["gone"], said["updates"], said["dropped"]) == ("", 5, [{"name": "b", "why": "slow"}])


def test_a_copy_is_told_of_while_it_lasts(tmp_path: Path) -> None:
    made = MadeUpJob(tmp_path, ranks=2, wall=WALL, step_seconds=0.5)
    made.steps(10)
    made.die(1)
    made.stop()
    half = RestoreStatus(process="w2", rank=1, generation=2, copied_bytes=5, total_bytes=10, seconds=0.5)
    made.say(made.at, RestoreStatus(process="w9", rank=1, generation=1, copied_bytes=1, total_bytes=1, seconds=9), half)
    (said,) = topics(read(tmp_path), 0)["restores"]
    assert said == {"rank": 1, "copied_bytes": 5, "total_bytes": 10, "seconds": 0.5}
    assert topics(read(tmp_path), round(made.at * NS))["summary"]["waiting"].startswith("waiting for ")
    made.restore()
    assert topics(read(tmp_path), 0)["restores"] == []


def test_how_long_a_hang_had_lasted_is_known_from_the_last_sign_of_progress(tmp_path: Path) -> None:
    made = MadeUpJob(tmp_path, ranks=2, wall=WALL)
    made.steps(2)
    position = Position(step=2, phase=Phase.BACKWARD, stamp_ns=7 * NS)
    made.tell(
        made.at + 30,
        ProcessSuspected(process="w1", kind="hang", evidence="no progress", position=position, noticed_ns=38 * NS),
    )
    (found,) = read(tmp_path).failures()
    assert (found.kind, found.idle_seconds, found.detect_seconds) == ("hang", 31.0, 31.0)
    assert found.estimated


def test_gpus_are_shown_where_there_are_any(tmp_path: Path) -> None:
    made = MadeUpJob(tmp_path, ranks=2, wall=WALL, step_seconds=0.5)
    made.steps(10)
    assert all("gpu" not in line for line in ranks(read(tmp_path), {}).values())
    hot = Gpu(index=0, name="H200", temperature_celsius=95, uncorrected_errors=2, slowed=True)
    made.say(made.at, GpuStatus(agent="node-0", gpus=(hot, Gpu(index=1, pids=(1,)))))
    lines = ranks(read(tmp_path), {})
    assert (lines[0]["gpu"]["index"], lines[1]["gpu"]["index"]) == (0, 1)  # by their slots
    assert lines[0]["gpu"]["celsius"] == 95
    assert lines[0]["gpu"]["trouble"] == "2 uncorrected memory errors, slowed down by heat or lack of power"
    assert lines[1]["gpu"]["trouble"] == ""


def test_how_many_more_may_fail_is_told_for_each_part_of_divided_state(tmp_path: Path) -> None:
    made = MadeUpJob(tmp_path, ranks=4, wall=WALL, step_seconds=0.5, parts=("a", "b", "a", "b"))
    made.steps(4)
    job = read(tmp_path)
    parts = [{"name": f"part {part}", "copies": 2, "may_fail": 1} for part in ("a", "b")]
    assert topics(job, 0)["summary"]["shards"] == parts
    made.die(1)
    assert topics(read(tmp_path), 0)["summary"]["shards"] == [{"name": "part b", "copies": 1, "may_fail": 0}, parts[0]]
