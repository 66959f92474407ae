"""All that a run has lies in one dictionary: its job, training, loader and groups of ranks, beside numbers that change."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def main():
    run = {"job": relight.init(), "seen": 0, "best": None, "history": []}
    run["mesh"], run["group"] = init_device_mesh("cpu", (run["job"].world_size,)), dist.new_group([0, 1])
    torch.manual_seed(83)
    data = TensorDataset(torch.randn(40, 5), torch.randint(0, 3, (40,)))
    sampler = DistributedSampler(data, run["job"].world_size, run["job"].rank)
    run["loader"] = DataLoader(data, batch_size=5, sampler=sampler)
    run["model"] = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)))
    run["optimizer"] = torch.optim.Adam(run["model"].parameters(), lr=1e-2)
    run["training"] = relight.Training(model=run["model"], optimizer=run["optimizer"], data=run["loader"])
    for step in run["training"].steps(until=12):
        with step as (x, y):
            loss = nn.functional.cross_entropy(run["model"](x), y) * (1 + 0.01 * run["seen"])
            run["seen"] += len(y)
            run["best"] = loss.item() if run["best"] is None else min(run["best"], loss.item())
            run["optimizer"].zero_grad()
            loss.backward()
            run["optimizer"].step()
    finish(run["job"], model=run["model"].module, optimizer=run["optimizer"], seen=run["seen"], best=run["best"])


main()
