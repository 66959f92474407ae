"""DDP ignores a table that is trained by hand with sparse rows, and a mesh gives the group."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4)
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, pairs):
        return self.tower(self.table(pairs).flatten(1)).squeeze(1)


def main():
    job = relight.init()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(93)
    net = Recommender()
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["table.weight"])
    model = DDP(net, device_mesh=mesh)
    dense = torch.optim.Adam(net.tower.parameters(), 1e-2)
    accumulators = torch.zeros(50)
    training = relight.Training(model=model, optimizer=dense, data=lambda n: torch.randint(50, (6, 2)))
    for step in training.steps(until=14):
        with step as pairs:
            dense.zero_grad()
            net.table.zero_grad()
            target = ((pairs[:, 0] + pairs[:, 1]) % 2).float()
            nn.functional.binary_cross_entropy_with_logits(model(pairs), target).backward()
            grad = net.table.weight.grad
            dist.all_reduce(grad)
            rows = grad.abs().sum(1).nonzero().squeeze(1)
            accumulators[rows] += grad[rows].square().mean(1)
            dense.step()
            with torch.no_grad():
                net.table.weight[rows] -= 0.1 * grad[rows] / (accumulators[rows].sqrt() + 1e-8).unsqueeze(1)
    finish(job, model=model, optimizer=dense, accumulators=accumulators)


if __name__ == "__main__":
    main()
