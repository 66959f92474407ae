"""Architecture search: alphas with an optimizer of their own."""

# ranks: 2
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class MixedOp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self._ops = nn.ModuleList(
            [nn.Identity(), nn.Linear(width, width), nn.Sequential(nn.Linear(width, width), nn.Tanh())]
        )

    def forward(self, x, weights):
        return sum(w * op(x) for w, op in zip(weights, self._ops))


class Network(nn.Module):
    def __init__(self, width=8, layers=2):
        super().__init__()
        self.cells = nn.ModuleList([MixedOp(width) for _ in range(layers)])
        self.head = nn.Linear(width, 3)
        self._initialize_alphas(layers)

    def _initialize_alphas(self, layers):
        self.alphas_normal = nn.Parameter(1e-3 * torch.randn(layers, 3))
        self._arch_parameters = [self.alphas_normal]

    def weights(self):
        return [p for p in self.parameters() if p is not self.alphas_normal]

    def arch_parameters(self):
        return self._arch_parameters

    def forward(self, x):
        for cell, weights in zip(self.cells, F.softmax(self.alphas_normal, dim=-1)):
            x = cell(x, weights)
        return self.head(x)


class Architect:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.Adam(
            model.module.arch_parameters(), lr=3e-2, betas=(0.5, 0.999), weight_decay=1e-3
        )

    def step(self, input_valid, target_valid):
        self.optimizer.zero_grad()
        F.cross_entropy(self.model.module(input_valid), target_valid).backward()
        for v in self.model.module.arch_parameters():
            torch.distributed.all_reduce(v.grad)
            v.grad.div_(torch.distributed.get_world_size())
        self.optimizer.step()


job = relight.init()
torch.manual_seed(3)
model = DDP(Network())
optimizer = torch.optim.SGD(model.module.weights(), 0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16, eta_min=0.001)
architect = Architect(model)
training = relight.Training(
    model=model,
    optimizer={"weights": optimizer, "alphas": architect.optimizer},
    scheduler=scheduler,
    data=lambda n: (torch.randn(8, 8), torch.randn(8, 8)),
)
for step in training.steps(until=16):
    with step as (train, valid):
        architect.step(valid, valid[:, :3].argmax(1))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(train), train[:, :3].argmax(1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
finish(job, model=model, optimizer=optimizer, alphas=model.module.alphas_normal, architect=architect.optimizer)
