"""A trainer class with a loop of epochs and a loop of steps in methods, accumulation, an average and hooks of its own."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


class Trainer:
    def __init__(self, job):
        self.job = job
        torch.manual_seed(5)
        data = TensorDataset(torch.randn(84, 5), torch.randn(84, 1))
        self.loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
        self.net = nn.Sequential(nn.Linear(5, 10), nn.Dropout(0.2), nn.GELU(), nn.Linear(10, 1))
        self.model = DDP(self.net)
        self.average = AveragedModel(self.net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 5)
        self.training = relight.Training(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            ema=self.average,
            data=self.loader,
            accumulate=2,
            short_groups=True,
        )
        self.current_epoch = 0
        self.global_step = 0
        self.epoch_losses = []
        self.history = []

    def fit(self):
        for epoch in self.training.epochs(5):
            self.current_epoch = epoch
            self.on_epoch_begin()
            for step in self.training.steps():
                with step as batches:
                    self.update(batches)
            self.on_epoch_end()

    def update(self, batches):
        self.optimizer.zero_grad()
        for number, (x, y) in enumerate(batches):
            self.model.require_backward_grad_sync = number == len(batches) - 1
            loss = nn.functional.huber_loss(self.model(x), y, delta=1.0 + 0.1 * self.current_epoch)
            (loss / len(batches)).backward()
        self.global_step += 1
        self.epoch_losses.append(round(loss.item(), 6))
        self.optimizer.step()

    def on_epoch_begin(self):
        self.model.train()
        self.epoch_losses = []

    def on_epoch_end(self):
        self.scheduler.step()
        if self.current_epoch >= 2:
            self.average.update_parameters(self.net)
        self.history.append((self.current_epoch, self.global_step, len(self.epoch_losses)))


def main():
    job = relight.init()
    trainer = Trainer(job)
    trainer.fit()
    finish(
        job,
        model=trainer.model,
        average=trainer.average,
        optimizer=trainer.optimizer,
        scheduler=trainer.scheduler,
        history=trainer.history,
        losses=trainer.epoch_losses,
    )


if __name__ == "__main__":
    main()
