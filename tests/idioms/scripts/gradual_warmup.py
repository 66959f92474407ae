"""The scheduler GradualWarmupScheduler, which holds the one that comes after it; super resolution with a frozen loss
network, PSNR by epoch, the best epoch kept as numbers."""

# ranks: 2
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


class GradualWarmupScheduler(LRScheduler):
    def __init__(self, optimizer, multiplier, total_epoch, after_scheduler=None):
        self.multiplier = multiplier
        self.total_epoch = total_epoch
        self.after_scheduler = after_scheduler
        self.finished = False
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch > self.total_epoch:
            if self.after_scheduler:
                if not self.finished:
                    self.after_scheduler.base_lrs = [base_lr * self.multiplier for base_lr in self.base_lrs]
                    self.finished = True
                return self.after_scheduler.get_last_lr()
            return [base_lr * self.multiplier for base_lr in self.base_lrs]
        ratio = (self.multiplier - 1.0) * self.last_epoch / self.total_epoch + 1.0
        return [base_lr * ratio for base_lr in self.base_lrs]

    def step(self, epoch=None):
        if self.finished and self.after_scheduler:
            self.after_scheduler.step(None)
            self._last_lr = self.after_scheduler.get_last_lr()
        else:
            super().step(epoch)


class Net(nn.Module):
    def __init__(self, upscale_factor=2):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5, padding=2), nn.Conv2d(16, upscale_factor**2, 3, padding=1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)

    def forward(self, x):
        return self.pixel_shuffle(self.conv2(torch.relu(self.conv1(x))))


def main(epochs=6):
    job = relight.init()
    torch.manual_seed(123)
    high = torch.rand(64, 1, 8, 8)
    data = TensorDataset(nn.functional.avg_pool2d(high, 2), high)
    loader = DataLoader(data, 8, sampler=DistributedSampler(data, job.world_size, job.rank), drop_last=True)
    features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()).eval()
    for param in features.parameters():
        param.requires_grad = False
    model = DDP(Net())
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    scheduler_cosine = CosineAnnealingLR(optimizer, epochs - 2, eta_min=1e-5)
    scheduler = GradualWarmupScheduler(optimizer, multiplier=8, total_epoch=2, after_scheduler=scheduler_cosine)
    optimizer.zero_grad()
    optimizer.step()
    scheduler.step()
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    epoch_loss, best_psnr, best_epoch = 0, 0.0, 0
    for step in training.steps(until=epochs * len(loader)):
        with step as (low, target):
            optimizer.zero_grad()
            output = model(low)
            loss = criterion(output, target) + 0.1 * criterion(features(output), features(target))
            epoch_loss += loss.item()
            loss.backward()
            optimizer.step()
            if (step.number + 1) % len(loader) == 0:
                scheduler.step()
                psnr = 10 * math.log10(len(loader) / epoch_loss)
                if psnr > best_psnr:
                    best_psnr, best_epoch = psnr, step.epoch
                epoch_loss = 0
    finish(job, model=model, optimizer=optimizer, after=scheduler_cosine.state_dict(), best=[best_psnr, best_epoch])


if __name__ == "__main__":
    main()
