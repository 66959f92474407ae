"""Validates with the wrapped model, whose forward pass broadcasts statistics, and reduces several sums at a time."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


@torch.inference_mode()
def validate(model, loader):
    model.eval()
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(3)]
    for number, (x, y) in enumerate(loader):
        output = model(x)
        sums[0] += nn.functional.cross_entropy(output, y, reduction="sum").double()
        sums[1] += (output.argmax(1) == y).sum()
        sums[2] += len(y) * (number + 1)
    handles = [dist.all_reduce(one, async_op=True) for one in sums]
    spread = output.std()
    while not handles[0].is_completed():
        pass
    for handle in handles[1:]:
        handle.wait()
    dist.all_reduce(spread, dist.ReduceOp.MAX)
    model.train()
    return [one.item() for one in sums], spread.item()


def main():
    job = relight.init()
    torch.manual_seed(17)
    x, y = torch.randn(96, 6), torch.randint(0, 3, (96,))
    data, held = TensorDataset(x[:48], y[:48]), TensorDataset(x[48:], y[48:])
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
    held_loader = DataLoader(held, batch_size=4, sampler=DistributedSampler(held, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    training = relight.Training(model=model, optimizer=optimizer, plateau=plateau, data=loader)
    history = []
    for epoch in training.epochs(4):
        for step in training.steps():
            with step as (x, y):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        (loss, correct, weight), spread = validate(model, held_loader)
        plateau.step(loss)
        history.append((epoch, loss, correct, weight, spread, optimizer.param_groups[0]["lr"]))
        if job.rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, correct {correct:.0f}")
    finish(job, model=model, optimizer=optimizer, plateau=plateau, history=history)


main()
