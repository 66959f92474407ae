"""State that must cross from one host to another: on one machine, with the way within the machine taken away."""

from pathlib import Path

import pytest

from tests.survival.harness import Bench, Job, Training
from tests.survival.judge import check_faults, check_survived

TRAINING = Training(steps=7, arguments=("--hold-at", "2"))
HOST = {"RELIGHT_HOST_ADDRESS": "127.0.0.1"}
KILL = "kill rank 1 in BACKWARD of step 4"


def part_hosts(job: Job, standbys: int) -> None:
    """Remove the workers' Unix sockets for state: each is on a host of its own from here on."""
    job.wait_until(lambda: job.journal().count('"type":"StandbyReady"') == standbys, "all standbys are warm")
    processes = job.training.ranks + standbys

    def sockets() -> list[Path]:
        return list(job.temporary.glob("**/restore-*.sock"))

    job.wait_until(lambda: len(sockets()) == processes, "all processes listen")  # a rank may start after a standby
    for path in sockets():
        path.unlink()


def test_a_replacement_is_restored_from_another_host(bench: Bench) -> None:
    with bench.start(TRAINING, faults=[KILL], environment=HOST) as job:
        part_hosts(job, 1)
        job.release()
        outcome = job.wait()
    check_survived(outcome, bench.reference(TRAINING))
    check_faults(outcome, [KILL])
    assert '"endpoint":"127.0.0.1:' in (outcome.run_dir / "journal.jsonl").read_text(), outcome.describe()


@pytest.mark.parametrize(
    "fault",
    [
        "kill the restore source during the next restore",
        pytest.param("freeze the restore source during the next restore", marks=pytest.mark.all),
        pytest.param("kill the restore target during the next restore", marks=pytest.mark.all),
        pytest.param("freeze the restore target during the next restore", marks=pytest.mark.all),
    ],
)
def test_a_second_failure_in_the_middle_of_a_restore_between_hosts(bench: Bench, fault: str) -> None:
    with bench.start(TRAINING, faults=[KILL, fault], standbys=2, environment=HOST) as job:
        part_hosts(job, 2)
        job.release()
        outcome = job.wait()
    check_survived(outcome, bench.reference(TRAINING))
    assert len(outcome.report.failures) == 2, outcome.describe()
