"""A step whose loss is far above its running average is skipped; too many in a row load a snapshot."""

# ranks: 2
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(79)
    net = nn.Sequential(nn.Linear(5, 9), nn.SiLU(), nn.Linear(9, 1))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), 0.03)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    avg, skipped, row = None, 0, 0
    snapshot = None
    for step in training.steps(until=18):
        with step as x:
            if step.number in (6, 7, 8, 12):
                x = x * 40
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            value = loss.detach().clone()
            dist.all_reduce(value)
            value = value.item() / dist.get_world_size()
            loss.backward()
            if avg is not None and value > 5 * avg:
                skipped += 1
                row += 1
                if row == 3:
                    net.load_state_dict(snapshot[0])
                    optimizer.load_state_dict(snapshot[1])
                    row = 0
                continue
            row = 0
            avg = value if avg is None else 0.8 * avg + 0.2 * value
            optimizer.step()
            if step.number % 4 == 0:
                snapshot = (
                    {k: v.clone() for k, v in net.state_dict().items()},
                    copy.deepcopy(optimizer.state_dict()),
                )
    finish(job, model=model, optimizer=optimizer, avg=avg, skipped=skipped)


if __name__ == "__main__":
    main()
