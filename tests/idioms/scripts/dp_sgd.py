"""Gradients of each sample by hooks, clipped one by one, with noise from a generator: Opacus."""

# ranks: 2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


class DPOptimizer:
    def __init__(self, optimizer, noise, clip, generator):
        self.original_optimizer = optimizer
        self.noise, self.clip, self.generator = noise, clip, generator
        self._step_skip_queue = []

    @property
    def params(self):
        return [p for g in self.original_optimizer.param_groups for p in g["params"]]

    def step(self):
        norms = torch.stack([p.grad_sample.flatten(1).norm(2, dim=1) for p in self.params], 1).norm(2, dim=1)
        factor = (self.clip / (norms + 1e-6)).clamp(max=1.0)
        for p in self.params:
            p.summed_grad = torch.einsum("i,i...", factor, p.grad_sample)
            p.grad = p.summed_grad + torch.normal(0, self.noise * self.clip, p.shape, generator=self.generator)
            dist.all_reduce(p.grad)
        self.original_optimizer.step()

    def zero_grad(self):
        for p in self.params:
            p.grad_sample = None
            p.summed_grad = None
        self.original_optimizer.zero_grad()

    def state_dict(self):
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state):
        self.original_optimizer.load_state_dict(state)


def main():
    job = relight.init()
    torch.manual_seed(47)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))
    kept = {}

    def keep(layer, inputs, output):
        kept.setdefault(layer, []).append(inputs[0].detach())

    def sample(layer, grad_in, grad_out):
        a = kept[layer].pop()
        g = grad_out[0] * a.shape[0]
        layer.weight.grad_sample = torch.einsum("ni,nj->nij", g, a)
        layer.bias.grad_sample = g

    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(keep)
            layer.register_full_backward_hook(sample)
    generator = torch.Generator().manual_seed(100)
    optimizer = DPOptimizer(torch.optim.SGD(model.parameters(), 0.05), 0.5, 1.0, generator)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 4))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, generator=generator)


if __name__ == "__main__":
    main()
