"""Stochastic weight averaging: AveragedModel and SWALR from a certain step on, as in torch's documentation."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(1)
x = torch.randn(120, 7)
dataset = TensorDataset(x, x.abs().sum(1, keepdim=True))
loader = DataLoader(
    dataset, batch_size=10, sampler=DistributedSampler(dataset, job.world_size, job.rank), drop_last=True
)
model = DDP(nn.Sequential(nn.Linear(7, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 1)))
loss_fn = nn.SmoothL1Loss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
swa_model = AveragedModel(model.module)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
swa_start = 8
swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)

training = relight.Training(
    model=model, optimizer=optimizer, scheduler=scheduler, ema=swa_model, swa_scheduler=swa_scheduler, data=loader
)
for step in training.steps(until=20):
    with step as (input, target):
        optimizer.zero_grad()
        loss_fn(model(input), target).backward()
        optimizer.step()
        if step.number > swa_start:
            swa_model.update_parameters(model.module)
            swa_scheduler.step()
        else:
            scheduler.step()
finish(job, model=model, optimizer=optimizer, swa=swa_model, s1=scheduler, s2=swa_scheduler)
