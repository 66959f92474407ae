"""Batches of sequences of different lengths as jagged nested tensors."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, nested):
        hidden = torch.relu(self.out(self.embed(nested)))
        return torch.stack([each.mean(0) for each in hidden.unbind()])


def main():
    job = relight.init()
    torch.manual_seed(7)
    model = DDP(Net())
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05)

    def sequences(n):
        lengths = torch.randint(1, 7, (5,)).tolist()
        return torch.nested.nested_tensor([torch.randint(20, (k,)) for k in lengths], layout=torch.jagged)

    training = relight.Training(model=model, optimizer=optimizer, data=sequences)
    seen = 0
    for step in training.steps(until=14):
        with step as nested:
            optimizer.zero_grad()
            model(nested).square().sum(1).mean().backward()
            seen += nested.values().numel()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, seen=seen)


if __name__ == "__main__":
    main()
