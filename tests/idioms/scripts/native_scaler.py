"""A scaler object that is called with the loss, gradients that are scaled by a class of the script's own, EMA by class."""

# ranks: 2
import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class DynamicScaler:
    """Halves on overflow, doubles after some good steps."""

    def __init__(self):
        self.scale, self.good = 2.0**8, 0

    def __call__(self, loss, optimizer, parameters, clip_grad=None):
        parameters = list(parameters)
        (loss * self.scale).backward()
        finite = all(torch.isfinite(p.grad).all() for p in parameters)
        if not finite:
            self.scale, self.good = self.scale / 2, 0
            return
        for p in parameters:
            p.grad /= self.scale
        self.good += 1
        if self.good % 3 == 0:
            self.scale *= 2
        if clip_grad is not None:
            nn.utils.clip_grad_value_(parameters, clip_grad)
        optimizer.step()


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ema_v.copy_(self.decay * ema_v + (1 - self.decay) * model_v if ema_v.is_floating_point() else model_v)


def main():
    job = relight.init()
    torch.manual_seed(29)
    base = nn.Sequential(nn.Linear(6, 14), nn.BatchNorm1d(14), nn.ReLU(), nn.Linear(14, 3))
    ema = ModelEma(base)
    model = DDP(base)
    optimizer = torch.optim.NAdam(model.parameters(), 0.01)
    scaler = DynamicScaler()
    training = relight.Training(model=model, optimizer=optimizer, ema=ema, data=lambda n: torch.randn(10, 6))
    for step in training.steps(until=15):
        with step as x:
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            if step.number in (4, 11):
                loss = loss * float("inf")
            optimizer.zero_grad()
            scaler(loss, optimizer, model.parameters(), clip_grad=0.1)
            ema.update(base)
    finish(job, model=model, optimizer=optimizer, ema=ema, scale=scaler.scale, good=scaler.good)


if __name__ == "__main__":
    main()
