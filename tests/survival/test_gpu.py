"""Workers on GPUs: NCCL where each rank has one of its own; with fewer GPUs, gloo carries their tensors."""

import os

import pytest
import torch

from tests.survival.harness import Bench, Outcome, Training
from tests.survival.judge import check_faults, check_survived

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALL_GPUS = ",".join(map(str, range(torch.cuda.device_count())))
# Sums in one order: the same bits each time are what is tested.
ON_GPUS = {
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ALL_GPUS),
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
SHARED, OWN = torch.cuda.device_count() + 1, max(2, torch.cuda.device_count())
RANKS = [
    pytest.param(SHARED, id="shared"),
    pytest.param(
        OWN, id="own", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    ),
]
ENDS = ("kill", "freeze", "raise")
PLACES = ("FORWARD", "BACKWARD", "BARRIER", "OPTIMIZER")


def run(bench: Bench, ranks: int, *arguments: str, faults: tuple[str, ...] = ()) -> Outcome:
    training = Training(ranks=ranks, arguments=arguments)
    standbys = 1 if faults else 0
    return bench.run(training, faults=faults, standbys=standbys, environment=ON_GPUS)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("end", ENDS)
def test_a_rank_on_a_gpu_is_replaced(bench: Bench, ranks: int, place: str, end: str) -> None:
    faults = (f"{end} rank 1 in {place} of step 3",)
    undisturbed = run(bench, ranks)
    assert undisturbed.status == 0, undisturbed.describe()
    outcome = run(bench, ranks, faults=faults)
    check_survived(outcome, undisturbed)
    check_faults(outcome, faults)


@pytest.mark.parametrize("ranks", RANKS)
def test_what_people_write_for_gpus(bench: Bench, ranks: int) -> None:
    arguments = ("--scaler", "--autocast", "--overflow-at", "2", "--clip", "--optimizer", "adamw-fused", "--ema")
    faults = ("kill rank 0 in BACKWARD of step 2", "kill rank 1 in OPTIMIZER of step 5")
    undisturbed = run(bench, ranks, *arguments)
    assert undisturbed.status == 0, undisturbed.describe()
    outcome = run(bench, ranks, *arguments, faults=faults)
    check_survived(outcome, undisturbed)
    check_faults(outcome, faults)
