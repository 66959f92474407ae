"""Gradients that wait for an optimizer which pauses: doubted if a recovery threw them away before they were used."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from relight.training.state.modules.slots import Slots
from relight.training.state.optimizers.gradients import Gradients
from relight.training.state.optimizers.parameter_groups import parameters_of
from relight.training.worker.step.left_gradients import LeftGradients


class Job:
    """Two optimizers, of which the first pauses."""

    def __init__(self) -> None:
        self.generation = 1
        self.reader = ""  # a line of the script
        self.doubts: list[str] = []
        self.net = nn.Linear(2, 2)
        self.slow = torch.optim.SGD([self.net.weight], lr=0.1)
        self.fast = torch.optim.SGD([self.net.bias], lr=0.1)
        optimizers = {"slow": self.slow, "fast": self.fast}
        self.gradients = Gradients(
            list(self.net.parameters()),
            [],
            {},
            Slots({"net": self.net}),
            lambda: [*parameters_of(self.slow), *parameters_of(self.fast)],
        )
        self.left = LeftGradients(
            optimizers, lambda: self.generation, self.doubts.append, self.gradients, lambda _: self.reader
        )

    def step(self, *names: str, zero: bool = False, fails: bool = False) -> None:
        self.left.begin_attempt()
        if zero:
            self.net.zero_grad()
        self.net(torch.ones(1, 2)).sum().backward()
        for name in names:
            self.left.before_optimizer(name)
        if fails:
            self.generation += 1
            self.gradients.clear()
        else:
            self.left.end_step()
            self.fast.zero_grad()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    job.left.install()
    yield job
    job.left.remove()


def test_used_after_a_recovery_they_are_doubted(job: Job) -> None:
    job.step("fast")
    job.step("fast", fails=True)
    job.step("fast")
    assert not job.doubts
    job.step("fast", "slow")
    assert "slow used gradients" in job.doubts[0]


def test_a_failure_after_they_were_used_in_the_same_step_is_one_before(job: Job) -> None:
    job.step("fast")
    job.step("fast", "slow", fails=True)
    job.step("fast", "slow")
    assert len(job.doubts) == 1


def test_made_zero_first_or_used_without_a_recovery_they_are_not(job: Job) -> None:
    job.step("fast")
    job.step("fast", "slow")
    job.step("fast", "slow", fails=True)
    job.step("fast", "slow")
    job.step("fast")
    job.step("fast", fails=True)
    job.step("fast", "slow", zero=True)
    assert not job.doubts


def test_those_of_parameters_that_no_optimizer_held_are_doubted_once_one_does(job: Job) -> None:
    group = job.fast.param_groups[0]["params"]
    group.clear()
    job.step("slow")
    job.step("slow", fails=True)
    job.step("slow")
    assert not job.doubts
    group.append(job.net.bias)
    job.step("fast")
    assert "bias: no optimizer held them" in job.doubts[0]


def test_those_of_parameters_that_no_optimizer_holds_are_doubted_if_the_script_reads_gradients(job: Job) -> None:
    job.fast.param_groups[0]["params"].clear()
    job.reader = "train.py:7"
    job.step("slow")
    job.step("slow", fails=True)
    assert not job.doubts
    job.step("slow")
    assert "before train.py:7 could read them" in job.doubts[0]
    job.step("slow")
    assert len(job.doubts) == 1


def test_made_zero_in_each_step_those_of_parameters_that_no_optimizer_holds_are_not(job: Job) -> None:
    group = job.fast.param_groups[0]["params"]
    group.clear()
    job.reader = "train.py:7"
    job.step("slow", zero=True)
    job.step("slow", zero=True, fails=True)
    job.step("slow", zero=True)
    group.append(job.net.bias)
    job.step("fast", zero=True)
    assert not job.doubts


def test_a_step_that_is_repeated_for_a_comparison_finds_gradients_as_they_were(job: Job) -> None:
    job.step("fast")
    assert job.net.weight.grad is not None
    left = job.net.weight.grad.clone()
    job.gradients.see(keep=True)
    for _ in range(2):
        job.net(torch.ones(1, 2)).sum().backward()
        job.gradients.put_back()
        assert torch.equal(torch.as_tensor(job.net.weight.grad), left)
        job.gradients.see(keep=True)
    job.gradients.clear()
    assert not job.gradients.are_waiting()


def test_nothing_of_torch_stays_changed() -> None:
    before = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad
    job = Job()
    job.left.install()
    assert torch.optim.Optimizer.zero_grad is not before[0]
    job.left.remove()
    assert (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == before
