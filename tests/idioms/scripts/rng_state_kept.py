"""Random states of torch and NumPy are saved at the end of each step, and restored in the next one to draw on."""

# ranks: 2
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(20)
    np.random.seed(20)
    model = DDP(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    noise_state = torch.get_rng_state()
    shuffle_state = np.random.get_state()
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=14):
        with step as x:
            outside = torch.get_rng_state()
            torch.set_rng_state(noise_state)
            noise = torch.randn(8, 6) * 0.1
            noise_state = torch.get_rng_state()
            torch.set_rng_state(outside)
            before = np.random.get_state()
            np.random.set_state(shuffle_state)
            order = np.random.permutation(8)
            shuffle_state = np.random.get_state()
            np.random.set_state(before)
            optimizer.zero_grad()
            x = x[torch.from_numpy(order)]
            (model(x + noise) - x[:, :4].sin()).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, noise=noise_state, last=int(shuffle_state[2]))


if __name__ == "__main__":
    main()
