"""Meta-SGD: a clone with learned rates for each parameter, tasks drawn by an object of its own, prototypes kept by class."""

# ranks: 2
import random
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


def clone_module(module, memo=None):
    memo = {} if memo is None else memo
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters, clone._buffers, clone._modules = (
        clone._parameters.copy(),
        clone._buffers.copy(),
        clone._modules.copy(),
    )
    for key, param in module._parameters.items():
        if param is not None:
            clone._parameters[key] = memo.setdefault(param.data_ptr(), param.clone())
    for key, child in module._modules.items():
        clone._modules[key] = clone_module(child, memo)
    return clone


def update_module(module, updates):
    for name, update in updates.items():
        *path, last = name.split(".")
        target = module
        for part in path:
            target = target._modules[part]
        target._parameters[last] = target._parameters[last] + update
    return module


class MetaSGD(nn.Module):
    def __init__(self, model, lr):
        super().__init__()
        self.module = model
        self.lrs = nn.ParameterList([nn.Parameter(torch.ones_like(p) * lr) for p in model.parameters()])

    def clone(self):
        return clone_module(self.module)

    def adapt(self, learner, loss):
        params = dict(learner.named_parameters()) or {}
        names = [n for n, _ in self.module.named_parameters()]
        tensors = [params[n] for n in names] if params else []
        grads = torch.autograd.grad(loss, tensors, create_graph=True)
        return update_module(learner, {n: -lr * g for n, lr, g in zip(names, self.lrs, grads)})


class TaskDataset:
    def __init__(self, seed, ways=3):
        self.rng, self.ways, self.counts, self.hard = random.Random(seed), ways, defaultdict(int), []
        g = torch.Generator().manual_seed(1)
        self.centers = torch.randn(9, 4, generator=g)

    def sample(self):
        classes = self.rng.sample(range(9), self.ways)
        if self.hard and self.rng.random() < 0.5:
            classes[0] = self.hard.pop(0) if self.hard[0] not in classes[1:] else classes[0]
        for c in classes:
            self.counts[c] += 1
        x = self.centers[classes].repeat_interleave(4, 0) + 0.3 * torch.randn(12, 4)
        y = torch.arange(self.ways).repeat_interleave(4)
        return classes, x[::2], y[::2], x[1::2], y[1::2]

    def feedback(self, classes, logits, y):
        wrong = (logits.argmax(1) != y).float().view(self.ways, -1).mean(1)
        if wrong.max() > 0.4:
            self.hard.append(classes[int(wrong.argmax())])


def main():
    job = relight.init()
    torch.manual_seed(10)
    meta = MetaSGD(nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 3)), lr=0.1)
    opt = torch.optim.AdamW(meta.parameters(), lr=0.01)
    tasks, running = TaskDataset(job.rank), None
    loss_fn = nn.CrossEntropyLoss()
    training = relight.Training(model=meta, optimizer=opt)
    for step in training.steps(until=15):
        with step:
            opt.zero_grad()
            total = 0.0
            for _ in range(2):
                classes, xs, ys, xq, yq = tasks.sample()
                learner = meta.clone()
                for _ in range(2):
                    learner = meta.adapt(learner, loss_fn(learner(xs), ys))
                logits = learner(xq)
                error = loss_fn(logits, yq)
                error.backward()
                tasks.feedback(classes, logits, yq)
                total += error.item()
            running = total if running is None else 0.8 * running + 0.2 * total
            for p in meta.parameters():
                p.grad.mul_(0.5 if total < 1.5 * running else 0.25)
                dist.all_reduce(p.grad)
                p.grad.div_(job.world_size)
            opt.step()
            for lr in meta.lrs:
                lr.data.clamp_(0.0, 0.5)
    finish(job, meta=meta, opt=opt, counts=dict(tasks.counts), hard=tasks.hard, running=running, rng=tasks.rng.random())


if __name__ == "__main__":
    main()
