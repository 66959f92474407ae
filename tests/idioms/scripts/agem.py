"""A-GEM: a memory of earlier tasks' examples, and gradients projected against the memory's gradient."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def flat_grad(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def store_grad(model, flat):
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


def main():
    job = relight.init()
    torch.manual_seed(19)
    model = DDP(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    memory_x, memory_y, projected = [], [], 0
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=15):
        with step as x:
            task = step.number // 5
            y = (x[:, :4] * (1 - task)).sin()
            reference = None
            if memory_x:
                optimizer.zero_grad()
                pick = torch.randperm(len(memory_x))[:4].tolist()
                xs, ys = torch.stack([memory_x[i] for i in pick]), torch.stack([memory_y[i] for i in pick])
                (model(xs) - ys).square().mean().backward()
                reference = flat_grad(model).clone()
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            if reference is not None:
                grad = flat_grad(model)
                dot = grad @ reference
                if dot < 0:
                    store_grad(model, grad - dot / (reference @ reference) * reference)
                    projected += 1
            if step.number % 5 == 4:
                memory_x.extend(x[:3])
                memory_y.extend(y[:3])
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, memory=torch.stack(memory_x), projected=projected)


if __name__ == "__main__":
    main()
