"""pytorch/examples' imagenet: a global best accuracy, ProgressMeter, save_checkpoint with is_best, --resume."""

# ranks: 2
import argparse
import os
import shutil
import time
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import relight
from tests.idioms.digest import finish

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=5, type=int)
parser.add_argument("--start-epoch", default=0, type=int)
parser.add_argument("--resume", default="checkpoint.pth.tar", type=str)
parser.add_argument("-p", "--print-freq", default=4, type=int)
best_acc1 = 0


class Summary(Enum):
    NONE = 0
    AVERAGE = 1


class AverageMeter:
    def __init__(self, name, fmt=":f", summary_type=Summary.AVERAGE):
        self.name, self.fmt, self.summary_type = name, fmt, summary_type
        self.reset()

    def reset(self):
        self.val, self.avg, self.sum, self.count = 0, 0, 0, 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


class ProgressMeter:
    def __init__(self, num_batches, meters, prefix=""):
        self.batch_fmtstr = "[{:" + str(len(str(num_batches))) + "d}/" + str(num_batches) + "]"
        self.meters, self.prefix = meters, prefix

    def display(self, batch):
        print("\t".join([self.prefix + self.batch_fmtstr.format(batch)] + [str(meter) for meter in self.meters]))


def accuracy(output, target):
    with torch.no_grad():
        return (output.argmax(1) == target).float().sum().mul_(100.0 / target.size(0))


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


def validate(val_loader, model, criterion):
    top1 = AverageMeter("Acc@1", ":6.2f")
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            top1.update(accuracy(model(images), target).item(), images.size(0))
    top1.all_reduce()
    model.train()
    return top1.avg


def main():
    global best_acc1
    args = parser.parse_args()
    job = relight.init()
    torch.manual_seed(0)
    x, y = torch.randn(96, 12), torch.randint(4, (96,))
    train, val = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    loader = DataLoader(train, 8, sampler=DistributedSampler(train, job.world_size, job.rank))
    val_loader = DataLoader(val, 8, sampler=DistributedSampler(val, job.world_size, job.rank, shuffle=False))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    if args.resume and os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume)
        args.start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    batch_time, losses = AverageMeter("Time", ":6.3f"), AverageMeter("Loss", ":.4e")
    progress = ProgressMeter(len(loader), [batch_time, losses])
    end = time.time()
    for step in training.steps(until=args.epochs * len(loader)):
        i = step.number % len(loader)
        with step as (images, target):
            if i == 0 and step.number:  # the epoch before is over
                acc1 = validate(val_loader, model, criterion)
                is_best = acc1 > best_acc1
                best_acc1 = max(acc1, best_acc1)
                if job.rank == 0:
                    state = {"epoch": step.epoch, "state_dict": model.state_dict(), "best_acc1": best_acc1}
                    save_checkpoint(state, is_best)
            loss = criterion(model(images), target)
            losses.update(loss.item(), images.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            batch_time.update(time.time() - end)
            end = time.time()
            if i % args.print_freq == 0:
                progress.display(i + 1)
            if i == len(loader) - 1:
                scheduler.step()
    finish(job, model=model, optimizer=optimizer, scheduler=scheduler, best=best_acc1, losses=losses.avg)


if __name__ == "__main__":
    main()
