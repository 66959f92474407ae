"""Population-based training: each rank trains a member without averaging gradients in between; bad ones copy good ones."""

# ranks: 3
import copy
import random

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(23)
    template = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 1))
    members = nn.ModuleList([copy.deepcopy(template) for _ in range(job.world_size)])
    optimizers = {f"m{i}": torch.optim.SGD(m.parameters(), 0.02 * (i + 1), momentum=0.5) for i, m in enumerate(members)}
    training = relight.Training(model=members, optimizer=optimizers, data=lambda n: torch.randn(8, 5))
    rng = random.Random(3)
    scores = [0.0] * job.world_size
    for step in training.steps(until=14):
        with step as x:
            losses = [(m(x) - x.prod(1, keepdim=True)).square().mean() for m in members]
            torch.stack(losses).sum().backward()
            for p in members.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                p.grad /= job.world_size
            measured = torch.stack(losses).detach()
            dist.all_reduce(measured)
            scores = [0.7 * old + 0.3 * new for old, new in zip(scores, measured.tolist(), strict=True)]
            if step.number % 4 == 3:  # exploit and explore
                order = sorted(range(job.world_size), key=scores.__getitem__)
                good, bad = order[0], order[-1]
                members[bad].load_state_dict(members[good].state_dict())
                optimizers[f"m{bad}"].load_state_dict(optimizers[f"m{good}"].state_dict())
                for group in optimizers[f"m{bad}"].param_groups:
                    group["lr"] *= rng.choice([0.8, 1.25])
                scores[bad] = scores[good]
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
    finish(job, members=members, scores=scores, **optimizers)


if __name__ == "__main__":
    main()
