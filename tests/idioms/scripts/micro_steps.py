"""A step of relight for each micro-batch: the optimizer steps in every fourth one, as DeepSpeed's engine does."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Engine:
    def __init__(self, model, optimizer, every):
        self.model, self.optimizer, self.every = model, optimizer, every
        self.micro_steps = self.global_steps = 0
        self.losses = []

    def __call__(self, x):
        return self.model(x)

    def backward(self, loss):
        self.losses.append(loss.detach().item())
        (loss / self.every).backward()

    def step(self):
        self.micro_steps += 1
        if self.micro_steps % self.every == 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_steps += 1
            self.losses.clear()


def main():
    job = relight.init()
    torch.manual_seed(15)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    engine = Engine(model, optimizer, 4)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=24):
        with step as x:
            loss = (engine(x) - x[:, :4].sin()).square().mean()
            engine.backward(loss)
            engine.step()
    finish(job, model=model, optimizer=optimizer, micro=engine.micro_steps, steps=engine.global_steps)


if __name__ == "__main__":
    main()
