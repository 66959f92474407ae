"""torch's counter of floating point operations, whose total so far decides on the rate and on an early end of warm-up."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.flop_counter import FlopCounterMode

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(303)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4 + 2 * (n % 3), 6))
    spent = 0
    for step in training.steps(until=14):
        with step as x:
            counter = FlopCounterMode(display=False)
            with counter:
                optimizer.zero_grad()
                loss = (model(x) - x[:, :3]).square().mean()
                loss.backward()
            spent += counter.get_total_flops()
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + spent / 10_000)
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, spent=spent)


if __name__ == "__main__":
    main()
