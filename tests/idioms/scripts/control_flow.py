"""try/finally, continue, exceptions as control flow and several managers in one block; skipped batches are counted."""

# ranks: 2
import contextlib
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class SkipBatch(Exception):
    pass


@dataclass
class Counters:
    seen: int = 0
    skipped: int = 0
    reasons: dict = field(default_factory=dict)


@contextlib.contextmanager
def timed(log):
    log["open"] = log.get("open", 0) + 1
    try:
        yield log
    finally:
        log["closed"] = log.get("closed", 0) + 1


def compute(net, x, counters):
    if (n := counters.seen) % 5 == 3:
        raise SkipBatch(f"every fifth, {n % 2}")
    return F.mse_loss(net(x), x.sum(1, keepdim=True)) * (1 + 0.01 * counters.skipped)


def main():
    job = relight.init()
    torch.manual_seed(28)
    net = DDP(nn.Linear(5, 1))
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    training = relight.Training(model=net, optimizer=opt, data=lambda n: torch.randn(6, 5))
    counters, log = Counters(), {}
    for step in training.steps(until=14):
        with step as x, timed(log) as t, contextlib.ExitStack() as stack:
            stack.callback(log.setdefault, "first", step.number)
            try:
                loss = compute(net, x, counters)
            except SkipBatch as reason:
                counters.skipped += 1
                counters.reasons[str(reason)] = counters.reasons.get(str(reason), 0) + 1
                continue
            finally:
                counters.seen += 1
            opt.zero_grad()
            loss.backward()
            opt.step()
    finish(job, net=net, opt=opt, seen=counters.seen, skipped=counters.skipped, reasons=counters.reasons, log=log)


if __name__ == "__main__":
    main()
