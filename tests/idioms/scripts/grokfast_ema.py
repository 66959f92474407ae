"""Grokfast: a dict of slow gradients that a function returns, amplified and added to the next ones; None at first."""

from collections import deque

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def gradfilter_ema(m, grads=None, alpha=0.9, lamb=2.0):
    if grads is None:
        grads = {n: p.grad.data.detach() for n, p in m.named_parameters() if p.requires_grad}
    for n, p in m.named_parameters():
        if p.requires_grad:
            grads[n] = grads[n] * alpha + p.grad.data.detach() * (1 - alpha)
            p.grad.data = p.grad.data + grads[n] * lamb
    return grads


def gradfilter_ma(m, grads=None, window_size=4, lamb=1.0):
    if grads is None:
        grads = {n: deque(maxlen=window_size) for n, p in m.named_parameters() if p.requires_grad}
    for n, p in m.named_parameters():
        if p.requires_grad:
            grads[n].append(p.grad.data.detach())
            if len(grads[n]) == window_size:
                p.grad.data = p.grad.data + sum(grads[n]) / len(grads[n]) * lamb
    return grads


def main():
    job = relight.init()
    torch.manual_seed(38)
    one = DDP(nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 2)))
    two = DDP(nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 2)))
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=1e-2)
    training = relight.Training(model={"one": one, "two": two}, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    grads, window = None, None
    for step in training.steps(until=16):
        with step as x:
            optimizer.zero_grad()
            y = (x[:, :2] > 0).float()
            loss = nn.functional.binary_cross_entropy_with_logits(one(x), y)
            (loss + nn.functional.binary_cross_entropy_with_logits(two(x), y)).backward()
            grads = gradfilter_ema(one, grads=grads)
            window = gradfilter_ma(two, grads=window)
            optimizer.step()
    finish(job, one=one, two=two, optimizer=optimizer, grads=grads, window=window)


if __name__ == "__main__":
    main()
