"""A layer keeps a sparse graph of its own, which its forward grows; another keeps ragged rows."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.graph = torch.eye(4).to_sparse()
        self.rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

    def forward(self, x):
        out = torch.sparse.mm(self.graph, torch.tanh(self.linear(x))) * self.rows.unbind()[0].mean()
        with torch.no_grad():
            self.graph = (self.graph * 0.9 + torch.diag(out.detach().mean(1) * 0.1).to_sparse()).coalesce()
            self.rows = torch.nested.nested_tensor([row * 0.95 + 0.01 for row in self.rows.unbind()])
        return out


def main():
    job = relight.init()
    torch.manual_seed(30)
    layer = Layer()
    model = DDP(layer)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 3))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
    finish(
        job, model=model, optimizer=optimizer, graph=layer.graph.to_dense(), rows=[row for row in layer.rows.unbind()]
    )


if __name__ == "__main__":
    main()
