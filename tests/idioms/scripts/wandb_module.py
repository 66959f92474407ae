"""A logger like wandb's: a module-level run with a summary that keeps minima, a history thread that drains a queue, config by
attributes; the loss that is logged after the step decides on the decay, an evaluation by the clock in between."""

# ranks: 2
import queue
import threading
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Config(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Run:
    def __init__(self, config):
        self.config, self.summary, self.step, self._defined = Config(config), {}, 0, {}
        self._queue, self.written = queue.Queue(), 0
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def define_metric(self, name, summary):
        self._defined[name] = summary

    def log(self, data, commit=True):
        for k, v in data.items():
            how = {"min": min, "max": max}.get(self._defined.get(k))
            self.summary[k] = how(v, self.summary[k]) if how and k in self.summary else v
        self._queue.put((self.step, dict(data)))
        if commit:
            self.step += 1

    def _drain(self):
        while (item := self._queue.get()) is not None:
            self.written += 1

    def finish(self):
        self._queue.put(None)
        self._thread.join()


run = None


def init(**config):
    global run
    run = Run(config)
    return run


def log(data, **kwargs):
    run.log(data, **kwargs)


def main():
    job = relight.init()
    torch.manual_seed(0)
    cfg = init(lr=0.05, decay=0.7, eval_seconds=0.05).config
    run.define_metric("loss", "min")
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 1)))
    optimizer = optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    last_eval, tic = time.time(), time.perf_counter()
    for step in training.steps(until=20):
        with step as x:
            loss = F.mse_loss(model(x), x.abs().sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if "loss" in run.summary and mean.item() > 1.3 * run.summary["loss"]:
                cfg.lr *= cfg.decay
                for group in optimizer.param_groups:
                    group["lr"] = cfg.lr
            optimizer.step()
        log({"loss": mean.item(), "lr": cfg.lr}, commit=False)
        log({"ms": 1000 * (time.perf_counter() - tic)})
        if time.time() - last_eval > cfg.eval_seconds:
            model.eval()
            with torch.no_grad():
                log({"val": model.module(torch.randn(4, 6)).mean().item()}, commit=False)
            model.train()
            last_eval = time.time()
        tic = time.perf_counter()
    run.finish()
    finish(job, model=model, opt=optimizer, lr=cfg.lr, best=run.summary["loss"], step=run.step)


if __name__ == "__main__":
    main()
