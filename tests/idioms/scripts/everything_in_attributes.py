"""Everything lies in a dict with attributes, also a function whose closure counts, and the step's batch."""

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
    seen = [1] * classes

    def weigh(labels):
        for label in labels.tolist():
            seen[label] += 1
        return len(labels) / torch.tensor(seen)

    weigh.seen = seen
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
    run.weigh, run.total, run.totals = make_weigher(3), 0, []
    for step in run.training.steps(until=15):
        with step as (run.inputs, run.labels):
            run.optimizer.zero_grad()
            loss = F.cross_entropy(run.model(run.inputs), run.labels, weight=run.weigh(run.labels))
            (loss * (1 + 0.01 * run.total)).backward()
            run.total += 1
            run.totals.append(run.total)
            run.optimizer.step()
    finish(run.job, model=run.model, optimizer=run.optimizer, seen=run.weigh.seen, totals=run.totals)


main()
