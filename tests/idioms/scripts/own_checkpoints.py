"""Checkpoints of the script's own: written by rank 0 while it trains, and loaded at the start if there is one."""

# ranks: 2
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

PATH = "own_checkpoint.pt"


def main():
    job = relight.init()
    torch.manual_seed(101)
    net = nn.Sequential(nn.Linear(5, 10), nn.GELU(), nn.Linear(10, 1))
    optimizer = torch.optim.AdamW(net.parameters(), 0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    resumed_at, best = 0, float("inf")
    if os.path.exists(PATH):
        saved = torch.load(PATH, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        resumed_at, best = saved["step"] + 1, saved["best"]
    model = DDP(net)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=lambda n: torch.randn(8, 5))
    for step in training.steps(until=16):
        with step as x:
            warm = min(1.0, (step.number - resumed_at + 1) / 5)
            loss = warm * (model(x) - x.norm(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            best = min(best, mean.item())
            optimizer.step()
            scheduler.step()
        if job.rank == 0 and step.number % 3 == 2 and step.committed:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "best": best}
            torch.save({**state, "scheduler": scheduler.state_dict(), "step": step.number}, PATH + ".part")
            os.replace(PATH + ".part", PATH)
    finish(job, model=model, optimizer=optimizer, best=best)


if __name__ == "__main__":
    main()
