"""Quantization-aware training: observers that track ranges in buffers, switched on after a few steps, frozen near the end.

A buffer that first changes after step 2; flags on modules that say what runs.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class FakeQuantize(nn.Module):
    def __init__(self, bits=8):
        super().__init__()
        self.qmax = 2**bits - 1
        self.enabled = False
        self.observing = True
        self.register_buffer("min_val", torch.tensor(float("inf")))
        self.register_buffer("max_val", torch.tensor(float("-inf")))

    def forward(self, x):
        if not self.enabled:
            return x
        if self.observing:
            low, high = torch.aminmax(x.detach())
            if torch.isinf(self.min_val):
                self.min_val.copy_(low)
                self.max_val.copy_(high)
            else:
                self.min_val.mul_(0.9).add_(low, alpha=0.1)
                self.max_val.mul_(0.9).add_(high, alpha=0.1)
        scale = ((self.max_val - self.min_val) / self.qmax).clamp(min=1e-8)
        zero = (-self.min_val / scale).round()
        q = ((x / scale + zero).round().clamp(0, self.qmax) - zero) * scale
        return x + (q - x).detach()


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 3)
        self.q_in, self.q_mid, self.q_out = FakeQuantize(), FakeQuantize(4), FakeQuantize()

    def forward(self, x):
        x = self.q_mid(torch.relu(self.fc1(self.q_in(x))))
        return self.q_out(self.fc2(x))


def enable_fake_quant(model):
    for m in model.modules():
        if isinstance(m, FakeQuantize):
            m.enabled = True


def disable_observer(model):
    for m in model.modules():
        if isinstance(m, FakeQuantize):
            m.observing = False


def main():
    job = relight.init()
    torch.manual_seed(12)
    model = DDP(QNet(), broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    w = torch.randn(8, 3)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda i: torch.randn(10, 8))
    for step in training.steps(until=18):
        with step as x:
            if step.number == 4:
                enable_fake_quant(model)
            if step.number == 13:
                disable_observer(model)
            loss = nn.functional.cross_entropy(model(x), (x @ w).argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
