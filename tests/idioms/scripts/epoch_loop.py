"""An epoch loop around training.steps(), which is called again for each epoch, with validation between epochs."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def main(epochs=3):
    job = relight.init()
    torch.manual_seed(61)
    data = TensorDataset(torch.randn(90, 5), torch.randint(0, 3, (90,)))
    loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    for epoch in range(epochs):
        model.train()
        last = (epoch + 1) * len(loader)
        for step in training.steps(until=last):
            with step as (x, y):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if step.number + 1 == last:
                    scheduler.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model.module(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
        if job.rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.2f}")
    finish(job, model=model, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
