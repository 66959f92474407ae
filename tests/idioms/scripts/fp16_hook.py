"""A ready communication hook around another: gradients travel as halves, averaged in a process group of its own."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(3)
model = DDP(nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 4)), bucket_cap_mb=0.001)
model.register_comm_hook(dist.group.WORLD, default.fp16_compress_wrapper(default.allreduce_hook))
optimizer = torch.optim.RMSprop(model.parameters(), 1e-2, momentum=0.5, centered=True)
for step in relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6)).steps(until=14):
    with step as x:
        nn.functional.smooth_l1_loss(model(x), x[:, :4].cos()).backward()
        optimizer.step()
        optimizer.zero_grad()
finish(job, model=model, optimizer=optimizer)
