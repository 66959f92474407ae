"""A loop that is left with steps to go, in several ways; code after it changes the model and asks all ranks."""

import argparse
import json
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.programs.train import digest

WAYS = ("break", "return", "inside", "bar", "caught", "held", "unguarded", "alone")


class Loop:
    """The objects of a run, and its loop in several ways."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.way, self.last = options.how, options.steps - 1
        self.job = relight.init()
        torch.manual_seed(1)
        self.model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.training = relight.Training(model=self.model, optimizer=self.optimizer, data=self.batch)
        self.steps = self.training.steps(until=options.steps + 5)

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number * 100 + self.job.rank)
        return torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)

    def compute(self, x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bar(self) -> Iterator[relight.Step]:
        """Steps, as a progress bar passes them on."""
        try:
            yield from self.take_steps()
        finally:
            print("the bar is closed")

    def take_steps(self) -> Iterator[relight.Step]:
        """The only reference to the loop is the one that is returned."""
        steps = self.steps
        del self.steps
        return steps

    def run(self) -> None:
        for step in self.bar() if self.way == "bar" else self.take_steps():
            with step as batch:
                self.compute(*batch)
                if step.number == self.last and self.way == "inside" and not step.warmup:
                    break
            if step.number == self.last and (step.committed or self.way == "unguarded"):
                if self.way == "caught":
                    raise StopIteration
                if self.way == "return":
                    return
                if self.way != "alone" or self.job.rank == 1:
                    break

    def run_held(self) -> None:
        """The loop's iterator is kept until the script ends."""
        for step in self.steps:
            with step as batch:
                self.compute(*batch)
            if step.committed and step.number == self.last:
                break


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=WAYS, default="break")
    parser.add_argument("--steps", type=int, default=6, help="after so many the loop is left")
    parser.add_argument("--leave-alone", action="store_true", help="the code after the loop changes nothing")
    parser.add_argument("--save", default="")
    parser.add_argument("--hold", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loop = Loop(options)
    try:
        loop.run_held() if options.how == "held" else loop.run()
    except StopIteration:
        print("left by an exception")
    if not options.leave_alone:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.mul_(0.5)  # a replacement that copied this would halve it again
                dist.all_reduce(parameter.data)
    found = {"model": digest(loop.model.state_dict())}
    with open(f"{options.save}.{loop.job.rank}.part", "w") as file:
        json.dump(found, file)
    os.replace(f"{options.save}.{loop.job.rank}.part", f"{options.save}.{loop.job.rank}")


if __name__ == "__main__":
    main()
