"""An engine beside rank 0, of a job whose weights are divided over ranks of two hosts."""

from pathlib import Path

import pytest
from torch import nn

import relight
from benchmarks.namespaces import missing
from tests.hosts.cluster import Cluster
from tests.survival.harness import Bench, Training
from tests.survival.judge import check_survived
from tests.survival.test_publishing_divided import STEPS, model_of, pipeline_of, training_of, whole_pipeline

REASON = missing()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.all]


def reference_of(directory: Path, training: Training) -> Bench:
    directories = iter([directory / "reference"])
    return Bench(lambda: next(directories))


def check(directory: Path, training: Training, model: nn.Module, *faults: str, tls: bool = False) -> None:
    """Ranks 0 and 1 are on one host, 2 and 3 on the other: no socket of the first one can be seen there."""
    reference = reference_of(directory, training).reference(training)
    with Cluster(directory, training, 2, standbys=1, tls=tls, own_run_dirs=True) as cluster:
        cluster.start(*(word for fault in faults for word in ("--chaos", fault)))
        with relight.Receiver(cluster.run_dir, model=model) as receiver:
            outcome = cluster.wait()
            assert receiver.version == STEPS, outcome.describe()
            assert receiver.digest() == reference.finals[0]["weights"]
        check_survived(outcome, reference)
        assert len(outcome.report.failures) == len(faults), outcome.describe()
        cluster.check_nothing_is_left()


def test_parts_on_another_host(tmp_path: Path) -> None:
    training = training_of("fsdp")
    check(tmp_path, training, model_of(training))


def test_parts_on_another_host_in_tls(tmp_path: Path) -> None:
    training = training_of("tp_fsdp")
    check(tmp_path, training, model_of(training), tls=True)


@pytest.mark.parametrize(
    "fault",
    ["kill rank 3 in BACKWARD of step 5", "kill rank 2 in OPTIMIZER of step 6", "kill rank 0 in FORWARD of step 4"],
)
def test_a_stage_on_another_host(tmp_path: Path, fault: str) -> None:
    training = pipeline_of("ddp", "--batchnorm")
    check(tmp_path, training, whole_pipeline(training), fault)
