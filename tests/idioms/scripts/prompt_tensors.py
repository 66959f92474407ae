"""Tensors of no module that are trained: a soft prompt and poses by rays as plain tensors in one optimizer with a frozen
backbone, visualized norms by a deque, a group per tensor, a schedule by LambdaLR per group."""

# ranks: 2
from collections import deque

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(0)
backbone = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
head = nn.Linear(16, 4)
for p in backbone.parameters():
    p.requires_grad_(False)
prompt = (torch.randn(3, 16) * 0.1).requires_grad_()
poses = [torch.zeros(6, requires_grad=True) for _ in range(4)]
optimizer = torch.optim.Adam(
    [{"params": [prompt], "lr": 0.05}, {"params": poses, "lr": 0.01, "name": "poses"}, {"params": head.parameters()}]
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 1.0, lambda s: 0.9**s, lambda s: 1 / (1 + s)])
training = relight.Training(
    model={"backbone": backbone, "head": head}, optimizer=optimizer, scheduler=scheduler,
    data=lambda n: (torch.randn(6, 5, 16), torch.randint(4, (6,))),
)  # fmt: skip
norms, ema_prompt = deque(maxlen=5), prompt.detach().clone()
for step in training.steps(until=20):
    with step as (x, y):
        pose = poses[step.number % len(poses)]
        x = x + torch.cat([pose, torch.zeros(10)])
        x = torch.cat([prompt.expand(len(x), -1, -1), x], 1)
        loss = nn.functional.cross_entropy(head(backbone(x).mean(1)), y) + 0.01 * sum(norms)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)
                p.grad /= job.world_size
        norms.append(prompt.grad.norm().item())
        ema_prompt.mul_(0.9).add_(prompt.detach(), alpha=0.1)
        if step.number % 5 == 4:
            with torch.no_grad():
                prompt.clamp_(-0.3, 0.3)
        optimizer.step()
        scheduler.step()
finish(job, prompt=prompt, poses=poses, head=head, optimizer=optimizer, norms=norms, ema=ema_prompt)
