"""The dataset is changed while training goes on: its resolution grows, and its sampler prefers examples of high loss."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import relight
from tests.idioms.digest import finish


class Images(Dataset):
    def __init__(self, rank):
        generator = torch.Generator().manual_seed(30 + rank)
        self.images = torch.randn(40, 1, 12, 12, generator=generator)
        self.resolution = 4

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = nn.functional.interpolate(self.images[index][None], size=self.resolution)[0]
        return image, self.images[index].mean(), index


def main():
    job = relight.init()
    torch.manual_seed(8)
    dataset = Images(job.rank)
    sampler = WeightedRandomSampler(torch.ones(40), 40, replacement=True)
    loader = DataLoader(dataset, batch_size=5, sampler=sampler)
    net = DDP(
        nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 1))
    )
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    training = relight.Training(model=net, optimizer=optimizer, data=loader)
    for step in training.steps(until=16):
        with step as (image, target, index):
            if step.number in (5, 10):
                dataset.resolution += 4
            losses = (net(image).squeeze(1) - target).square()
            optimizer.zero_grad()
            losses.mean().backward()
            sampler.weights[index] = 0.5 + losses.detach().double()
            optimizer.step()
    finish(job, net=net, optimizer=optimizer, weights=sampler.weights, resolution=dataset.resolution)


if __name__ == "__main__":
    main()
