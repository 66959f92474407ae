"""Sparse, nested, masked and quantized tensors: as constants of the script, as buffers, as batches."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
ADJACENCY = torch.sparse_coo_tensor(EDGES, torch.ones(4), (4, 4)).coalesce()
ROWS = ADJACENCY.to_dense().to_sparse_csr()
RAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
JAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
SMALL = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.adjacency, self.rows = ADJACENCY.clone(), ROWS.clone()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)
        self.jagged = JAGGED

    def forward(self, x):
        x = torch.sparse.mm(self.adjacency, torch.relu(self.first(x)))
        return self.second(self.rows @ x)


def main():
    job = relight.init()
    torch.manual_seed(30)
    model = DDP(Graph(), broadcast_buffers=False, init_sync=False)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    mask = torch.masked.masked_tensor(torch.ones(4), torch.tensor([True, False, True, True]))

    def batch(n):
        generator = torch.Generator().manual_seed(n)
        kinds = [
            lambda x: x.to_sparse(),
            lambda x: torch.nested.nested_tensor([x[:1], x[1:]]),
            lambda x: torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged),
            lambda x: torch.quantize_per_tensor(x, 0.05, 0, torch.qint8),
        ]
        return kinds[n % 4](torch.randn(4, 3, generator=generator))

    training = relight.Training(model=model, optimizer=optimizer, data=batch)
    for step in training.steps(until=16):
        with step as x:
            if x.is_quantized:
                x = x.dequantize() * SMALL.dequantize().mean()
            elif x.is_sparse:
                x = x.to_dense()
            else:
                x = torch.cat([each for each in x.unbind()]) * RAGGED.unbind()[0].sum() * JAGGED.values().mean()
            optimizer.zero_grad()
            (model(x).square().mean() * mask.sum().get_data()).backward()
            optimizer.step()
    finish(job, model=model.module.state_dict()["first.weight"], optimizer=optimizer)


if __name__ == "__main__":
    main()
