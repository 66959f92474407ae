"""Gradients that wait for an optimizer which pauses: doubted if a recovery threw them away before they were used."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from relight.training.state.tracked import TrackedState
from relight.training.torch_private.tensors import version_of
from relight.training.worker.step.left_gradients import LeftGradients


class Job:
    """Two optimizers, of which the first pauses."""

    def __init__(self, *, fast_holds_bias: bool = True) -> None:
        self.reader = ""  # a line of the script
        self.doubts: list[str] = []
        self.net = nn.Linear(2, 2)
        self.slow = torch.optim.SGD([self.net.weight], lr=0.1)
        self.fast = torch.optim.SGD([self.net.bias], lr=0.1)
        if not fast_holds_bias:
            self.fast.param_groups[0]["params"].clear()
        optimizers: dict[str, Optimizer] = {"slow": self.slow, "fast": self.fast}
        self.state = TrackedState({"net": self.net}, optimizers, {}, {})
        self.gradients = self.state.gradients
        self.left = LeftGradients(optimizers, self.doubts.append, self.gradients, lambda _: self.reader)

    def join(self) -> None:
        self.fast.param_groups[0]["params"].append(self.net.bias)

    def adding_step(self, zero: str = "never", *, fails: bool = False) -> None:
        """A step of the fast optimizer, with a backward pass after it. `zero`: at its "head", "end" or "middle"."""
        self.gradients.see()
        self.left.begin_attempt()
        for place in ("head", "step", "middle", "backward", "end"):
            if place in zero.split() and "by hand" in zero:
                for parameter in self.net.parameters():
                    if parameter.grad is not None:
                        parameter.grad.zero_()
            elif place in zero.split():
                self.fast.zero_grad(set_to_none="in place" not in zero)
            if place in ("head", "backward"):
                self.gradients.see_backward()
                self.net(torch.ones(1, 2)).sum().backward()
            elif place == "step":
                self.left.before_optimizer("fast")
                self.state.members.see("fast")
        if fails:
            self.gradients.clear()
        else:
            self.left.end_step()

    def step(self, *names: str, zero: bool = False, fails: bool = False, joins: bool = False) -> None:
        self.gradients.see()
        self.left.begin_attempt()
        trains = self.net.bias.requires_grad
        if joins:
            self.net.bias.requires_grad_(True)
            self.join()
        if zero:
            self.net.zero_grad()
        self.net(torch.ones(1, 2)).sum().backward()
        for name in names:
            self.left.before_optimizer(name)
            self.state.members.see(name)
        if fails:
            if joins:
                self.fast.zero_grad()
                self.fast.param_groups[0]["params"].clear()
                self.net.bias.requires_grad_(trains)
            self.gradients.clear()
        else:
            self.left.end_step()
            self.fast.zero_grad()
            if "slow" in names:
                self.slow.zero_grad()


@pytest.fixture
def job() -> Iterator[Job]:
    yield from _installed(Job())


@pytest.fixture
def late() -> Iterator[Job]:
    """A job of which no optimizer holds the bias."""
    yield from _installed(Job(fast_holds_bias=False))


def _installed(job: Job) -> Iterator[Job]:
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


@pytest.mark.parametrize("zero", ["never", "middle", "middle in place", "middle by hand"])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_those_to_which_an_optimizer_adds_in_each_step_are_doubted(job: Job, zero: str, before: int) -> None:
    for _ in range(before):
        job.adding_step(zero)
    job.adding_step(zero, fails=True)
    job.adding_step(zero)
    job.adding_step(zero)
    assert len(job.doubts) == 1
    assert "fast used gradients of earlier steps" in job.doubts[0]


@pytest.mark.parametrize("zero", ["head", "end", "head in place", "end in place", "head by hand", "end by hand"])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_made_zero_before_or_after_all_of_a_step_they_are_not(job: Job, zero: str, before: int) -> None:
    for _ in range(before):
        job.adding_step(zero)
    job.adding_step(zero, fails=True)
    for _ in range(4):
        job.adding_step(zero)
    assert not job.doubts


def test_a_replacement_knows_of_those_to_which_an_optimizer_adds(job: Job) -> None:
    job.adding_step("middle")
    job.adding_step("middle")
    other = Job()
    other.gradients.adopt_missing(job.gradients.missing())
    other.adding_step("middle")
    assert "fast used gradients of earlier steps" in other.doubts[0]


def test_made_zero_first_or_used_without_a_recovery_they_are_not(job: Job) -> None:
    job.step("fast")
    job.step("fast", "slow")
    job.step("fast", "slow", fails=True)
    job.step("fast", "slow")
    job.step("fast")
    job.step("fast", fails=True)
    job.step("fast", "slow", zero=True)
    assert not job.doubts


def test_those_of_parameters_that_no_optimizer_held_are_doubted_once_one_does(late: Job) -> None:
    late.step("slow")
    late.step("slow", fails=True)
    late.step("slow")
    assert not late.doubts
    late.join()
    late.step("fast")
    assert "bias: no optimizer held them" in late.doubts[0]


def test_so_are_those_that_the_interrupted_step_used_and_made_zero_itself(late: Job) -> None:
    late.step("slow")
    late.step("fast", joins=True, fails=True)
    assert not late.doubts
    late.step("fast", joins=True)
    assert "bias: no optimizer held them" in late.doubts[0]


def test_those_of_layers_that_were_frozen_until_they_joined_are_not(late: Job) -> None:
    late.net.bias.requires_grad_(False)
    late.step("slow")
    late.step("fast", joins=True, fails=True)
    late.step("fast", joins=True)
    assert not late.doubts


def test_a_replacement_knows_of_those_that_were_thrown_away(late: Job) -> None:
    late.step("slow")
    late.step("slow", fails=True)
    other = Job(fast_holds_bias=False)
    other.gradients.adopt_missing(late.gradients.missing())
    other.join()
    other.step("fast")
    assert "bias: no optimizer held them" in other.doubts[0]


def test_a_replacement_knows_of_those_of_an_optimizer_that_pauses(job: Job) -> None:
    job.step("fast")
    job.step("fast", fails=True)
    other = Job()
    other.gradients.adopt_missing(job.gradients.missing())
    other.step("fast")
    assert not other.doubts
    other.step("fast", "slow")
    assert "slow used gradients" in other.doubts[0]
    other.step("fast", "slow")
    assert len(other.doubts) == 1


def test_a_checkpoint_lacks_those_that_wait_when_it_is_written(job: Job) -> None:
    job.step("fast")
    other = Job()
    other.gradients.adopt_missing(job.gradients.missing())
    other.step("fast", "slow")
    assert "slow used gradients" in other.doubts[0]


def test_no_more_is_missing_once_the_optimizer_that_paused_has_used_them(job: Job) -> None:
    job.step("fast")
    assert job.gradients.missing() == [("net", "weight")]
    job.step("fast", "slow")
    assert not job.gradients.missing()


def test_an_optimizer_of_one_rank_steps_while_gradients_are_lost(late: Job) -> None:
    late.step("slow")
    late.step("slow", fails=True)
    late.left.before_optimizer("per_rank['own']")
    assert not late.doubts


def test_those_of_parameters_that_no_optimizer_holds_are_doubted_if_the_script_reads_gradients(late: Job) -> None:
    late.reader = "train.py:7"
    late.step("slow")
    late.step("slow", fails=True)
    assert not late.doubts
    late.step("slow")
    assert "before train.py:7 could read them" in late.doubts[0]
    late.step("slow")
    assert len(late.doubts) == 1


def test_made_zero_in_each_step_those_of_parameters_that_no_optimizer_holds_are_not(late: Job) -> None:
    late.reader = "train.py:7"
    late.step("slow", zero=True)
    late.step("slow", zero=True, fails=True)
    late.step("slow", zero=True)
    late.join()
    late.step("fast", zero=True)
    assert not late.doubts


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


def test_a_script_may_keep_gradients_that_it_made_zero_and_assign_others(job: Job) -> None:
    job.step("fast", "slow")
    job.net(torch.ones(1, 2)).sum().backward()
    kept = [parameter.grad for parameter in job.net.parameters() if parameter.grad is not None]
    job.net.zero_grad(set_to_none=False)
    for parameter in job.net.parameters():
        parameter.grad = torch.zeros_like(parameter)
        while version_of(parameter.grad) < version_of(kept[0]):
            parameter.grad.zero_()
    job.step("fast", "slow")
    assert len(kept) == 2
    assert not job.doubts
