"""torch.distributed.checkpoint's state dict functions go back to the best weights when the loss has risen."""

# ranks: 2
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(4)
    model = DDP(nn.Linear(6, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.3)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    best, kept = float("inf"), None
    options = StateDictOptions()
    for step in training.steps(until=16):
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :4].sin()).square().mean()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            optimizer.step()
            if mean.item() < best:
                best = mean.item()
                kept = copy.deepcopy(
                    (
                        get_model_state_dict(model, options=options),
                        get_optimizer_state_dict(model, optimizer, options=options),
                    )
                )
            elif mean.item() > 1.5 * best and kept is not None:
                set_model_state_dict(model, copy.deepcopy(kept[0]), options=options)
                set_optimizer_state_dict(model, optimizer, copy.deepcopy(kept[1]), options=options)
                best *= 1.3
    finish(job, model=model, optimizer=optimizer, best=best)


if __name__ == "__main__":
    main()
