"""A small residual network for images, DistributedSampler, epochs, a scheduler that steps once an epoch.

The place in the data must be found by the number of the step; momentum is in the optimizer.
"""

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import relight
from tests.idioms.digest import finish


def conv3x3(cin, cout, stride=1):
    return nn.Conv2d(cin, cout, 3, stride, 1, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1, self.bn1 = conv3x3(cin, cout, stride), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = conv3x3(cout, cout), nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + identity)


class FakeCIFAR(Dataset):
    def __init__(self, n=144):
        g = torch.Generator().manual_seed(0)
        self.images = torch.randn(n, 3, 8, 8, generator=g)
        self.targets = torch.randint(0, 10, (n,), generator=g)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        if torch.rand(()) < 0.5:  # random flip
            image = image.flip(-1)
        return image, self.targets[i]


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("-b", "--batch-size", default=8, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--wd", default=1e-4, type=float)
    return parser.parse_args()


def main():
    args = parse()
    job = relight.init()
    torch.manual_seed(0)
    net = nn.Sequential(
        conv3x3(3, 4), nn.BatchNorm2d(4), nn.ReLU(), BasicBlock(4, 4), BasicBlock(4, 8, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip
    net = DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=args.momentum, weight_decay=args.wd, nesterov=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.1)
    data = FakeCIFAR()
    loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data, job.world_size, job.rank))
    training = relight.Training(model=net, optimizer=optimizer, scheduler=scheduler, data=loader)

    for step in training.steps(until=args.epochs * len(loader)):
        with step as batch:
            images, target = batch
            loss = criterion(net(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step.number + 1) % len(loader) == 0:
                scheduler.step()
    finish(job, net=net, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
