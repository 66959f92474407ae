"""Callbacks raise exceptions that skip a batch or end the training: fastai's loop."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class CancelBatchException(Exception):
    pass


class CancelFitException(Exception):
    pass


class Callback:
    order = 0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["learn"], name)


class SkipBig(Callback):
    order = 2

    def __init__(self):
        self.skipped = 0

    def after_loss(self):
        if self.n_iter % 5 == 3:
            self.skipped += 1
            raise CancelBatchException


class Recorder(Callback):
    order = 1

    def __init__(self, beta=0.9):
        self.beta, self.val, self.count, self.losses = beta, 0.0, 0, []

    def after_batch(self):
        self.count += 1
        self.val = self.beta * self.val + (1 - self.beta) * self.loss.detach()
        self.losses.append(self.val / (1 - self.beta**self.count))


class Stop(Callback):
    order = 9

    def after_batch(self):
        if self.n_iter == 13:
            raise CancelFitException


class Learner:
    def __init__(self, model, opt, cbs):
        self.model, self.opt, self.n_iter = model, opt, 0
        self.cbs = sorted(cbs, key=lambda cb: cb.order)
        for cb in self.cbs:
            cb.learn = self
        self.xb = self.pred = self.loss = None

    def __call__(self, name):
        for cb in self.cbs:
            method = type(cb).__dict__.get(name)
            if method is not None:
                method(cb)

    def one_batch(self, xb):
        self.xb = xb
        try:
            self("before_batch")
            self.pred = self.model(self.xb)
            self.loss = (self.pred - self.xb).square().mean()
            self("after_loss")
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()
        except CancelBatchException:
            self("after_cancel")
        finally:
            self.n_iter += 1
            self("after_batch")

    def fit(self, training):
        try:
            for step in training.steps(until=20):
                with step as x:
                    self.one_batch(x)
        except CancelFitException:
            self("after_cancel_fit")


def main():
    job = relight.init()
    torch.manual_seed(101)
    model = DDP(nn.Linear(5, 5))
    opt = torch.optim.Adam(model.parameters(), 0.05)
    recorder, skip = Recorder(), SkipBig()
    learn = Learner(model, opt, [recorder, skip, Stop()])
    learn.fit(relight.Training(model=model, optimizer=opt, data=lambda n: torch.randn(6, 5)))
    finish(job, model=model, opt=opt, losses=recorder.losses, skipped=skip.skipped, n=learn.n_iter)


if __name__ == "__main__":
    main()
