"""channels_last from the third step on, with gradients that are views of DDP's buckets and none as it is converted."""

# ranks: 2
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(29)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1))
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 3, 10, 10))
    for step in training.steps(until=13):
        with step as x:
            if step.number >= 3:
                x = x.to(memory_format=torch.channels_last)
            if step.number == 3:
                net.to(memory_format=torch.channels_last)
            out = model(x).flatten(1)
            F.cross_entropy(out, x.mean((2, 3)).argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finish(job, model=model, optimizer=optimizer, strides=[list(p.stride()) for p in net.parameters()])


if __name__ == "__main__":
    main()
