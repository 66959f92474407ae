"""A saver that keeps the best three checkpoints by metric and deletes others, as timm's does, in a thread of a pool; a
logger with handlers, state in a dataclass with slots, a context manager that times, a running quantile by bisect."""

# ranks: 2
import bisect
import heapq
import logging
import operator
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish

_logger = logging.getLogger("train")
_logger.addHandler(logging.StreamHandler())
_logger.setLevel(logging.INFO)


@dataclass(slots=True)
class TrainState:
    step: int = 0
    best_metric: float | None = None
    best_epoch: int | None = None
    losses: list = field(default_factory=list)
    quantiles: list = field(default_factory=list)
    timers: dict = field(default_factory=dict)


class CheckpointSaver:
    def __init__(self, model, optimizer, checkpoint_dir, decreasing=True, max_history=3):
        self.model, self.optimizer, self.checkpoint_dir = model, optimizer, checkpoint_dir
        self.checkpoint_files, self.best_epoch, self.best_metric = [], None, None
        self.decreasing, self.max_history = decreasing, max_history
        self.cmp = operator.lt if decreasing else operator.gt
        os.makedirs(checkpoint_dir, exist_ok=True)

    def save_checkpoint(self, epoch, metric=None):
        tmp_save_path = os.path.join(self.checkpoint_dir, "tmp.pth.tar")
        torch.save({"epoch": epoch, "state_dict": self.model.state_dict(), "metric": metric}, tmp_save_path)
        worst_file = self.checkpoint_files[-1] if self.checkpoint_files else None
        if len(self.checkpoint_files) < self.max_history or metric is None or self.cmp(metric, worst_file[1]):
            if len(self.checkpoint_files) >= self.max_history:
                self._cleanup_checkpoints(1)
            save_path = os.path.join(self.checkpoint_dir, f"checkpoint-{epoch}.pth.tar")
            os.replace(tmp_save_path, save_path)
            self.checkpoint_files.append((save_path, metric))
            self.checkpoint_files = sorted(self.checkpoint_files, key=lambda x: x[1], reverse=not self.decreasing)
            if metric is not None and (self.best_metric is None or self.cmp(metric, self.best_metric)):
                self.best_epoch, self.best_metric = epoch, metric
        return (None, None) if self.best_metric is None else (self.best_metric, self.best_epoch)

    def _cleanup_checkpoints(self, trim=0):
        delete_index = self.max_history - trim
        for path, _ in self.checkpoint_files[delete_index:]:
            if os.path.exists(path):
                os.remove(path)
        self.checkpoint_files = self.checkpoint_files[:delete_index]


@contextmanager
def timed(state, name):
    start = time.perf_counter()
    try:
        yield
    finally:
        count, _ = state.timers.get(name, (0, 0.0))
        state.timers[name] = (count + 1, min(0.0, start))


def main(epochs=6):
    job = relight.init()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.01)
    state = TrainState()
    saver = CheckpointSaver(model, optimizer, "checkpoints") if job.rank == 0 else None
    pool = ThreadPoolExecutor(max_workers=1)
    hardest = []
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    for step in training.steps(until=epochs * len(loader)):
        with step as (x, y):
            with timed(state, "forward"):
                loss = nn.functional.mse_loss(model(x), y)
            bisect.insort(state.losses, loss.item())
            state.losses = state.losses[-12:]
            median = state.losses[len(state.losses) // 2]
            heapq.heappush(hardest, (-loss.item(), step.number))
            if len(hardest) > 5:
                hardest.remove(max(hardest))
                heapq.heapify(hardest)
            if (step.number + 1) % len(loader) == 0:
                metric = loss.detach().clone()
                dist.all_reduce(metric)
                state.quantiles.append(median)
                if saver is not None:
                    future = pool.submit(saver.save_checkpoint, step.epoch, metric.item())
                    state.best_metric, state.best_epoch = future.result()
                _logger.info("epoch %d: best %s", step.epoch, state.best_metric)
            optimizer.zero_grad()
            (loss * (2.0 if loss.item() > median else 1.0)).backward()
            state.step += 1
            optimizer.step()
    pool.shutdown()
    finish(
        job, model=model, optimizer=optimizer, best=[state.best_metric, state.best_epoch], step=state.step,
        losses=state.losses, quantiles=state.quantiles, hardest=hardest, files=None if saver is None else saver.checkpoint_files,
        timers={k: v[0] for k, v in state.timers.items()},
    )  # fmt: skip


if __name__ == "__main__":
    main()
