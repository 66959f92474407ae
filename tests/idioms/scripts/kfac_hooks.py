"""K-FAC: forward and backward hooks feed factors that the preconditioner averages over ranks and inverts now and then."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class KFAC:
    def __init__(self, model, damping=0.05, factor_decay=0.9, inv_update_steps=4):
        self.damping, self.factor_decay, self.inv_update_steps = damping, factor_decay, inv_update_steps
        self.steps = 0
        self.m_a, self.m_g, self.inverse, self._handles = {}, {}, {}, []
        self.modules = [m for m in model.modules() if isinstance(m, nn.Linear)]
        for module in self.modules:
            module.register_forward_pre_hook(self._save_input)
            module.register_full_backward_hook(self._save_grad_output)

    def _save_input(self, module, inputs):
        if module.training and torch.is_grad_enabled():
            a = torch.cat([inputs[0].detach(), inputs[0].new_ones(len(inputs[0]), 1)], 1)
            self._update(self.m_a, module, a.t() @ a / len(a))

    def _save_grad_output(self, module, grad_input, grad_output):
        g = grad_output[0].detach() * len(grad_output[0])
        self._update(self.m_g, module, g.t() @ g / len(g))

    def _update(self, factors, module, new):
        if module not in factors:
            factors[module] = torch.eye(len(new))
        factors[module].mul_(self.factor_decay).add_(new, alpha=1 - self.factor_decay)

    def step(self):
        world = dist.get_world_size()
        if self.steps % self.inv_update_steps == 0:
            for factors in (self.m_a, self.m_g):
                for module in self.modules:
                    self._handles.append(dist.all_reduce(factors[module], async_op=True))
            for handle in self._handles:
                handle.wait()
            self._handles.clear()
            for module in self.modules:
                self.m_a[module] /= world
                self.m_g[module] /= world
                a, g = self.m_a[module], self.m_g[module]
                self.inverse[module] = (
                    torch.linalg.inv(a + self.damping * torch.eye(len(a))),
                    torch.linalg.inv(g + self.damping * torch.eye(len(g))),
                )
        for module in self.modules:
            grad = torch.cat([module.weight.grad, module.bias.grad.unsqueeze(1)], 1)
            inv_a, inv_g = self.inverse[module]
            new = inv_g @ grad @ inv_a
            module.weight.grad.copy_(new[:, :-1])
            module.bias.grad.copy_(new[:, -1])
        self.steps += 1


job = relight.init()
torch.manual_seed(17)
net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
model = DDP(net)
preconditioner = KFAC(net)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(12, 6))
for step in training.steps(until=18):
    with step as x:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        preconditioner.step()
        optimizer.step()
factors = [preconditioner.m_a[m] for m in preconditioner.modules] + [
    preconditioner.m_g[m] for m in preconditioner.modules
]
finish(job, model=model, optimizer=optimizer, factors=factors, steps=preconditioner.steps)
