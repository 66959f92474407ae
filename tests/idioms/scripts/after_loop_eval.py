"""After the last step: an evaluation with collectives, a gathering of predictions, and a report."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(59)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    last = None
    for step in training.steps(until=11):
        with step as x:
            optimizer.zero_grad()
            last = (model(x) - x[:, :3]).square().mean()
            last.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        held = torch.randn(9, 5, generator=torch.Generator().manual_seed(job.rank))
        predictions = model(held)
        parts = [torch.empty_like(predictions) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, predictions)
        score = torch.cat(parts).square().mean()
        dist.all_reduce(score)
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rank": job.rank, "score": score.item()})
    dist.barrier()
    finish(job, model=model, optimizer=optimizer, score=score, objects=objects)


if __name__ == "__main__":
    main()
