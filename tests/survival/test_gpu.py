"""Workers on GPUs: NCCL where each rank has one of its own; with fewer GPUs, gloo carries their tensors."""

import dataclasses
import os

import pytest
import torch

import relight
from tests.idioms.trial import DEVICE_VARIABLE, killed_in_phases, phase_kills, undisturbed
from tests.idioms.verdict import Verdict, judge
from tests.programs.train import Net
from tests.survival.device_cases import CASES, Case, check_outcome, ddp, divided
from tests.survival.harness import DEADLINE_SECONDS, Bench, Outcome
from tests.survival.judge import check_survived

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
# Sums in one order: the same bits each time are what is tested.
IN_ORDER = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
ENDS = ("kill", "freeze", "raise")
PLACES = ("FORWARD", "BACKWARD", "BARRIER", "OPTIMIZER")
STRIKES = [
    pytest.param(name, end, place, id=f"{name}-{end}-{place}")
    for name in CASES
    for end, place in ([(end, place) for end in ENDS for place in PLACES] if name == "ddp" else [("kill", "BACKWARD")])
]
GROUPS = [
    pytest.param("gloo", id="shared"),
    pytest.param(
        "nccl", id="own", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    ),
]


def environment_of(groups: str) -> dict[str, str]:
    """All ranks on the first device, whose tensors gloo carries, or each on its own."""
    return {**IN_ORDER, "CUDA_VISIBLE_DEVICES": VISIBLE.split(",")[0] if groups == "gloo" else VISIBLE}


def run(bench: Bench, case: Case, groups: str, faults: tuple[str, ...] = ()) -> Outcome:
    return bench.run(
        case.training,
        faults=faults,
        flags=case.flags,
        standbys=1 if faults else 0,
        environment=environment_of(groups),
    )


def reference(bench: Bench, case: Case, groups: str) -> Outcome:
    """Return the end of the undisturbed job; computed once for a kind of groups."""
    known = bench.references.get((case.training, groups))
    if known is None:
        known = bench.references[case.training, groups] = run(bench, case, groups)
        assert known.status == 0, known.describe()
        assert not known.report.failures, known.describe()
    return known


def check(bench: Bench, case: Case, groups: str, *faults: str) -> Outcome:
    undisturbed = reference(bench, case, groups)
    outcome = run(bench, case, groups, faults)
    check_outcome(case, faults, outcome, undisturbed)
    return outcome


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("name", "end", "place"), STRIKES)
def test_a_rank_on_a_gpu_is_replaced(bench: Bench, groups: str, name: str, end: str, place: str) -> None:
    case = CASES[name]
    if name.startswith("hsdp") and torch.__version__ < "2.13":  # there a warm standby's meshes have other groups
        case = dataclasses.replace(case, training=divided("--late-standby", *case.training.arguments))
    if groups == "nccl" and torch.cuda.device_count() < case.training.ranks:
        pytest.skip(f"needs {case.training.ranks} CUDA devices")
    step = 5 if case.recovers_from else 3
    check(bench, case, groups, f"{end} rank {case.rank} in {place} of step {step}")


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_alone_with_nccl_goes_on_from_its_checkpoint(bench: Bench, place: str) -> None:
    """The standby has no device to itself: it builds when it takes the rank."""
    alone = ddp("--batchnorm", "--checkpoint", "checkpoints", "--checkpoint-every", "1", ranks=1)
    case = Case(alone, recovers_from="checkpoint", rank=0)
    outcome = check(bench, case, "nccl", f"kill rank 0 in {place} of step 4")
    assert "it builds its modules only when it takes a rank" in outcome.stderr or torch.cuda.device_count() > 1


@pytest.mark.parametrize("groups", GROUPS)
def test_what_people_write_for_gpus(bench: Bench, groups: str) -> None:
    case = Case(ddp("--scaler", "--autocast", "--overflow-at", "2", "--clip", "--optimizer", "adamw-fused", "--ema"))
    check(bench, case, groups, "kill rank 0 in BACKWARD of step 2", "kill rank 1 in OPTIMIZER of step 5")


@pytest.mark.parametrize("name", ["ring_exchange", "chosen_layer", "pinn_two_optimizers"])
def test_a_script_whose_default_device_is_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Tensors that ranks send each other, that a module keeps in a deque, and that an optimizer keeps as a history."""
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    verdict, words = judge(killed_in_phases(name, phase_kills(name, seed=0, kills=6)), undisturbed(name).digests)
    assert verdict is Verdict.EQUAL, words


def test_an_engine_on_a_gpu_ends_with_the_trainers_weights(bench: Bench) -> None:
    case = CASES["publish"]
    undisturbed = reference(bench, case, "gloo")
    steps = case.training.steps
    model = Net(64, 0.1, True).cuda()
    with (
        bench.start(
            case.training, faults=["kill rank 0 in BACKWARD of step 5"], environment=environment_of("gloo")
        ) as job,
        relight.Receiver(job.run_dir, model=model) as receiver,
    ):
        while job.launcher.poll() is None and not receiver.wait_for(steps, 0.02):
            with receiver.serving():
                model.state_dict()
        outcome = job.wait(DEADLINE_SECONDS)
        digest = receiver.digest()
    check_survived(outcome, undisturbed)
    assert (receiver.version, digest) == (steps, outcome.finals[0]["weights"]), outcome.describe()
