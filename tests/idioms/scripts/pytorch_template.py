"""A template's trainer: configuration that makes objects by name, a metric tracker, a writer with __getattr__, monitor."""

# ranks: 2
import logging
from abc import abstractmethod
from collections import OrderedDict
from datetime import datetime
from functools import partial, reduce
from operator import getitem

import numpy as np
import torch
import torch.distributed as dist
from numpy import inf
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.sampler import SubsetRandomSampler

import relight
from tests.idioms.digest import finish


class ConfigParser:
    def __init__(self, config):
        self._config = config

    def init_obj(self, name, module, *args, **kwargs):
        module_args = dict(self[name]["args"])
        module_args.update(kwargs)
        return getattr(module, self[name]["type"])(*args, **module_args)

    def init_ftn(self, name, module):
        return partial(getattr(module, self[name]["type"]), **self[name]["args"])

    def __getitem__(self, name):
        return self._config[name]

    def get(self, path):
        return reduce(getitem, path.split(";"), self._config)


class Writer:
    tb_writer_ftns = {"add_scalar", "add_histogram"}

    def __init__(self):
        self.step, self.mode, self.timer, self.values = 0, "", datetime.now(), OrderedDict()

    def set_step(self, step, mode="train"):
        self.mode, self.step = mode, step
        if step == 0:
            self.timer = datetime.now()
        else:
            duration = datetime.now() - self.timer
            self.add_scalar("steps_per_sec", min(1, duration.total_seconds()) * 0)
            self.timer = datetime.now()

    def __getattr__(self, name):
        if name in type(self).tb_writer_ftns:
            return lambda tag, data: self.values.__setitem__(f"{tag}/{self.mode}", (self.step, data))
        raise AttributeError(name)


class MetricTracker:
    def __init__(self, *keys, writer=None):
        self.writer = writer
        self._data = {key: np.zeros(3) for key in keys}
        self.reset()

    def reset(self):
        for value in self._data.values():
            value[:] = 0

    def update(self, key, value, n=1):
        if self.writer is not None:
            self.writer.add_scalar(key, value)
        row = self._data[key]
        row[0] += value * n
        row[1] += n
        row[2] = row[0] / row[1]

    def result(self):
        return {key: row[2] for key, row in self._data.items()}


class BaseDataLoader(DataLoader):
    def __init__(self, dataset, batch_size, shuffle, validation_split, num_workers=0):
        self.validation_split, self.shuffle, self.batch_idx, self.n_samples = validation_split, shuffle, 0, len(dataset)
        idx_full = np.arange(self.n_samples)
        np.random.seed(0)
        np.random.shuffle(idx_full)
        n = int(self.n_samples * validation_split)
        self.sampler, self.valid_sampler = SubsetRandomSampler(idx_full[n:]), SubsetRandomSampler(idx_full[:n])
        self.init_kwargs = {"dataset": dataset, "batch_size": batch_size, "num_workers": num_workers}
        super().__init__(sampler=self.sampler, **self.init_kwargs)

    def split_validation(self):
        return DataLoader(sampler=self.valid_sampler, **self.init_kwargs)


class BaseTrainer:
    def __init__(self, model, criterion, metric_ftns, optimizer, config):
        self.logger = logging.getLogger("trainer")
        self.model, self.criterion, self.metric_ftns, self.optimizer = model, criterion, metric_ftns, optimizer
        self.config = config
        self.epochs = config["trainer"]["epochs"]
        self.mnt_mode, self.mnt_metric = config["trainer"]["monitor"].split()
        self.mnt_best = inf if self.mnt_mode == "min" else -inf
        self.early_stop, self.not_improved_count = config["trainer"].get("early_stop", inf), 0
        self.writer = Writer()

    @abstractmethod
    def _train_batch(self, epoch, batch_idx, data, target):
        raise NotImplementedError

    def train(self):
        loader = self.data_loader
        self.training = relight.Training(
            model=self.model, optimizer=self.optimizer, scheduler=self.lr_scheduler, data=loader
        )
        for step in self.training.steps(until=self.epochs * len(loader)):
            epoch, batch_idx = divmod(step.number, len(loader))
            with step as (data, target):
                if batch_idx == 0 and epoch:
                    self._end_epoch(epoch)
                self._train_batch(epoch, batch_idx, data, target)
            if self.not_improved_count > self.early_stop:
                self.logger.info("Validation performance didn't improve. Training stops.")
                break

    def _end_epoch(self, epoch):
        log = {"epoch": epoch, **self.train_metrics.result(), **self._valid_epoch(epoch)}
        improved = log[self.mnt_metric] <= self.mnt_best
        if improved:
            self.mnt_best, self.not_improved_count = log[self.mnt_metric], 0
        else:
            self.not_improved_count += 1
        self.lr_scheduler.step()
        self.train_metrics.reset()


class Trainer(BaseTrainer):
    def __init__(self, model, criterion, metric_ftns, optimizer, config, data_loader, lr_scheduler):
        super().__init__(model, criterion, metric_ftns, optimizer, config)
        self.data_loader, self.valid_data_loader, self.lr_scheduler = (
            data_loader,
            data_loader.split_validation(),
            lr_scheduler,
        )
        self.train_metrics = MetricTracker("loss", *[m.__name__ for m in self.metric_ftns], writer=self.writer)
        self.valid_metrics = MetricTracker("loss", *[m.__name__ for m in self.metric_ftns], writer=self.writer)

    def _train_batch(self, epoch, batch_idx, data, target):
        self.model.train()
        self.optimizer.zero_grad()
        output = self.model(data)
        loss = self.criterion(output, target)
        loss.backward()
        self.optimizer.step()
        self.writer.set_step(epoch * len(self.data_loader) + batch_idx)
        self.train_metrics.update("loss", loss.item())
        for met in self.metric_ftns:
            self.train_metrics.update(met.__name__, met(output, target))

    def _valid_epoch(self, epoch):
        self.model.eval()
        self.valid_metrics.reset()
        with torch.no_grad():
            for data, target in self.valid_data_loader:
                output = self.model.module(data)
                loss = self.criterion(output, target)
                dist.all_reduce(loss)
                self.valid_metrics.update("loss", loss.item())
        return {"val_" + k: v for k, v in self.valid_metrics.result().items()}


def accuracy(output, target):
    with torch.no_grad():
        return (output.argmax(dim=1) == target).sum().item() / len(target)


def main(config):
    job = relight.init()
    torch.manual_seed(123)
    dataset = TensorDataset(torch.randn(80, 10), torch.randint(4, (80,)))
    data_loader = BaseDataLoader(dataset, 8, True, 0.2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 4)))
    optimizer = config.init_obj("optimizer", torch.optim, model.parameters())
    lr_scheduler = config.init_obj("lr_scheduler", torch.optim.lr_scheduler, optimizer)
    criterion = nn.functional.cross_entropy
    trainer = Trainer(model, criterion, [accuracy], optimizer, config, data_loader, lr_scheduler)
    trainer.train()
    finish(
        job, model=model, optimizer=optimizer, best=trainer.mnt_best, count=trainer.not_improved_count,
        train=trainer.train_metrics._data, valid=trainer.valid_metrics._data, loss=trainer.writer.values["loss/train"],
    )  # fmt: skip


if __name__ == "__main__":
    main(
        ConfigParser(
            {
                "optimizer": {"type": "Adam", "args": {"lr": 0.01, "amsgrad": True}},
                "lr_scheduler": {"type": "StepLR", "args": {"step_size": 2, "gamma": 0.1}},
                "trainer": {"epochs": 5, "monitor": "min val_loss", "early_stop": 10},
            }
        )
    )
