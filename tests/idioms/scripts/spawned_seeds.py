"""Each step spawns a generator from one that NumPy keeps a count of children for; so does the data."""

# ranks: 2
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

import relight
from tests.idioms.digest import finish


class Noisy(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(11)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        (child,) = self.rng.spawn(1)
        return torch.from_numpy(child.normal(size=3)).float() + index / 64


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.seeds = np.random.SeedSequence(5)

    def forward(self, x):
        noise = np.random.default_rng(self.seeds.spawn(1)[0]).normal(size=3)
        return x * self.scale + torch.from_numpy(noise).float()


def main():
    job = relight.init()
    torch.manual_seed(3)
    rng = np.random.default_rng(job.rank)
    net = Layer()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    data = DataLoader(Noisy(), batch_size=4)
    training = relight.Training(model=model, optimizer=optimizer, data=data)
    for step in training.steps(until=14):
        with step as x:
            (child,) = rng.spawn(1)
            optimizer.zero_grad()
            (model(x) * float(child.normal())).square().mean().backward()
            optimizer.step()
    finish(job, scale=net.scale)


if __name__ == "__main__":
    main()
