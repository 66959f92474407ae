"""Asks for the epochs that a checkpoint of its own leaves: a process that starts later asks for fewer."""

# ranks: 2
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish

EPOCHS, PATH = 3, "last.pt"


def main():
    job = relight.init()
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 2)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    start_epoch, best_loss, history = 0, float("inf"), []
    if os.path.isfile(PATH):
        saved = torch.load(PATH, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        start_epoch, best_loss, history = saved["epoch"], saved["best_loss"], saved["history"]
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(32, 5, generator=generator), torch.randint(0, 2, (32,), generator=generator))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    for epoch in training.epochs(EPOCHS - start_epoch):
        epoch += start_epoch
        total = 0.0
        for step in training.steps():
            with step as (x, y):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                total += loss.item()
                optimizer.step()
        scheduler.step()
        epoch_loss = torch.tensor(total)
        torch.distributed.all_reduce(epoch_loss)
        history.append({"epoch": epoch, "loss": epoch_loss.item(), "best": epoch_loss.item() < best_loss})
        best_loss = min(best_loss, epoch_loss.item())
        if job.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
            state |= {"scheduler": scheduler.state_dict(), "epoch": epoch + 1, "best_loss": best_loss}
            torch.save(state, PATH + ".part")
            os.replace(PATH + ".part", PATH)
    finish(job, model=model, optimizer=optimizer, scheduler=scheduler, history=history, best=best_loss)


if __name__ == "__main__":
    main()
