"""Rank 0 evaluates and decides; all get its decision by broadcasts, which some ranks pass before others come to them."""

# ranks: 4
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class EarlyStopping:
    def __init__(self, patience):
        self.best, self.bad, self.patience = float("inf"), 0, patience

    def update(self, loss):
        self.bad = 0 if loss < self.best - 1e-3 else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad >= self.patience


def main():
    job = relight.init()
    torch.manual_seed(5)
    x, y = torch.randn(80, 6), torch.randn(80, 1)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer)
    stopping, history = EarlyStopping(patience=3), []
    for epoch in training.epochs(5, steps_per_epoch=3):
        for step in training.steps():
            with step:
                chosen = torch.randint(0, 40, (8,))
                loss = nn.functional.mse_loss(model(x[chosen]), y[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        decision = torch.zeros(2)
        if dist.get_rank() == 0:
            with torch.no_grad():
                held = nn.functional.mse_loss(model.module(x[40:]), y[40:])
            decision = torch.stack([held, torch.tensor(float(stopping.update(held.item())))])
        dist.broadcast(decision, src=0)
        words = [f"epoch {epoch}: {decision[0]:.4f}" if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(words, src=0)
        spread = loss.detach().clone()
        dist.all_reduce(spread, dist.ReduceOp.MAX)
        history.append((words[0], decision[1].item(), spread.item()))
        if decision[1]:
            break
    finish(job, model=model, optimizer=optimizer, history=history)


main()
