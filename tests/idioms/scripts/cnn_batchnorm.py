"""A convolutional network with BatchNorm in DDP, as in the first tutorial. Statistics of BatchNorm differ by rank."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import relight
from tests.idioms.digest import finish


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.bn2 = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(8 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return F.log_softmax(self.fc(self.dropout(torch.flatten(x, 1))), dim=1)


def main():
    job = relight.init()
    torch.manual_seed(1)
    dataset = TensorDataset(torch.randn(240, 1, 14, 14), torch.randint(0, 10, (240,)))
    sampler = DistributedSampler(dataset, job.world_size, job.rank)
    train_loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(Net())
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.7)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=train_loader)

    for step in training.steps(until=20):
        with step as (data, target):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            scheduler.step()

    finish(job, model=model, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
