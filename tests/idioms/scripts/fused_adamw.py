"""Fused AdamW, gradients as bucket views, static graph left off, and bfloat16 parameters with a float32 copy by hand."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class MasterWeights:
    """bfloat16 model, float32 masters: the optimizer works on the masters, which are copied back after its step."""

    def __init__(self, model):
        self.model = list(model.parameters())
        self.master = [p.detach().clone().float().requires_grad_(True) for p in self.model]

    def grads_to_master(self):
        for p, m in zip(self.model, self.master):
            m.grad = p.grad.float()

    def master_to_model(self):
        with torch.no_grad():
            for p, m in zip(self.model, self.master):
                p.copy_(m)


def main():
    job = relight.init()
    torch.manual_seed(48)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)).bfloat16()
    model = DDP(net, gradient_as_bucket_view=True)
    masters = MasterWeights(model)
    holder = nn.ParameterList(masters.master)
    optimizer = torch.optim.AdamW(holder.parameters(), lr=1e-2, fused=True)
    training = relight.Training(
        model={"model": model, "master": holder}, optimizer=optimizer, data=lambda n: torch.randn(8, 6).bfloat16()
    )
    for step in training.steps(until=16):
        with step as x:
            model.zero_grad()
            nn.functional.cross_entropy(model(x).float(), (x[:, 0] > 0).long()).backward()
            masters.grads_to_master()
            optimizer.step()
            masters.master_to_model()
    finish(job, model=model, master=holder, optimizer=optimizer)


if __name__ == "__main__":
    main()
