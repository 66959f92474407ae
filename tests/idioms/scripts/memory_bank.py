"""Instance discrimination: a memory bank outside the model, written by index after each step."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


class Bank:
    def __init__(self, size, dim):
        self.rows = F.normalize(torch.randn(size, dim, generator=torch.Generator().manual_seed(4)), dim=1)
        self.z = -1.0

    def update(self, index, features):
        self.rows[index] = F.normalize(0.5 * self.rows[index] + 0.5 * features, dim=1)


def main():
    job = relight.init()
    torch.manual_seed(107)
    data = TensorDataset(torch.arange(48), torch.randn(48, 6))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    bank = Bank(48, 8)
    for step in training.steps(until=15):
        with step as (index, inputs):
            features = F.normalize(model(inputs), dim=1)
            scores = torch.exp(features @ bank.rows.T / 0.5)
            if bank.z < 0:
                total = scores.detach().mean() * len(bank.rows)
                dist.all_reduce(total)
                bank.z = (total / job.world_size).item()
            loss = -(scores[torch.arange(len(index)), index] / bank.z).log().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            everyone = [torch.empty_like(index) for _ in range(job.world_size)]
            dist.all_gather(everyone, index)
            all_features = [torch.empty_like(features) for _ in range(job.world_size)]
            dist.all_gather(all_features, features.detach().contiguous())
            bank.update(torch.cat(everyone), torch.cat(all_features))
    finish(job, model=model, optimizer=optimizer, bank=bank.rows, z=bank.z)


if __name__ == "__main__":
    main()
