"""The GRPO example: ranks and engines are killed, and rewards and weights are those of a run without failures.

Runs where transformers is installed (`make test-integrations`).
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.survival.harness import DEADLINE_SECONDS, ROOT, Job, Outcome, Training, plain_environment

pytest.importorskip("transformers", exc_type=ImportError)

EXAMPLE = ROOT / "examples" / "grpo.py"
STEPS = 12


class Engine:
    """An engine's process."""

    def __init__(self, directory: Path, place: Path, name: str) -> None:
        self._directory, self._place, self.name = directory, place, name
        self.log = directory / f"{name}.log"
        self.start()

    def start(self) -> None:
        """Start it, or another one of its name."""
        self._directory.mkdir(exist_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(EXAMPLE), str(self._place), "--serve", self.name],
                env=plain_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def versions(self) -> list[int]:
        """Versions of the completions that it has written, in all its lives."""
        return [int(number) for number in re.findall(r"version (\d+)\n", self.log.read_text())]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class End:
    """Rewards and weights that a run ended with."""

    rewards: list[float]
    digests: dict[str, str]
    outcome: Outcome


Disturb = Callable[[Job, list[Engine]], None]


def train(directory: Path, faults: Sequence[str] = (), disturb: Disturb | None = None, engines: int = 2) -> End:
    """Run the example with engines, and disturb it."""
    place = directory / "place"
    serving = [Engine(directory, place, name) for name in "abc"[:engines]]
    await_addresses(place, serving)  # the steps could be over before an engine has come
    training = Training(ranks=2, steps=0, program=str(EXAMPLE), arguments=(str(place), "--steps", str(STEPS)))
    try:
        with Job(directory, training, faults=faults, standbys=1) as job:
            if disturb is not None:
                disturb(job, serving)
            outcome = job.wait(2 * DEADLINE_SECONDS)  # each process imports transformers
    finally:
        for engine in serving:
            engine.kill()
    assert outcome.status == 0, outcome.describe()
    assert outcome.report.bits_as_undisturbed == "yes", outcome.describe()
    assert len(outcome.report.failures) == len(faults), outcome.describe()
    lines = (outcome.run_dir / "scalars.jsonl").read_text().splitlines()
    rewards = {(entry := json.loads(line))["step"]: entry["reward"] for line in lines}
    assert sorted(rewards) == list(range(STEPS))
    return End([rewards[step] for step in range(STEPS)], dict(re.findall(r"rank (\d+): (.*)", outcome.stdout)), outcome)


def await_addresses(place: Path, engines: list[Engine]) -> None:
    """Return when all these engines can be asked."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not all((place / "engines" / engine.name).exists() for engine in engines):
        for engine in engines:
            assert engine.process.poll() is None, engine.log.read_text()
        assert time.monotonic() < deadline, "the engines have not come"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> End:
    """The end of a run in which nothing fails."""
    return train(tmp_path_factory.mktemp("undisturbed"))


def wait_for(job: Job, engine: Engine, version: int) -> None:
    """Return when the engine has answered with this version."""
    job.wait_until(lambda: version in engine.versions(), f"{engine.name} had version {version}")


def check(found: End, expected: End) -> None:
    assert found.rewards == expected.rewards
    assert found.digests == expected.digests
    assert len(set(found.digests.values())) == 1


@pytest.mark.parametrize(
    "faults",
    [
        ("kill rank 0 in FORWARD of step 3", "kill rank 1 in BACKWARD of step 7"),
        ("kill rank 1 in OPTIMIZER of step 4", "kill rank 0 in BARRIER of step 8"),
    ],
    ids=["computing", "writing"],
)
def test_ranks_may_die_in_any_phase(faults: Sequence[str], tmp_path: Path, undisturbed: End) -> None:
    check(train(tmp_path, faults), undisturbed)


def test_an_engine_may_die_and_come_back_and_the_ranks_too(tmp_path: Path, undisturbed: End) -> None:
    def disturb(job: Job, engines: list[Engine]) -> None:
        victim = engines[0]
        wait_for(job, victim, 2)
        victim.kill()
        victim.start()

    check(train(tmp_path, ("kill rank 0 in BACKWARD of step 6",), disturb), undisturbed)


def test_ranks_wait_for_the_only_engine_to_come_back(tmp_path: Path, undisturbed: End) -> None:
    """It came late, and begins with random weights: it gets those of the step that waits."""

    def disturb(job: Job, engines: list[Engine]) -> None:
        (engine,) = engines
        wait_for(job, engine, 3)
        engine.kill()
        before = engine.versions()
        engine.start()
        job.wait_until(lambda: len(engine.versions()) > len(before), "the engine answered again")
        assert engine.versions()[len(before)] >= max(before)

    check(train(tmp_path, disturb=disturb, engines=1), undisturbed)
