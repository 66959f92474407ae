"""The loop ends when a number of tokens has been seen on all ranks; the schedule follows tokens, not steps."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(14)
    model = DDP(nn.Embedding(20, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    budget, seen = 700, 0
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: torch.randint(20, (int(torch.randint(10, 40, (1,))),))
    )
    for step in training.steps(until=1_000):
        with step as ids:
            count = torch.tensor(ids.numel())
            dist.all_reduce(count)
            seen += count.item()
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * max(0.0, 1 - seen / budget)
            optimizer.zero_grad()
            (model(ids).square().sum() / count).backward()
            optimizer.step()
        if seen >= budget:
            break
    finish(job, model=model, optimizer=optimizer, seen=seen)


if __name__ == "__main__":
    main()
