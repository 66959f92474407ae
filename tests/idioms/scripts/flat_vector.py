"""Natural gradient in the shape of TRPO: parameters as one vector, conjugate gradients, a line search, no optimizer."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import relight
from tests.idioms.digest import finish


def mean(v):
    dist.all_reduce(v)
    return v / dist.get_world_size()


def conjugate_gradient(product, b, iterations=4):
    x, r, p = torch.zeros_like(b), b.clone(), b.clone()
    rr = r @ r
    for _ in range(iterations):
        z = product(p)
        alpha = rr / (p @ z + 1e-8)
        x += alpha * p
        r -= alpha * z
        new = r @ r
        p = r + (new / (rr + 1e-8)) * p
        rr = new
    return x


def main():
    job = relight.init()
    torch.manual_seed(67)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    damping = 0.1
    training = relight.Training(model=net, optimizer={}, data=lambda n: (torch.randn(6, 5), torch.randint(0, 3, (6,))))
    for step in training.steps(until=10):
        with step as (x, y):
            params = list(net.parameters())
            loss = F.cross_entropy(net(x), y)
            g = mean(parameters_to_vector(torch.autograd.grad(loss, params)).detach())

            def fisher(v):
                log_p = F.log_softmax(net(x), 1)
                kl = F.kl_div(log_p, log_p.detach(), log_target=True, reduction="batchmean")
                flat = parameters_to_vector(torch.autograd.grad(kl, params, create_graph=True))
                hv = parameters_to_vector([t.contiguous() for t in torch.autograd.grad(flat @ v, params)])
                return mean(hv) + damping * v

            direction = conjugate_gradient(fisher, g)
            old = parameters_to_vector(params).detach().clone()
            before = mean(loss.detach().clone())
            for k in range(4):
                vector_to_parameters(old - 0.5**k * direction, params)
                with torch.no_grad():
                    after = mean(F.cross_entropy(net(x), y))
                if after < before:
                    damping = max(0.01, damping * 0.9)
                    break
            else:
                vector_to_parameters(old, params)
                damping *= 1.5
    finish(job, model=net, damping=damping)


if __name__ == "__main__":
    main()
