"""ZeRO-1 (ZeroRedundancyOptimizer) over half of the ranks, twice, under DDP with a linear warm-up."""

# ranks: 4
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

job = relight.init()
mesh = init_device_mesh("cpu", (2, job.world_size // 2), mesh_dim_names=("replicate", "zero"))
torch.manual_seed(53)
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 2)))
optimizer = ZeroRedundancyOptimizer(
    model.parameters(), torch.optim.AdamW, process_group=mesh.get_group("zero"), lr=5e-3, weight_decay=0.01
)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
for step in training.steps(until=14):
    with step as x:
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] * x[:, 1] > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
finish(job, model=model, optimizer=optimizer.optim)
