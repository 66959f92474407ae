"""A journal replayed into a new controller gives the same orders: any run can be studied at a desk.

The orders must not depend on the order in which Python happens to walk a set, so it is tried in processes with other
hash seeds too, and once through the files that the server writes.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from relight.core.controller import Controller, ControllerSettings
from relight.core.protocol.commands import Command
from relight.server.records.journal import JournalLine, read_journal
from relight.sim.model.schedule import random_schedule
from relight.sim.timed.job import JournalEntry, SimulatedJob
from relight.wire.settings import JobSettings
from tests.recorded import write_journal

REPOSITORY = Path(__file__).parents[2]


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The recording of one controller."""

    settings: ControllerSettings
    entries: tuple[JournalEntry, ...]


def record(seed: int) -> Recording:
    job = SimulatedJob(random_schedule(seed))
    job.run()
    return Recording(settings=job.settings, entries=tuple(job.journal))


def replay(recording: Recording) -> list[tuple[Command, ...]]:
    """The orders of a new controller that is told the same, at the same times."""
    controller = Controller(recording.settings)
    return [
        controller.expire(entry.now) if entry.event is None else controller.handle(entry.event, entry.now)
        for entry in recording.entries
    ]


def digest(recordings: list[Recording]) -> str:
    """A digest of all orders that the replays give."""
    sha = hashlib.sha256()
    for recording in recordings:
        sha.update(msgspec.msgpack.encode(replay(recording)))
    return sha.hexdigest()


def test_a_replay_gives_the_same_orders() -> None:
    for seed in range(200):
        recording = record(seed)
        assert replay(recording) == [entry.commands for entry in recording.entries], f"seed {seed}"


def test_a_replay_gives_the_same_report() -> None:
    for seed in range(50):
        job = SimulatedJob(random_schedule(seed))
        job.run()
        controller = Controller(job.settings)
        for entry in job.journal:
            if entry.event is None:
                controller.expire(entry.now)
            else:
                controller.handle(entry.event, entry.now)
        assert controller.report() == job.controller.report(), f"seed {seed}"


@pytest.mark.parametrize("hash_seed", ["0", "1", "12345"])
def test_another_hash_seed_changes_nothing(tmp_path: Path, hash_seed: str) -> None:
    recordings = [record(seed) for seed in range(60)]
    path = tmp_path / "recordings"
    path.write_bytes(msgspec.msgpack.encode(recordings))
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.test_replay", str(path)],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    replayed, simulated = done.stdout.split()
    assert replayed == digest(recordings)
    assert simulated == digest(recordings)


def test_the_servers_journal_can_be_replayed(tmp_path: Path) -> None:
    for seed in range(8):
        recording = record(seed)
        run_dir = tmp_path / str(seed)
        run_dir.mkdir()
        write(run_dir, recording)
        _, lines = read_journal(run_dir / "journal.jsonl")
        controller = Controller(recording.settings)
        ordered: list[Command] = []
        for line in lines:
            ordered += step(controller, line)
        assert ordered == [line.command for line in lines if line.command is not None], f"seed {seed}"


def write(run_dir: Path, recording: Recording) -> None:
    """As the server does: the fact first, then the orders that it led to."""
    settings = JobSettings(job="simulated", script="none", world_size=recording.settings.world_size)
    write_journal(run_dir, settings, recording.entries)


def step(controller: Controller, line: JournalLine) -> tuple[Command, ...]:
    if line.expired:
        return controller.expire(line.now)
    return controller.handle(line.event, line.now) if line.event is not None else ()


def main(path: str) -> None:
    """In a process with another hash seed: replay what was recorded, and simulate it once more."""
    recordings = msgspec.msgpack.decode(Path(path).read_bytes(), type=list[Recording])
    print(digest(recordings), digest([record(seed) for seed in range(len(recordings))]))


if __name__ == "__main__":
    main(sys.argv[1])
