"""A learner that passes attributes through by `__getattr__`, callbacks that set the learner's attributes, recorders, annealers."""

# ranks: 2
import math
import re
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

_camel = re.compile("(.)([A-Z][a-z]+)")


def annealer(f):
    def _inner(start, end):
        return partial(f, start, end)

    return _inner


@annealer
def sched_cos(start, end, pos):
    return start + (1 + math.cos(math.pi * (1 - pos))) * (end - start) / 2


@annealer
def sched_lin(start, end, pos):
    return start + pos * (end - start)


def combine_scheds(pcts, scheds):
    pcts = torch.cumsum(torch.tensor([0] + pcts), 0)

    def _inner(pos):
        idx = min(int((pos >= pcts).nonzero().max()), len(scheds) - 1)
        return scheds[idx](((pos - pcts[idx]) / (pcts[idx + 1] - pcts[idx])).item())

    return _inner


class CancelBatch(Exception):
    pass


class Callback:
    _order = 0

    def set_runner(self, run):
        self.run = run

    def __getattr__(self, k):
        if k == "run":
            raise AttributeError(k)
        return getattr(self.run, k)

    @property
    def name(self):
        return _camel.sub(r"\1_\2", self.__class__.__name__).lower()

    def __call__(self, cb_name):
        f = getattr(type(self), cb_name, None)
        return bool(f and f(self))


class ParamScheduler(Callback):
    _order = 1

    def __init__(self, pname, sched):
        self.pname, self.sched = pname, sched

    def begin_batch(self):
        for pg in self.opt.param_groups:
            pg[self.pname] = self.sched(self.n_iter / self.total)


class AvgStats(Callback):
    def __init__(self, beta=0.8):
        self.beta, self.count, self.smooth = beta, 0, 0.0

    def after_loss(self):
        self.count += 1
        self.smooth = self.smooth * self.beta + (1 - self.beta) * self.run.loss.item()
        self.run.smooth_loss = self.smooth / (1 - self.beta**self.count)


class SkipSpikes(Callback):
    _order = 2

    def after_loss(self):
        if self.run.loss.detach().sum() < 0:
            raise CancelBatch()
        self.run.loss = self.run.loss / max(1.0, self.run.smooth_loss)


class MixUp(Callback):
    _order = 3

    def __init__(self, alpha=0.4):
        self.distrib = torch.distributions.Beta(torch.tensor([alpha]), torch.tensor([alpha]))

    def begin_batch(self):
        lam = self.distrib.sample((self.xb.size(0),)).squeeze(1)
        lam = torch.stack([lam, 1 - lam], 1).max(1)[0].view(-1, 1)
        shuffle = torch.randperm(self.xb.size(0))
        self.run.xb = torch.lerp(self.xb[shuffle], self.xb, lam)
        self.run.yb = torch.lerp(self.yb[shuffle], self.yb, lam)


class Recorder(Callback):
    _order = 10

    def begin_fit(self):
        self.lrs, self.losses = [], []

    def after_backward(self):
        self.lrs.append(self.opt.param_groups[-1]["lr"])
        self.losses.append(self.run.loss.detach())


class LayerHooks(Callback):
    """Statistics of activations, which the layers' own hooks append to."""

    def begin_fit(self):
        self.stats = [([], []) for _ in self.model.module]

        def append(i, mod, inp, outp):
            if mod.training:
                self.stats[i][0].append(outp.data.mean().item())
                self.stats[i][1].append(outp.data.std().item())

        self.handles = [layer.register_forward_hook(partial(append, i)) for i, layer in enumerate(self.model.module)]

    def after_loss(self):
        if len(self.stats[0][1]) > 3 and self.stats[0][1][-1] > self.stats[0][1][-3]:
            self.run.loss = self.run.loss * 1.1


class Learner:
    def __init__(self, model, opt, loss_func, cbs):
        self.model, self.opt, self.loss_func, self.n_iter, self.total = model, opt, loss_func, 0, 17
        self.cbs = []
        for cb in cbs:
            cb.set_runner(self)
            setattr(self, cb.name, cb)
            self.cbs.append(cb)

    def __call__(self, cb_name):
        for cb in sorted(self.cbs, key=lambda x: x._order):
            if cb(cb_name):
                return True
        return False

    def one_batch(self, batch):
        try:
            self.xb, self.yb = batch
            self("begin_batch")
            self.pred = self.model(self.xb)
            self.loss = self.loss_func(self.pred, self.yb)
            self("after_loss")
            self.opt.zero_grad()
            self.loss.backward()
            self("after_backward")
            self.opt.step()
        except CancelBatch:
            self("after_cancel_batch")
        finally:
            self.n_iter += 1

    def fit(self, training):
        self("begin_fit")
        for step in training.steps(until=self.total):
            with step as batch:
                self.one_batch(batch)


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(21)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sched = combine_scheds([0.3, 0.7], [sched_lin(0.01, 0.2), sched_cos(0.2, 0.001)])
    cbs = [Recorder(), SkipSpikes(), AvgStats(), MixUp(), ParamScheduler("lr", sched), LayerHooks()]
    learn = Learner(model, opt, nn.functional.mse_loss, cbs)
    learn.fit(relight.Training(model=model, optimizer=opt, data=lambda n: (torch.randn(8, 5), torch.randn(8, 2))))
    finish(
        job,
        model=model,
        opt=opt,
        lrs=learn.recorder.lrs,
        losses=learn.recorder.losses,
        smooth=learn.smooth_loss,
        stats=learn.layer_hooks.stats,
        n=learn.n_iter,
    )
