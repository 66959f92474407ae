"""The older weight_norm and spectral_norm, which make the weight anew in each forward."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(17)
    net = nn.Sequential(
        nn.utils.weight_norm(nn.Linear(6, 10)), nn.LeakyReLU(), nn.utils.spectral_norm(nn.Linear(10, 4))
    )
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(7, 6))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x[:, :4]).abs().mean().backward()
            optimizer.step()
            if step.number % 4 == 3:
                net.eval()
                with torch.no_grad():
                    net(x)
                net.train()
    nn.utils.remove_weight_norm(net[0])
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
