"""Lines of a journal and a trace become what the page says; nothing here reads a file or a clock."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from relight.core.position import Phase
from relight.dashboard.follow import Follower
from relight.dashboard.job import Job
from relight.dashboard.view import ranks, topics
from relight.timeline.spans import Chunk
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
    assert found["until_ns"] is None  # nobody has taken it over so far
    assert job.stage == "stopping"
    assert topics(job, now_ns)["summary"]["shards"][0]["may_fail"] == 1

    made.recover(1, recovery_seconds=0.4)
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
    assert job.unreadable_records == 1
    assert [line["step"] for line in ranks(job, {}).values()] == [1, 1]
