"""Hooks of the optimizer and of the schedule clip, count and average."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(19)
    model = DDP(nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4)))
    optimizer = torch.optim.NAdam(model.parameters(), 0.02)
    average = [p.detach().clone() for p in model.parameters()]
    seen = {"pre": 0, "post": 0, "norm": 0.0}

    def before(opt, args, kwargs):
        seen["pre"] += 1
        seen["norm"] = 0.9 * seen["norm"] + float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))

    def after(opt, args, kwargs):
        seen["post"] += 1
        for a, p in zip(average, model.parameters(), strict=True):
            a.lerp_(p.detach(), 0.1)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=15)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=lambda n: torch.randn(6, 4))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            (model(x) * seen["norm"] - x).square().mean().backward()
            optimizer.step()
            scheduler.step()
    finish(
        job,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler.state_dict()["last_epoch"],
        seen=seen,
        average=average,
    )


if __name__ == "__main__":
    main()
