"""CLIP: a gather that has gradients, a learned temperature that is clamped by hand after each step."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        output = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(output, x)
        return tuple(output)

    @staticmethod
    def backward(ctx, *grads):
        all_gradients = torch.stack(grads)
        dist.all_reduce(all_gradients)
        return all_gradients[dist.get_rank()]


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(8, 6), nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(24, 6))
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.logit_scale.exp()


def main():
    job = relight.init()
    torch.manual_seed(40)
    model = DDP(Clip())
    exclude = lambda n, p: p.ndim < 2 or "bn" in n or "ln" in n or "bias" in n or "logit_scale" in n
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if exclude(n, p)], "weight_decay": 0.0},
            {"params": [p for n, p in named if not exclude(n, p)], "weight_decay": 0.2},
        ],
        lr=5e-3,
        betas=(0.9, 0.98),
        eps=1e-6,
    )
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(4, 8), torch.randint(20, (4, 3)))
    )
    for step in training.steps(until=14):
        with step as (image, text):
            optimizer.zero_grad()
            i, t, scale = model(image, text)
            i, t = torch.cat(GatherLayer.apply(i)), torch.cat(GatherLayer.apply(t))
            logits = scale * i @ t.T
            labels = torch.arange(len(logits))
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(0, math.log(100))
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
