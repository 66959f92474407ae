"""Evaluation on a part of the data that libraries' objects took from the rank: samplers, subsets, batch samplers."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Subset, TensorDataset

import relight
from tests.idioms.digest import finish


class Evaluator:
    def __init__(self, loader):
        self.loader = loader

    @torch.no_grad()
    def __call__(self, model):
        model.eval()
        found = torch.zeros(2)
        for x, y in self.loader:
            found += torch.stack([nn.functional.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(x))])
        model.train()
        dist.all_reduce(found)
        return found.tolist()


def main():
    job = relight.init()
    torch.manual_seed(90)
    x, y = torch.randn(96, 6), torch.randint(0, 3, (96,))
    train, held_out = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    shard = DistributedSampler(held_out, job.world_size, job.rank, shuffle=True)
    batches = BatchSampler(DistributedSampler(held_out, job.world_size, job.rank, shuffle=False), 5, drop_last=False)
    quarter = DataLoader(Subset(held_out, list(range(job.rank * 8, job.rank * 8 + 8))), batch_size=4)
    evaluators = [
        Evaluator(DataLoader(held_out, batch_size=4, sampler=shard)),
        Evaluator(DataLoader(held_out, batch_sampler=batches)),
        Evaluator(quarter),
    ]
    loader = DataLoader(train, batch_size=8, sampler=DistributedSampler(train, job.world_size, job.rank))
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    history = []
    for step in training.steps(until=14):
        with step as (inputs, labels):
            if step.number % 3 == 2:
                shard.set_epoch(step.number)
                history.append([evaluate(model) for evaluate in evaluators])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, history=history)


if __name__ == "__main__":
    main()
