"""Names that hold live tensors of the model without a copy: a state dict, a view of a weight, a buffer set to another."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(5, 8), nn.Linear(8, 5)
        self.register_buffer("center", torch.zeros(8))
        self.register_buffer("anchor", torch.zeros(8))

    def forward(self, x):
        hidden = self.encode(x).tanh()
        return self.decode(hidden - 0.1 * self.anchor), hidden


def main():
    job = relight.init()
    torch.manual_seed(43)
    net = Net()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(7, 5))
    best, lowest = None, float("inf")
    watched = net.encode.weight.data[0]
    drift = 0.0
    for step in training.steps(until=16):
        with step as x:
            output, hidden = model(x)
            loss = (output - x).square().mean() + 0.01 * (net.encode.weight - watched).square().mean()
            optimizer.zero_grad()
            loss.backward()
            mean = hidden.detach().mean(0)
            torch.distributed.all_reduce(mean)
            net.center.lerp_(mean / job.world_size, 0.3)
            if step.number == 4:
                net.anchor = net.center  # from here on one buffer under two names
            if step.number == 9:
                net.anchor = net.center.clone()
            total = loss.detach().clone()
            torch.distributed.all_reduce(total)
            if total.item() < lowest:
                lowest, best = total.item(), net.state_dict()  # not copied: always the newest weights
            drift += sum(float(value.abs().sum()) for value in best.values())
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, best=best, lowest=lowest, drift=drift, watched=watched)


if __name__ == "__main__":
    main()
