"""LISA: every few steps other layers are drawn to train, the rest is frozen; the names of the active ones go on."""

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class DynamicLayerActivation:
    def __init__(self, n_layers, interval_steps, model, seed=5):
        self.n_layers, self.interval_steps, self.model = n_layers, interval_steps, model
        self.generator = np.random.default_rng(seed)
        self.active_layers_indices = []

    def freeze_all_layers(self):
        for layer in self.model.layers:
            for p in layer.parameters():
                p.requires_grad = False

    def on_step_begin(self, number):
        if number % self.interval_steps == 0:
            self.switch_active_layers()

    def switch_active_layers(self):
        self.freeze_all_layers()
        total = len(self.model.layers)
        self.active_layers_indices = [int(i) for i in self.generator.choice(total, self.n_layers, replace=False)]
        for idx in self.active_layers_indices:
            for p in self.model.layers[idx].parameters():
                p.requires_grad = True


class Net(nn.Module):
    def __init__(self, layers=5):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(layers))

    def forward(self, x):
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


job = relight.init()
torch.manual_seed(35)
net = Net()
model = DDP(net, find_unused_parameters=True)
callback = DynamicLayerActivation(2, 4, net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
for step in training.steps(until=18):
    with step as x:
        callback.on_step_begin(step.number)
        loss = (model(x) - x[:, :2].cos()).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
finish(job, model=model, optimizer=optimizer, active=callback.active_layers_indices)
