"""A reservoir of past examples with labels and logits: dark experience replay."""

# ranks: 2
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def reservoir(num_seen, size):
    if num_seen < size:
        return num_seen
    rand = np.random.randint(0, num_seen + 1)
    return rand if rand < size else -1


class Buffer:
    def __init__(self, size):
        self.buffer_size = size
        self.num_seen_examples = 0
        self.attributes = ["examples", "labels", "logits"]

    def init_tensors(self, **given):
        for name in self.attributes:
            value = given[name]
            if value is not None and not hasattr(self, name):
                typ = torch.int64 if name.endswith("els") else torch.float32
                setattr(self, name, torch.zeros((self.buffer_size, *value.shape[1:]), dtype=typ))

    def add_data(self, examples, labels, logits):
        if not hasattr(self, "examples"):
            self.init_tensors(examples=examples, labels=labels, logits=logits)
        for i in range(examples.shape[0]):
            index = reservoir(self.num_seen_examples, self.buffer_size)
            self.num_seen_examples += 1
            if index >= 0:
                self.examples[index] = examples[i]
                self.labels[index] = labels[i]
                self.logits[index] = logits[i]

    def get_data(self, size):
        n = min(self.num_seen_examples, self.examples.shape[0])
        choice = np.random.choice(n, size=min(size, n), replace=False)
        return tuple(getattr(self, name)[choice] for name in self.attributes)

    def is_empty(self):
        return self.num_seen_examples == 0


def main():
    job = relight.init()
    torch.manual_seed(127)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    buffer = Buffer(10)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 5))
    for step in training.steps(until=16):
        with step as x:
            y = x[:, :3].argmax(1)
            optimizer.zero_grad()
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
            if not buffer.is_empty():
                bx, by, bl = buffer.get_data(4)
                again = model(bx)
                loss = loss + 0.3 * F.mse_loss(again, bl) + 0.3 * F.cross_entropy(again, by)
            loss.backward()
            optimizer.step()
            buffer.add_data(examples=x, labels=y, logits=outputs.data)
    finish(job, model=model, seen=buffer.num_seen_examples, examples=buffer.examples, logits=buffer.logits)


if __name__ == "__main__":
    main()
