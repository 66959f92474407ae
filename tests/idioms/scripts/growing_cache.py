"""Plain tensors as attributes of modules: a cache that grows by cat, a dict by key, a metric that is a module."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self.total, self.count, self.values = torch.tensor(0.0), 0, []

    def update(self, value):
        self.total = self.total + value
        self.count += 1
        self.values.append(value.detach())

    def compute(self):
        return self.total / max(1, self.count)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(4, 6), nn.Linear(6, 4)
        self.metric = Metric()
        self.bank = torch.zeros(0, 6)
        self.by_label = {}

    def forward(self, x):
        q = self.query(x)
        if len(self.bank):
            weights = torch.softmax(q @ self.bank.T, -1)
            q = q + 0.1 * weights @ self.bank
        self.bank = torch.cat([self.bank, q.detach()])[-20:]
        label = int(x.sum() > 0)
        old = self.by_label.get(label)
        self.by_label[label] = q.detach().mean(0) if old is None else 0.5 * old + 0.5 * q.detach().mean(0)
        return self.value(q - 0.05 * self.by_label[label])


def main():
    job = relight.init()
    torch.manual_seed(71)
    net = Model()
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(5, 4))
    for step in training.steps(until=15):
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) - x).abs().mean()
            net.metric.update(loss.detach())
            (loss / (1 + net.metric.compute())).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, bank=net.bank, labels=net.by_label, total=net.metric.total)


if __name__ == "__main__":
    main()
