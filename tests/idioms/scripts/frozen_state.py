"""The state of training as a frozen dataclass and a named tuple, replaced in each step, as JAX users write it."""

import dataclasses
import enum
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


class Phase(enum.Enum):
    WARMUP = "warmup"
    STABLE = "stable"
    DECAY = "decay"


class Moments(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor
    count: int


@dataclasses.dataclass(frozen=True)
class TrainState:
    step: int = 0
    phase: Phase = Phase.WARMUP
    moments: Moments = Moments(torch.zeros(()), torch.ones(()), 0)
    budget: Decimal = Decimal("1.00")
    share: Fraction = Fraction(1, 3)
    history: tuple = ()

    def update(self, loss):
        first = 0.9 * self.moments.first + 0.1 * loss
        second = 0.99 * self.moments.second + 0.01 * loss**2
        phase = self.phase
        if self.step == 4:
            phase = Phase.STABLE
        elif self.step >= 9 and float(first) < 5:
            phase = Phase.DECAY
        return dataclasses.replace(
            self,
            step=self.step + 1,
            phase=phase,
            moments=Moments(first, second, self.moments.count + 1),
            budget=self.budget - Decimal("0.03"),
            share=self.share * Fraction(7, 8),
            history=(*self.history[-3:], round(float(loss), 6)),
        )


def main():
    job = relight.init()
    torch.manual_seed(19 + job.rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True)
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(5, 6), torch.randint(0, 3, (5,)))
    )
    state = TrainState()
    for step in training.steps(until=16):
        with step as (x, y):
            match state.phase:
                case Phase.WARMUP:
                    lr = 0.002 * (state.step + 1)
                case Phase.STABLE:
                    lr = 0.01
                case Phase.DECAY:
                    lr = float(state.share) * 0.01 * float(state.budget)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = F.cross_entropy(model(x), y)
            scaled = loss / (state.moments.second.sqrt() + 1e-3)
            optimizer.zero_grad()
            scaled.backward()
            optimizer.step()
            state = state.update(loss.detach())
    finish(
        job,
        model=model,
        optimizer=optimizer,
        moments=state.moments,
        rest=[state.step, str(state.budget), str(state.share)],
        history=state.history,
    )


if __name__ == "__main__":
    main()
