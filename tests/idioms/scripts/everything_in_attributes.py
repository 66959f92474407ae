"""Everything lies in a dict with attributes, also a function whose closure counts, and the step's batch."""

import collections

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


class Run(dict):
    def __init__(self):
        super().__init__()
        self.__dict__ = self


def make_weigher(classes):
    counts = collections.Counter()

    def weigh(labels):
        counts.update(labels.tolist())
        total = sum(counts.values())
        return torch.tensor([total / (classes * max(1, counts[c])) for c in range(classes)])

    weigh.counts = counts
    return weigh


def main():
    run = Run()
    run.job = relight.init()
    torch.manual_seed(113)
    x = torch.randn(60, 6)
    data = TensorDataset(x, (x[:, 0] > 1).long() + (x[:, 1] > 1).long())
    sampler = DistributedSampler(data, run.job.world_size, run.job.rank)
    run.model = DDP(nn.Linear(6, 3))
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.02)
    run.training = relight.Training(
        model=run.model, optimizer=run.optimizer, data=DataLoader(data, batch_size=4, sampler=sampler)
    )
    run.weigh, run.total, run.seen = make_weigher(3), 0, []
    for step in run.training.steps(until=15):
        with step as (run.inputs, run.labels):
            run.optimizer.zero_grad()
            loss = F.cross_entropy(run.model(run.inputs), run.labels, weight=run.weigh(run.labels))
            (loss * (1 + 0.01 * run.total)).backward()
            run.total += 1
            run.seen.append(run.total)
            run.optimizer.step()
    counts = sorted(run.weigh.counts.items())
    finish(run.job, model=run.model, optimizer=run.optimizer, counts=counts, seen=run.seen)


main()
