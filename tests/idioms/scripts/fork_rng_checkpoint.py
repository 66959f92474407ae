"""Noise from forked streams inside forward, checkpointed blocks that restore it, and a generator kept by a module."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint_sequential

import relight
from tests.idioms.digest import finish


class Noise(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x):
        if not self.training:
            return x
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(1000, (1,), generator=self.generator)))
            return x + 0.1 * torch.randn_like(x)


def main():
    job = relight.init()
    torch.manual_seed(92)
    net = nn.Sequential(
        nn.Linear(6, 10), nn.Dropout(0.3), nn.ReLU(), nn.Linear(10, 10), nn.Dropout(0.3), nn.Linear(10, 2)
    )
    noise = Noise(5)
    model = DDP(net)
    optimizer = torch.optim.Adamax(model.parameters(), 1e-2)
    training = relight.Training(
        model={"net": model, "noise": noise}, optimizer=optimizer, data=lambda n: torch.randn(6, 6)
    )
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            out = checkpoint_sequential(net, 2, noise(x), use_reentrant=False)
            (out - x[:, :2]).square().mean().backward()
            for p in net.parameters():
                torch.distributed.all_reduce(p.grad)
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, drawn=noise.generator.get_state())


if __name__ == "__main__":
    main()
