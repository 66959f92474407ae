"""Numbers in shared memory and of ctypes that steps set: open_clip's shared epoch, a level of difficulty, a counter."""

# ranks: 2
import ctypes
from multiprocessing import Array, Value

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

seen = ctypes.c_long(0)


class SharedEpoch:
    def __init__(self, epoch=0):
        self.shared_epoch = Value("i", epoch)

    def set_value(self, epoch):
        self.shared_epoch.value = epoch

    def get_value(self):
        return self.shared_epoch.value


class Curriculum:
    """How large the loss was lately."""

    def __init__(self):
        self.level = Value("d", 1.0)
        self.recent = Array("d", 3)

    def see(self, number, loss):
        with self.level.get_lock():
            self.level.value = 0.9 * self.level.value + 0.1 * loss
        self.recent[number % 3] = loss


def main():
    job = relight.init()
    torch.manual_seed(5)
    shared = SharedEpoch()
    curriculum = Curriculum()
    model = DDP(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 3))
    for step in training.steps(until=14):
        with step as x:
            if step.number % 5 == 4:
                shared.set_value(shared.get_value() + 1)
            optimizer.zero_grad()
            loss = (model(x) - shared.get_value()).square().mean() * curriculum.level.value
            loss = loss * (1 + 0.01 * sum(curriculum.recent)) + 0.01 * model(x).mean() * (seen.value % 7)
            loss.backward()
            optimizer.step()
            if step.number > 4:
                curriculum.see(step.number, loss.item())
                seen.value += 1 + int(1000 * abs(loss.item())) % 3
    finish(job, model=model, optimizer=optimizer, level=curriculum.level.value)


if __name__ == "__main__":
    main()
