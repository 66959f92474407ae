"""Gradient transformations as pairs of functions, their state in nested named tuples, parameters written from a dict."""

# ranks: 2
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

import relight
from tests.idioms.digest import finish


class GradientTransformation(NamedTuple):
    init: Callable
    update: Callable


class AdamState(NamedTuple):
    count: int
    mu: Any
    nu: Any


class TraceState(NamedTuple):
    trace: Any


class ScheduleState(NamedTuple):
    count: int


class EmptyState(NamedTuple):
    pass


class MultiStepsState(NamedTuple):
    mini_step: int
    inner: Any
    acc: Any


def tmap(f, *trees):
    return pytree.tree_map(f, *trees)


def scale_by_adam(b1=0.9, b2=0.99, eps=1e-8):
    def init(params):
        return AdamState(0, tmap(torch.zeros_like, params), tmap(torch.zeros_like, params))

    def update(g, state, params):
        mu = tmap(lambda m, x: b1 * m + (1 - b1) * x, state.mu, g)
        nu = tmap(lambda v, x: b2 * v + (1 - b2) * x * x, state.nu, g)
        count = state.count + 1
        upd = tmap(lambda m, v: (m / (1 - b1**count)) / ((v / (1 - b2**count)).sqrt() + eps), mu, nu)
        return upd, AdamState(count, mu, nu)

    return GradientTransformation(init, update)


def clip_by_global_norm(limit):
    def update(g, state, params):
        norm = torch.stack([x.norm() for x in pytree.tree_leaves(g)]).norm()
        return tmap(lambda x: x * torch.clamp(limit / norm, max=1.0), g), state

    return GradientTransformation(lambda params: EmptyState(), update)


def trace(decay):
    def update(g, state, params):
        new = tmap(lambda x, t: x + decay * t, g, state.trace)
        return new, TraceState(new)

    return GradientTransformation(lambda params: TraceState(tmap(torch.zeros_like, params)), update)


def scale_by_schedule(fn):
    def update(g, state, params):
        return tmap(lambda x: x * fn(state.count), g), ScheduleState(state.count + 1)

    return GradientTransformation(lambda params: ScheduleState(0), update)


def chain(*transforms):
    inits, updates = zip(*transforms)

    def update(g, state, params):
        new = []
        for s, fn in zip(state, updates):
            g, s = fn(g, s, params)
            new.append(s)
        return g, tuple(new)

    return GradientTransformation(lambda params: tuple(fn(params) for fn in inits), update)


def multi_steps(inner, k):
    def init(params):
        return MultiStepsState(0, inner.init(params), tmap(torch.zeros_like, params))

    def update(g, state, params):
        acc = tmap(lambda a, x: a + (x - a) / (state.mini_step + 1), state.acc, g)
        if state.mini_step < k - 1:
            return tmap(torch.zeros_like, g), MultiStepsState(state.mini_step + 1, state.inner, acc)
        upd, new_inner = inner.update(acc, state.inner, params)
        return upd, MultiStepsState(0, new_inner, tmap(torch.zeros_like, acc))

    return GradientTransformation(init, update)


def apply_updates(params, updates):
    with torch.no_grad():
        for k in params:
            params[k].add_(updates[k])


def main():
    job = relight.init()
    torch.manual_seed(31)
    net = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 1))
    params = dict(net.named_parameters())
    tx = multi_steps(
        chain(clip_by_global_norm(1.0), scale_by_adam(), trace(0.5), scale_by_schedule(lambda c: -0.02 * 0.98**c)), 2
    )
    opt_state = tx.init({k: p.detach() for k, p in params.items()})
    training = relight.Training(model=net, data=lambda n: torch.randn(8, 5))
    loss_fn = lambda p, x: (torch.func.functional_call(net, p, (x,)).squeeze(1) - x.prod(1)).square().mean()
    for step in training.steps(until=18):
        with step as x:
            grads = torch.func.grad(loss_fn)({k: p.detach() for k, p in params.items()}, x)
            for g in grads.values():
                dist.all_reduce(g)
                g.div_(job.world_size)
            updates, opt_state = tx.update(grads, opt_state, params)
            apply_updates(params, updates)
    finish(
        job,
        net=net,
        mini=opt_state.mini_step,
        acc=opt_state.acc,
        mu=opt_state.inner[1].mu,
        nu=opt_state.inner[1].nu,
        trace=opt_state.inner[2].trace,
        count=opt_state.inner[3].count,
    )


if __name__ == "__main__":
    main()
