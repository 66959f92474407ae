"""Gradients that wait for an optimizer which pauses: doubted if a recovery threw them away before they were used."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from relight.training.worker.step.left_gradients import LeftGradients


class Job:
    """Two optimizers, of which the first pauses."""

    def __init__(self) -> None:
        self.generation = 1
        self.doubts: list[str] = []
        self.net = nn.Linear(2, 2)
        self.slow = torch.optim.SGD([self.net.weight], lr=0.1)
        self.fast = torch.optim.SGD([self.net.bias], lr=0.1)
        self.left = LeftGradients(
            {"slow": self.slow, "fast": self.fast}, lambda: self.generation, self.doubts.append, lambda: None
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
            self.net.weight.grad = self.net.bias.grad = None
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


def test_nothing_of_torch_stays_changed() -> None:
    before = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad
    job = Job()
    job.left.install()
    assert torch.optim.Optimizer.zero_grad is not before[0]
    job.left.remove()
    assert (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == before
