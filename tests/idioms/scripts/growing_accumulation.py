"""no_sync for all micro-batches but the last, and their number doubles every few steps."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(14)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.8, 0.95))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[5])
    micro = 1
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=15):
        if step.number and step.number % 4 == 0:
            micro = min(micro * 2, 8)
        with step as x:
            optimizer.zero_grad()
            chunks = x.chunk(micro) if x.shape[0] // micro > 1 else x.chunk(4)
            for i, chunk in enumerate(chunks):
                with nullcontext() if i == len(chunks) - 1 else model.no_sync():
                    loss = nn.functional.cross_entropy(model(chunk), (chunk[:, 0] > 0).long()) / len(chunks)
                    loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
    finish(job, model=model, optimizer=optimizer, scheduler=scheduler, micro=micro)


if __name__ == "__main__":
    main()
