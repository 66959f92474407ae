"""A schedule whose function reads a variable that steps change; chained and sequential schedules."""

# ranks: 2
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(107)
    model = DDP(nn.Sequential(nn.Linear(4, 6), nn.Mish(), nn.Linear(6, 2)))
    optimizer = torch.optim.SGD(
        [{"params": model.module[0].parameters(), "lr": 0.1}, {"params": model.module[2].parameters(), "lr": 0.05}],
        momentum=0.8,
    )
    factor = [1.0]
    drops = {"n": 0}
    own = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda e: factor[0], lambda e: factor[0] / (1 + drops["n"])])
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    cos = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2)
    seq = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cos], milestones=[5])
    training = relight.Training(
        model=model, optimizer=optimizer, scheduler={"own": own, "seq": seq}, data=lambda n: torch.randn(6, 4)
    )
    lrs = []
    for step in training.steps(until=15):
        with step as x:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
            loss.backward()
            optimizer.step()
            if step.number % 4 == 3:
                factor[0] *= 0.7
                drops["n"] += 1
            if step.number % 2:
                own.step()
            else:
                seq.step()
            lrs.append([g["lr"] for g in optimizer.param_groups])
    finish(job, model=model, optimizer=optimizer, lrs=lrs, factor=factor)


if __name__ == "__main__":
    main()
