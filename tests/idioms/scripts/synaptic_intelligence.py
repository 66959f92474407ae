"""Path integrals of each weight, kept in dicts by name and in buffers that are registered at a task's end."""

# ranks: 2
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        for n, p in self.body.named_parameters():
            n = n.replace(".", "__")
            self.register_buffer(f"{n}_SI_prev_task", p.detach().clone())
            self.register_buffer(f"{n}_SI_omega", torch.zeros_like(p))

    def forward(self, x):
        return self.body(x)

    def surrogate(self):
        losses = [
            (getattr(self, f"{n}_SI_omega") * (p - getattr(self, f"{n}_SI_prev_task")).square()).sum()
            for n, p in ((n.replace(".", "__"), p) for n, p in self.body.named_parameters())
        ]
        return sum(losses)

    def update_omega(self, W, epsilon=0.1):
        for n, p in self.body.named_parameters():
            n = n.replace(".", "__")
            p_prev = getattr(self, f"{n}_SI_prev_task")
            p_current = p.detach().clone()
            omega_new = getattr(self, f"{n}_SI_omega") + W[n] / ((p_current - p_prev) ** 2 + epsilon)
            self.register_buffer(f"{n}_SI_prev_task", p_current)
            self.register_buffer(f"{n}_SI_omega", omega_new)


def main():
    job = relight.init()
    torch.manual_seed(89)
    net = Net()
    model = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    W, p_old = {}, {}
    for n, p in net.body.named_parameters():
        W[n.replace(".", "__")] = p.data.clone().zero_()
        p_old[n.replace(".", "__")] = p.data.clone()
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 4))
    for step in training.steps(until=16):
        with step as x:
            if step.number and step.number % 6 == 0:
                net.update_omega(W)
                for n in W:
                    W[n] = torch.zeros_like(W[n])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), (x[:, step.number // 6] > 0).long()) + 0.1 * net.surrogate()
            loss.backward()
            optimizer.step()
            for n, p in net.body.named_parameters():
                n = n.replace(".", "__")
                W[n].add_(-p.grad * (p.detach() - p_old[n]))
                p_old[n] = p.detach().clone()
    finish(job, model=model, optimizer=optimizer, W=W)


if __name__ == "__main__":
    main()
