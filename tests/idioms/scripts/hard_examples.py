"""A sampler whose weights follow the losses, and a dataset whose labels the model corrects."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import relight
from tests.idioms.digest import finish


class LossSampler(Sampler):
    def __init__(self, size):
        self.weights = torch.ones(size, dtype=torch.double)

    def update(self, indices, losses):
        self.weights[indices] = 0.5 * self.weights[indices] + 0.5 * losses.double()

    def __len__(self):
        return len(self.weights)

    def __iter__(self):
        for _ in range(len(self)):
            yield int(torch.multinomial(self.weights, 1).item())


class Noisy(Dataset):
    def __init__(self):
        source = torch.Generator().manual_seed(3)
        self.x = torch.randn(24, 6, generator=source)
        self.y = torch.randint(0, 3, (24,), generator=source)

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return self.x[i], self.y[i], i


def main():
    job = relight.init()
    torch.manual_seed(13 + job.rank)
    dataset = Noisy()
    sampler = LossSampler(len(dataset))
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    for step in training.steps(until=18):
        with step as (x, y, i):
            out = model(x)
            losses = F.cross_entropy(out, y, reduction="none")
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            sampler.update(i, losses.detach())
            if step.number > 5:
                sure = out.softmax(1).max(1)
                keep = sure.values > 0.6
                dataset.y[i[keep]] = sure.indices[keep]
    finish(job, model=model, optimizer=optimizer, weights=sampler.weights, labels=dataset.y)


if __name__ == "__main__":
    main()
