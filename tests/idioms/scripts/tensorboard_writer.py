"""A SummaryWriter of the script's own on rank 0, with histograms, and a running loss that the plateau uses."""

# ranks: 2
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.tensorboard import SummaryWriter

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(6)
    model = DDP(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    writer = SummaryWriter(tempfile.mkdtemp()) if job.rank == 0 else None
    training = relight.Training(model=model, optimizer=optimizer, scheduler=plateau, data=lambda n: torch.randn(8, 6))
    running_loss = 0.0
    for step in training.steps(until=15):
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :4].sin()).square().mean()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            running_loss += mean.item()
            optimizer.step()
            if step.number % 3 == 2:
                plateau.step(running_loss / 3)
                if writer is not None:
                    writer.add_scalar("loss", running_loss / 3, step.number)
                    writer.add_histogram("weight", model.module.weight, step.number)
                running_loss = 0.0
    if writer is not None:
        writer.close()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
