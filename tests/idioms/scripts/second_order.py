"""Hessian-vector products by double backward around DDP, a trust radius, and conjugate gradients with collectives."""

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


def main():
    job = relight.init()
    world = dist.get_world_size()
    torch.manual_seed(109)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
    params = list(model.parameters())
    radius, accepted = 0.1, 0

    def mean(t):
        dist.all_reduce(t)
        return t / world

    training = relight.Training(model=model, optimizer=None, data=lambda n: torch.randn(8, 5))
    for step in training.steps(until=12):
        with step as x:

            def loss_of():
                return (model(x) - x.norm(dim=1, keepdim=True)).square().mean()

            loss = loss_of()
            grads = torch.autograd.grad(loss, params, create_graph=True)
            g = mean(flat(grads).detach().clone())

            def hvp(v):
                product = (flat(grads) * v).sum()
                return mean(flat(torch.autograd.grad(product, params, retain_graph=True))) + 0.1 * v

            d = torch.zeros_like(g)
            r, p = -g.clone(), -g.clone()
            for _ in range(3):
                hp = hvp(p)
                alpha = r.dot(r) / p.dot(hp).clamp(min=1e-8)
                d = d + alpha * p
                new = r - alpha * hp
                p = new + new.dot(new) / r.dot(r).clamp(min=1e-12) * p
                r = new
            d = d * min(1.0, radius / d.norm().item())
            before = mean(loss.detach().clone()).item()
            saved = [q.detach().clone() for q in params]
            with torch.no_grad():
                torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(params) + d, params)
                after = mean(loss_of().detach().clone()).item()
                if after < before:
                    radius, accepted = min(radius * 1.5, 1.0), accepted + 1
                else:
                    radius *= 0.5
                    for q, s in zip(params, saved):
                        q.copy_(s)
    finish(job, model=model, radius=radius, accepted=accepted)


if __name__ == "__main__":
    main()
