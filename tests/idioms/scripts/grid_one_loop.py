"""A sweep in one process: one network for each setting in a dict by name, all trained in the same steps, each with its own
optimizer and history; settings that diverge are stopped, and the best is chosen in the end."""

# ranks: 2
import itertools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Run:
    count = 0

    def __init__(self, lr, wd):
        Run.count += 1
        self.id, self.config, self.history, self.alive, self.summary = Run.count, {"lr": lr, "wd": wd}, [], True, {}

    def log(self, data):
        self.history.append(data)
        for k, v in data.items():
            self.summary[k] = min(v, self.summary.get(k, math.inf))


def median(values):
    return sorted(values)[len(values) // 2]


def main():
    job = relight.init()
    grid = {"lr": [0.3, 0.03, 0.003], "wd": [0.0, 0.1]}
    runs, nets, opts = [], {}, {}
    for values in itertools.product(*grid.values()):
        config = dict(zip(grid, values))
        run = Run(**config)
        torch.manual_seed(0)
        nets[f"run{run.id}"] = DDP(nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1)))
        opts[f"run{run.id}"] = optim.SGD(nets[f"run{run.id}"].parameters(), lr=config["lr"], weight_decay=config["wd"])
        runs.append(run)
    training = relight.Training(model=nets, optimizer=opts, data=lambda n: torch.randn(8, 4))
    for step in training.steps(until=16):
        with step as x:
            y = x.prod(1, keepdim=True)
            for run in runs:
                if not run.alive:
                    continue
                net, opt = nets[f"run{run.id}"], opts[f"run{run.id}"]
                loss = F.mse_loss(net(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                dist.all_reduce(loss.detach())
                run.log({"loss": loss.item()})
            if step.number % 4 == 3:
                alive = [r for r in runs if r.alive]
                if len(alive) > 2:
                    cut = median([sum(h["loss"] for h in r.history[-4:]) for r in alive])
                    scores = torch.tensor([sum(h["loss"] for h in r.history[-4:]) for r in alive])
                    dist.broadcast(scores, 0)
                    for r, s in zip(alive, scores.tolist()):
                        r.alive = s <= median(scores.tolist())
    winner = min((r for r in runs if r.alive), key=lambda r: r.summary["loss"])
    finish(
        job, nets=nets, opts=opts, alive=[r.alive for r in runs], best=winner.id if job.rank == 0 else None,
        history=[[h["loss"] for h in r.history] for r in runs], summary=[r.summary for r in runs],
    )  # fmt: skip


if __name__ == "__main__":
    main()
