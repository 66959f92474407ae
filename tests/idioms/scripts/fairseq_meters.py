"""Logs of all ranks gathered as objects in each step; the gradient is divided by the tokens of all ranks."""

import time
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AverageMeter:
    def __init__(self):
        self.val, self.sum, self.count = None, 0, 0

    def update(self, val, n=1):
        self.val, self.sum, self.count = val, self.sum + val * n, self.count + n

    @property
    def avg(self):
        return self.sum / self.count if self.count else self.val


class TimeMeter:
    def __init__(self):
        self.start, self.n = time.perf_counter(), 0

    def update(self, val=1):
        self.n += val

    @property
    def avg(self):
        return self.n / max(1e-9, time.perf_counter() - self.start)


class Trainer:
    def __init__(self, model):
        self.model = DDP(model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01, betas=(0.9, 0.98))
        self._num_updates = 0
        self.meters = OrderedDict(loss=AverageMeter(), wps=TimeMeter(), gnorm=AverageMeter())
        self._dummy = None
        self.training = relight.Training(model=self.model, optimizer=self.optimizer, data=self.sample, accumulate=2)

    def sample(self, n):
        length = int(torch.randint(3, 7, ()))
        return torch.randint(15, (4, length + 1))

    def lr_step_update(self):
        for g in self.optimizer.param_groups:
            g["lr"] = 0.02 * min((self._num_updates + 1) ** -0.5, (self._num_updates + 1) * 6**-1.5)

    def train_step(self, samples):
        self.model.train()
        self.optimizer.zero_grad()
        logging_outputs, sample_size = [], 0
        for i, tokens in enumerate(samples):
            if self._dummy is None:
                self._dummy = tokens
            with self.model.no_sync() if i < len(samples) - 1 else torch.enable_grad():
                out = self.model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
                loss.backward()
            logging_outputs.append({"loss": loss.item(), "ntokens": tokens[:, 1:].numel()})
            sample_size += tokens[:, 1:].numel()
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (logging_outputs, sample_size))
        total = sum(size for _, size in gathered)
        for p in self.model.parameters():
            p.grad.mul_(dist.get_world_size() / total)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.lr_step_update()
        self.optimizer.step()
        self._num_updates += 1
        self.meters["loss"].update(sum(o["loss"] for outs, _ in gathered for o in outs) / total, total)
        self.meters["gnorm"].update(norm.item())
        self.meters["wps"].update(total)


job = relight.init()
torch.manual_seed(14)
trainer = Trainer(nn.Sequential(nn.Embedding(15, 8), nn.Linear(8, 15)))
for step in trainer.training.steps(until=15):
    with step as samples:
        trainer.train_step(samples)
    if step.committed and step.number % 5 == 0 and job.rank == 0:
        print(f"{step.number}: loss {trainer.meters['loss'].avg:.3f}, {trainer.meters['wps'].avg:.0f} words a second")
finish(
    job,
    model=trainer.model,
    optimizer=trainer.optimizer,
    loss=trainer.meters["loss"].avg,
    n=trainer.meters["gnorm"].sum,
)
