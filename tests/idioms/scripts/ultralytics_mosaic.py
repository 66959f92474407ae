"""A detector's dataset that keeps a buffer of recent images for mosaics and a cache in memory, whose mosaics are closed for
the last epochs; a trainer of callbacks and a stopper with possible_stop."""

# ranks: 2
import math
import random
from copy import deepcopy

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import relight
from tests.idioms.digest import finish


class YOLODataset(Dataset):
    def __init__(self, n=48, imgsz=8):
        self.im_files = [f"{i}.jpg" for i in range(n)]
        self.ims, self.im_hw0 = [None] * n, [None] * n
        self.buffer, self.max_buffer_length = [], 8
        self.imgsz, self.mosaic, self.close_mosaic_at = imgsz, True, 2

    def load_image(self, i):
        im = self.ims[i]
        if im is None:
            im = np.random.RandomState(i).rand(3, self.imgsz, self.imgsz).astype(np.float32)
            self.ims[i], self.im_hw0[i] = im, im.shape[1:]
            self.buffer.append(i)
            if 1 < len(self.buffer) >= self.max_buffer_length:
                self.ims[self.buffer.pop(0)] = None
        return im

    def get_indexes(self):
        return random.choices(list(self.buffer), k=3)

    def __len__(self):
        return len(self.im_files)

    def __getitem__(self, index):
        im = self.load_image(index)
        if self.mosaic:
            s, half = self.imgsz, self.imgsz // 2
            mosaic = np.zeros((3, s, s), np.float32)
            for k, i in enumerate([index, *self.get_indexes()]):
                y, x = half * (k // 2), half * (k % 2)
                mosaic[:, y : y + half, x : x + half] = self.load_image(i)[:, ::2, ::2]
            im = mosaic
        if random.random() < 0.5:
            im = np.fliplr(im)
        return torch.from_numpy(np.ascontiguousarray(im)), index % 5

    def set_epoch(self, epoch):
        self.mosaic = epoch < self.close_mosaic_at


class EarlyStopping:
    def __init__(self, patience=50):
        self.best_fitness, self.best_epoch = 0.0, 0
        self.patience, self.possible_stop = patience or float("inf"), False

    def __call__(self, epoch, fitness):
        if fitness is None:
            return False
        if fitness >= self.best_fitness:
            self.best_epoch, self.best_fitness = epoch, fitness
        delta = epoch - self.best_epoch
        self.possible_stop = delta >= (self.patience - 1)
        return delta >= self.patience


class ModelEMA:
    def __init__(self, model, decay=0.9999, tau=20, updates=0):
        self.ema, self.updates, self.enabled = deepcopy(model).eval(), updates, True
        self.decay = lambda x: decay * (1 - math.exp(-x / tau))
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        if self.enabled:
            self.updates += 1
            d, msd = self.decay(self.updates), model.state_dict()
            for k, v in self.ema.state_dict().items():
                if v.dtype.is_floating_point:
                    v *= d
                    v += (1 - d) * msd[k].detach()


class Trainer:
    def __init__(self, job, epochs=4):
        self.epochs = epochs
        self.callbacks = {"on_train_epoch_start": [], "on_train_batch_end": [], "on_fit_epoch_end": []}
        self.dataset = YOLODataset()
        sampler = DistributedSampler(self.dataset, job.world_size, job.rank)
        self.loader = DataLoader(self.dataset, 4, sampler=sampler)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(288, 5))
        self.model, self.ema = nn.parallel.DistributedDataParallel(net), ModelEMA(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.937, nesterov=True)
        self.lf = lambda x: max(1 - x / self.epochs, 0) * (1.0 - 0.01) + 0.01
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_lambda=self.lf)
        self.stopper, self.stop = EarlyStopping(patience=3), False
        self.tloss, self.best_fitness, self.fitness, self.last_opt_step = None, None, None, -1

    def add_callback(self, event, callback):
        self.callbacks[event].append(callback)

    def run_callbacks(self, event):
        for callback in self.callbacks.get(event, []):
            callback(self)

    def train(self):
        nb = len(self.loader)
        self.training = relight.Training(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, ema=self.ema.ema, data=self.loader
        )
        for step in self.training.steps(until=self.epochs * nb):
            self.epoch, i = divmod(step.number, nb)
            with step as (images, labels):
                if i == 0:
                    self.run_callbacks("on_train_epoch_start")
                    self.model.train()
                    self.tloss = None
                self.loss_items = nn.functional.cross_entropy(self.model(images), labels)
                self.tloss = (
                    (self.tloss * i + self.loss_items.detach()) / (i + 1)
                    if self.tloss is not None
                    else self.loss_items.detach()
                )
                self.loss_items.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.ema.update(self.model.module)
                self.run_callbacks("on_train_batch_end")
                if i == nb - 1:
                    self.scheduler.step()
                    self.fitness = -self.tloss.item()
                    if not self.best_fitness or self.best_fitness < self.fitness:
                        self.best_fitness = self.fitness
                    self.stop |= self.stopper(self.epoch + 1, self.fitness + 10)
                    self.run_callbacks("on_fit_epoch_end")


job = relight.init()
torch.manual_seed(0)
random.seed(0)
trainer = Trainer(job)
seen = []
trainer.add_callback("on_train_batch_end", lambda t: seen.append(round(t.loss_items.item(), 4)))
trainer.train()
finish(
    job, model=trainer.model, ema=trainer.ema.ema, updates=trainer.ema.updates, tloss=trainer.tloss,
    best=trainer.best_fitness, stopper=vars(trainer.stopper), seen=seen,
)  # fmt: skip
