"""Small scripts for `relight doctor`: one with nothing to change, and others with something."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight

HOW = ["clean", "counts", "every-step", "hidden", "nan", "nested", "fails", "none"]


class Average:
    """An average of the losses, renewed by each fifth call, whose state lacks the number of calls."""

    def __init__(self) -> None:
        self.calls, self.value = 0, torch.zeros(())

    def update(self, loss: torch.Tensor) -> None:
        self.calls += 1
        if self.calls % 5 == 0:
            self.value.lerp_(loss.detach(), 0.1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: one for name, one in vars(self).items() if isinstance(one, torch.Tensor)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        vars(self).update(state)


def train_in_epochs(training: relight.Training) -> None:
    for _ in range(2):
        for step in training.steps(until=1000):
            with step:
                pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="clean", choices=HOW)
    how = parser.parse_args().how
    torch.set_num_threads(1)
    relight.init()
    if how == "none":
        return
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)

    average = Average()
    handed = {"average": average} if how == "counts" else {}
    training = relight.Training(model=model, optimizer=optimizer, data=batch_of, per_rank=handed)
    seen = os.memfd_create("seen")
    training.checkpoint("mine", every=1 if how == "every-step" else 3)
    smoothed = 1.0
    if how == "nested":
        train_in_epochs(training)
    for step in training.steps(until=1000):
        with step as (x, y):
            if how == "fails" and step.number == 2:
                raise ValueError("this script is broken")
            loss = F.cross_entropy(model(x), y)
            if how == "hidden":  # the kernel counts, for an open file
                loss = loss * os.lseek(seen, 1, os.SEEK_CUR)
            if how == "nan":
                loss = loss * float("nan")
            step.report(loss)
            (loss / smoothed).backward()
            smoothed = 0.9 * smoothed + 0.1 * loss.item()
            if how == "counts":
                average.update(loss)
            optimizer.step()
            optimizer.zero_grad()
    print("the code after the loop was run")


if __name__ == "__main__":
    main()
