"""The private interfaces of torch's pipelines that relight leans on, each tried against the installed version.

Several stages in one process: they hand each other tensors without sending them, and go through the same states.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

from relight.errors import UsageError
from relight.training.shards import Cut
from relight.training.torch_private.distributed.ddp import BucketLayout
from relight.training.torch_private.distributed.pipeline import Pipelines

WIDTH = 5
DEVICE = torch.device("cpu")


class StopHere(RuntimeError):
    pass


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Layer(nn.Module):
    """One that counts its batches, and may stop a pass in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.stop_after = -1  # microbatches
        self.linear.register_full_backward_pre_hook(self._backward)
        self.stop_in_backward = False

    def _backward(self, *_: Any) -> None:
        if self.stop_in_backward:
            raise StopHere

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stop_after == 0:
            raise StopHere
        self.stop_after -= 1
        out: torch.Tensor = self.statistics(self.linear(x))
        return out


class Training:
    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.layers = [Layer() for _ in range(1 if kind == "gpipe" else 2)]
        stages: list[Any] = [
            PipelineStage(layer, index, len(self.layers), DEVICE) for index, layer in enumerate(self.layers)
        ]
        loss = nn.MSELoss()
        self.schedule: Any = (
            ScheduleGPipe(stages[0], 2, loss_fn=loss)
            if kind == "gpipe"
            else ScheduleInterleaved1F1B(stages, 2, loss_fn=loss)
        )
        self.parameters = [parameter for layer in self.layers for parameter in layer.parameters()]
        self.pipelines = Pipelines(self.schedule, self.parameters)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1)

    def gradients(self, step: int) -> None:
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        self.schedule.step(batch, target=batch)

    def write(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[list[float]]:
        buffers = [buffer for layer in self.layers for buffer in layer.buffers()]
        return [tensor.flatten().tolist() for tensor in (*self.parameters, *buffers)]


@pytest.mark.parametrize("where", ["forward of microbatch 1", "backward"])
@pytest.mark.parametrize("kind", ["gpipe", "interleaved"])
def test_a_step_that_was_interrupted_leaves_nothing_behind(kind: str, where: str) -> None:
    undisturbed, training = Training(kind), Training(kind)
    for step in range(3):
        undisturbed.gradients(step)
        undisturbed.write()

        if step == 1:
            last = training.layers[-1]
            buffers = {name: buffer.clone() for name, buffer in last.named_buffers()}
            before = [{n: b.clone() for n, b in layer.named_buffers()} for layer in training.layers]
            assert buffers
            if where == "backward":
                last.stop_in_backward = True
            else:
                last.stop_after = 1
            with pytest.raises(RuntimeError):
                training.gradients(step)
            last.stop_in_backward, last.stop_after = False, -1
            training.pipelines.reset()
            training.optimizer.zero_grad()
            for layer, values in zip(training.layers, before, strict=True):
                for name, buffer in layer.named_buffers():
                    buffer.copy_(values[name])
        training.gradients(step)
        training.write()
    assert training.state() == undisturbed.state()


def test_the_look_ahead_counts_no_batch() -> None:
    training = Training("interleaved")
    training.gradients(0)
    assert [int(layer.statistics.num_batches_tracked or 0) for layer in training.layers] == [2, 2]  # microbatches
    training.pipelines.reset()
    training.gradients(1)
    assert [int(layer.statistics.num_batches_tracked or 0) for layer in training.layers] == [4, 4]


def test_the_stages_of_a_rank_are_its_part() -> None:
    assert list(Training("gpipe").pipelines.cuts()) == [Cut("stage", 0, 1)]
    assert list(Training("interleaved").pipelines.cuts()) == [Cut("stage", 0, 2), Cut("stage", 1, 2)]
    assert not Pipelines(None, [])


def test_what_does_not_fit_is_refused() -> None:
    training = Training("gpipe")
    with pytest.raises(UsageError, match="hand over the schedule"):
        Pipelines(None, training.parameters)
    with pytest.raises(UsageError, match="a module that was not handed over"):
        Pipelines(training.schedule, training.parameters[1:])
    with pytest.raises(UsageError, match="got a Linear"):
        Pipelines(nn.Linear(1, 1), [])


class Crosswise(nn.Module):
    """DDP reduces all of it at once in its first step, and lays its buckets out anew then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(300, 300) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@pytest.mark.parametrize("fixed", [True, False])
def test_the_buckets_of_ddp_can_be_kept_as_they_are(fixed: bool) -> None:
    model = DistributedDataParallel(Crosswise(), bucket_cap_mb=1)
    layout = BucketLayout(model, fixed=fixed)
    steps: list[list[list[int]]] = []

    def note(state, bucket):  # type: ignore[no-untyped-def] # DDP looks at annotations, and torch has no stub for this one
        steps[-1].append([id(parameter) for parameter in bucket.parameters()])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, note)
    for step in range(3):
        steps.append([])
        layout.begin_step(step)
        model(torch.ones(2, 300)).square().mean().backward()
        layout.settle(step)
    assert (steps[1] == steps[0]) is fixed
    assert steps[2] == steps[1]
