"""LoRA: adapters in a frozen network; only they are in DDP's buckets and in the optimizer; merged at the end."""

import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import relight
from tests.idioms.digest import finish


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int = 2, alpha: int = 4):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / r
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.base(x) + (self.dropout(x) @ self.lora_A.T @ self.lora_B.T) * self.scaling


def inject(module):
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRALinear(child))
        else:
            inject(child)
    return module


def main():
    job = relight.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12), nn.Linear(12, 20))
    for param in net.parameters():
        param.requires_grad = False
    model = DistributedDataParallel(inject(net))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    tokens = torch.randint(0, 20, (90, 7))
    sampler = DistributedSampler(tokens, job.world_size, job.rank, shuffle=True)
    loader = DataLoader(tokens, batch_size=5, sampler=sampler)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    for step in training.steps(until=18):
        with step as batch:
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.reshape(-1, 20), batch[:, 1:].reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(trainable, 0.3)
            optimizer.step()
            optimizer.zero_grad()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
