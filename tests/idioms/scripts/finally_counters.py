"""Context managers and finally clauses that count, time and restore, also while an exception passes through them."""

import contextlib
import pickle

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish

counts = {"forward": 0, "backward": 0, "failed": 0}


@contextlib.contextmanager
def counted(name):
    try:
        yield
    except Exception:
        counts["failed"] += 1
        raise
    finally:
        counts[name] += 1


class Frozen:
    def __init__(self, module):
        self.module = module

    def __enter__(self):
        self.before = [p.requires_grad for p in self.module.parameters()]
        self.module.requires_grad_(False)

    def __exit__(self, *exc):
        for p, flag in zip(self.module.parameters(), self.before):
            p.requires_grad_(flag)


def main():
    job = relight.init()
    torch.manual_seed(79 + job.rank)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(5, 6), torch.randint(0, 3, (5,)))
    )
    state = {"mean": torch.zeros(3), "n": 0}
    for step in training.steps(until=14):
        with step as (x, y):
            with counted("forward"):
                with Frozen(model.module[0]), torch.no_grad():
                    logits = model.module(x).mean(0)
                    dist.all_reduce(logits)
                out = model(x) - state["mean"]
            loss = F.cross_entropy(out, y) * (1 + 0.01 * counts["forward"] + 0.1 * counts["failed"])
            with counted("backward"):
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            state = pickle.loads(pickle.dumps({"mean": 0.9 * state["mean"] + 0.1 * logits, "n": state["n"] + 1}))
    finish(job, model=model, optimizer=optimizer, state=state, counts=counts)


if __name__ == "__main__":
    main()
