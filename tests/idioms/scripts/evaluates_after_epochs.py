"""After each epoch all ranks evaluate a part each, add up, and lower the rate, print and stop by what comes out."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def train(training, model, optimizer):
    total = batches = 0.0
    for step in training.steps():
        with step as (x, y):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            batches += 1
    return total / batches, loss.item()


@torch.inference_mode()
def evaluate(model, loader):
    was_training = model.training
    model.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts[0] += (model(x).argmax(1) == y).sum()
        counts[1] += len(y)
    dist.all_reduce(counts)
    model.train(was_training)
    return (counts[0] / counts[1]).item()


def main(epochs=5):
    job = relight.init()
    torch.manual_seed(5)
    x, y = torch.randn(72, 6), torch.randint(0, 3, (72,))
    data, held = TensorDataset(x[:48], y[:48]), TensorDataset(x[48:], y[48:])
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
    held_loader = DataLoader(held, batch_size=5, sampler=DistributedSampler(held, job.world_size, job.rank))
    net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.6)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    best, without_progress, history = 0.0, 0, []
    for epoch in training.epochs(epochs):
        mean, last = train(training, model, optimizer)
        accuracy = evaluate(net, held_loader)
        scheduler.step(accuracy)
        history.append((epoch, mean, last, accuracy))
        if job.rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}, {last:.4f}, accuracy {accuracy:.4f}")
        without_progress = 0 if accuracy > best else without_progress + 1
        best = max(best, accuracy)
        if without_progress > 2:
            break
    finish(job, model=model, optimizer=optimizer, scheduler=scheduler, best=best, history=history)


main()
