"""static_graph=True: a layer that is used twice, under reentrant checkpoints, and one that is never used."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import relight
from tests.idioms.digest import finish


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.shared, self.out = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 2)
        self.unused = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.2)

    def block(self, h):
        return self.drop(torch.relu(self.shared(h)))

    def forward(self, x):
        h = self.inp(x)
        h = checkpoint(self.block, h, use_reentrant=True)
        h = h + checkpoint(self.block, h, use_reentrant=False)
        return self.out(h)


def main():
    job = relight.init()
    torch.manual_seed(8)
    model = DDP(Net(), static_graph=True)
    optimizer = torch.optim.NAdam(model.parameters(), 5e-3)
    for step in relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6)).steps(until=14):
        with step as x:
            optimizer.zero_grad(set_to_none=False)
            nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
