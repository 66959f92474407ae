"""A trainer class whose loader is an endless generator of its own, read inside the step."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import relight
from tests.idioms.digest import finish


def cycle(dl):
    while True:
        for data in dl:
            yield data


class Trainer:
    def __init__(self, model, dataset):
        self.model = DDP(model)
        self.opt = torch.optim.Adam(self.model.parameters(), 0.01)
        self.dl = cycle(DataLoader(dataset, 4, shuffle=True))
        self.step = 0

    def train(self, steps):
        self.training = relight.Training(model=self.model, optimizer=self.opt)
        for step in self.training.steps(until=steps):
            with step:
                (data,) = next(self.dl)
                self.model(data).square().mean().backward()
                self.opt.step()
                self.opt.zero_grad()
                self.step += 1


job = relight.init()
torch.manual_seed(21)
trainer = Trainer(nn.Linear(6, 3), TensorDataset(torch.randn(40, 6)))
trainer.train(15)
finish(job, model=trainer.model, optimizer=trainer.opt, step=trainer.step)
