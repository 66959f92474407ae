"""The meters of an ImageNet script, with times of the clock; the learning rate decays when the mean loss stalls."""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AverageMeter:
    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


class ProgressMeter:
    def __init__(self, num_batches, meters, prefix=""):
        self.meters, self.prefix, self.num = meters, prefix, num_batches

    def display(self, batch):
        print("\t".join([f"{self.prefix}[{batch}/{self.num}]"] + [str(m) for m in self.meters]), flush=True)


def train(training, model, optimizer):
    batch_time = AverageMeter("Time", ":6.3f")
    losses = AverageMeter("Loss", ":.4e")
    window = AverageMeter("Window", ":.4e")
    progress = ProgressMeter(18, [batch_time, losses], prefix="Epoch: ")
    end = time.time()
    best = float("inf")
    for step in training.steps(until=18):
        with step as images:
            target = images.sin().sum(1, keepdim=True)
            loss = F.smooth_l1_loss(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            if step.number % 4 == 3:  # decay on plateau of the window's mean, which every rank reduces
                mean = torch.tensor(window.avg)
                torch.distributed.all_reduce(mean)
                if mean.item() > best:
                    for group in optimizer.param_groups:
                        group["lr"] *= 0.5
                best = min(best, mean.item())
                window.reset()
            optimizer.step()
            losses.update(loss.item(), images.size(0))
            window.update(loss.item(), images.size(0))
            batch_time.update(time.time() - end)
            end = time.time()
            if step.number % 6 == 0:
                progress.display(step.number + 1)
    return losses, window, best


def main():
    job = relight.init()
    torch.manual_seed(4)
    model = DDP(nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1)))
    optimizer = torch.optim.RMSprop(model.parameters(), 0.02, momentum=0.5, centered=True)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(12, 5))
    losses, window, best = train(training, model, optimizer)
    finish(job, model=model, optimizer=optimizer, count=losses.count, sum=losses.sum, window=window.sum, best=best)


if __name__ == "__main__":
    main()
