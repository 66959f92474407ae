"""Adam's moments are reset now and then (ReLoRA), betas and weight decay follow a schedule, layers are merged."""

import torch
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


class ReLoRA(nn.Module):
    def __init__(self, inputs, outputs, rank=2):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, inputs) * 0.1), nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()

    @torch.no_grad()
    def merge_and_reinit(self, draws):
        self.base.weight.data += self.b @ self.a
        nn.init.kaiming_uniform_(self.a, generator=draws)
        nn.init.zeros_(self.b)


def main():
    job = relight.init()
    torch.manual_seed(83)
    net = nn.Sequential(ReLoRA(6, 10), nn.ReLU(), ReLoRA(10, 3))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.02)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=20)
    training = relight.Training(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=lambda n: (torch.randn(5, 6), torch.randint(0, 3, (5,))),
    )
    draws = torch.Generator().manual_seed(7)  # equal on all ranks
    for step in training.steps(until=18):
        with step as (x, y):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.01 * (1 + step.number)
            if step.number % 6 == 5:
                for layer in (net[0], net[2]):
                    layer.merge_and_reinit(draws)
                    for p in (layer.a, layer.b):
                        state = optimizer.state[p]
                        for key in ("exp_avg", "exp_avg_sq"):
                            mask = torch.rand(state[key].shape, generator=draws) > 0.99
                            state[key].mul_(mask)
            if step.number == 13:
                optimizer.state.clear()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
