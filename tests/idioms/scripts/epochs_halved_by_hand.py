"""Code between epochs halves the rate, decays weights and counts epochs without progress, from what all ranks see."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def main(epochs=4):
    job = relight.init()
    torch.manual_seed(67)
    x, y = torch.randn(40, 5), torch.randn(40, 1)
    data = TensorDataset(x, y)
    loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data, job.world_size, job.rank))
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    model = DDP(net)
    lr, best, without_progress = 0.5, 0.0, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    for _ in training.epochs(epochs):
        for step in training.steps():
            with step as (inputs, targets):
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                (lr * loss).backward()
                optimizer.step()
        with torch.no_grad():
            score = -nn.functional.mse_loss(net(x), y).item()  # of all data, on each rank
            net[0].weight.mul_(0.999)  # weights that change there are in no copy of what came before
        if score > best + 1.0:
            best, without_progress = score, 0
        else:
            lr, without_progress = lr / 2, without_progress + 1
    finish(job, model=model, optimizer=optimizer, lr=lr, best=best, epochs=without_progress)


main()
