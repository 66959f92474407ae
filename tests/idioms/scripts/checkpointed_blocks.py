"""Gradient checkpointing with dropout (forward runs again in backward, with its random state) and bfloat16 autocast."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import relight
from tests.idioms.digest import finish


class CheckpointedMLP(nn.Module):
    def __init__(self, width=16, depth=3):
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(26)
    model = DDP(CheckpointedMLP())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=16):
        with step as x:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), (x[:, 0] > x[:, 1]).long())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finish(job, model=model, optimizer=optimizer)
