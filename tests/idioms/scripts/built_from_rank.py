"""Objects made from the rank before the loop: a dataset that knows its rank, an offset in a closure, a seed, a flag."""

# ranks: 3
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import relight
from tests.idioms.digest import finish


class Sharded(Dataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size
        self.first = rank * 7

    def __len__(self):
        return 60

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index * self.world_size + self.rank)
        return torch.randn(4, generator=generator)


def make_augment(rank, seed):
    shift = 0.1 * (rank + 1)

    def augment(x):
        return x + shift + 0.01 * (seed % 5)

    return augment


class Logger:
    level = 0

    def __init__(self, rank):
        self.enabled = rank == 0
        self.rank = rank


def main():
    job = relight.init()
    rank = job.rank
    seed = 1000 + 17 * rank
    torch.manual_seed(83)
    model = DDP(nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 4)))
    model.module.scale, model.module.table = 1 + 0.1 * rank, [rank, 0.5]  # attributes of the network itself
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    model.module.found = {"total": float(total)}  # which a standby, alone, finds otherwise
    del total
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    dataset = Sharded(rank, job.world_size)
    augment = make_augment(rank, seed)
    logger = Logger(rank)
    is_leader = rank == 0
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=15):
        with step:
            x = augment(torch.stack([dataset[step.number * 3 + k] for k in range(3)]))
            optimizer.zero_grad()
            loss = (model(x) - x.flip(1)).square().mean() * (1 + logger.rank)
            loss = loss * (model.module.scale + sum(model.module.table) + model.module.found["total"])
            loss.backward()
            decision = torch.tensor([float(loss > 0.5) if is_leader else 0.0])
            dist.broadcast(decision, 0)
            if decision.item():
                optimizer.param_groups[0]["lr"] = 0.03
            else:
                optimizer.param_groups[0]["lr"] = 0.01
            optimizer.step()
        if logger.enabled and step.number % 5 == 0:
            print(f"step {step.number} loss {loss.item():.3f} seed {seed}", flush=True)
    finish(job, model=model, optimizer=optimizer, rank=rank, seed=seed, first=dataset.first, leader=is_leader)


if __name__ == "__main__":
    main()
