"""The best weights are kept as bytes in memory, and loaded when the loss stands still."""

# ranks: 2
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(11)
    model = DDP(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.4, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    best = float("inf")
    buffer = io.BytesIO()
    bad = 0
    for step in training.steps(until=16):
        with step as x:
            loss = (model(x) - x[:, :4].sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if mean.item() < best:
                best, bad = mean.item(), 0
                buffer = io.BytesIO()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
            else:
                bad += 1
            optimizer.step()
            if bad == 3:
                buffer.seek(0)
                state = torch.load(buffer)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
                bad = 0
    finish(job, model=model, optimizer=optimizer, best=best, bad=bad, kept=buffer.getvalue()[:0])


if __name__ == "__main__":
    main()
