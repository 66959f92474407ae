"""ESPnet's trainer: a reporter whose sub-reporters are managers, statistics weighted by batch, several schedulers, noise on
gradients, batches that are not finite are skipped, options in a dataclass."""

# ranks: 2
import dataclasses
import time
from collections import defaultdict
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

import relight
from tests.idioms.digest import finish


@dataclasses.dataclass(frozen=True)
class WeightedAverage:
    value: float
    weight: float


def aggregate(values):
    weight = sum(v.weight for v in values)
    return sum(v.value * v.weight for v in values if np.isfinite(v.value)) / weight


class SubReporter:
    def __init__(self, key, epoch, total_count):
        self.key, self.epoch, self.total_count, self.start_time = key, epoch, total_count, time.perf_counter()
        self.stats, self._seen_keys_in_the_step, self.count, self._finished = defaultdict(list), set(), 0, False

    def register(self, stats, weight=None):
        if self._finished:
            raise RuntimeError("Already finished")
        if len(self._seen_keys_in_the_step) == 0:
            self.total_count += 1
            self.count += 1
        for key2, v in stats.items():
            if key2 in self._seen_keys_in_the_step:
                raise RuntimeError(f"{key2} is registered twice.")
            self._seen_keys_in_the_step.add(key2)
            value = float(v.detach()) if isinstance(v, torch.Tensor) else float(v)
            self.stats[key2].append(WeightedAverage(value, 1.0 if weight is None else float(weight)))

    def next(self):
        for values in self.stats.values():
            if len(values) != self.count:
                values.extend([WeightedAverage(np.nan, 0)] * (self.count - len(values)))
        self._seen_keys_in_the_step = set()

    def finished(self):
        self._finished = True


class Reporter:
    def __init__(self, epoch=0):
        self.epoch, self.stats = epoch, {}

    def set_epoch(self, epoch):
        self.epoch = epoch

    def start_epoch(self, key):
        before = self.stats.get(self.epoch - 1, {}).get(key)
        return SubReporter(key, self.epoch, 0 if before is None else before["total_count"])

    def finish_epoch(self, sub_reporter):
        sub_reporter.finished()
        stats = {key2: aggregate(values) for key2, values in sub_reporter.stats.items()}
        stats["total_count"] = sub_reporter.total_count
        self.stats.setdefault(self.epoch, {})[sub_reporter.key] = stats

    @contextmanager
    def observe(self, key):
        sub_reporter = self.start_epoch(key)
        yield sub_reporter
        self.finish_epoch(sub_reporter)

    def check_early_stopping(self, patience, key, key2):
        best = min(self.stats, key=lambda e: self.stats[e][key][key2])
        return self.epoch - best > patience


class WarmupLR(LRScheduler):
    def __init__(self, optimizer, warmup_steps=5, last_epoch=-1):
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self):
        n = self.last_epoch + 1
        return [lr * self.warmup_steps**0.5 * min(n**-0.5, n * self.warmup_steps**-1.5) for lr in self.base_lrs]


@dataclasses.dataclass
class TrainerOptions:
    grad_noise: bool = True
    accum_grad: int = 1
    grad_clip: float = 2.0
    max_epoch: int = 4
    num_iters_per_epoch: int = 6
    patience: int = 3


class ASRModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.ctc = nn.GRU(6, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, speech, text):
        logits = self.ctc(self.rnn(speech)[0]).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(text),), speech.shape[1])
        loss = nn.functional.ctc_loss(logits, text, lengths, torch.full((len(text),), text.shape[1]))
        return loss, {"loss": loss.detach(), "acc": logits.argmax(-1).float().mean()}, torch.tensor(len(text))


class Trainer:
    @staticmethod
    def add_gradient_noise(model, iteration, duration=100, eta=1.0, scale_factor=0.55):
        interval = (iteration // duration) + 1
        sigma = eta / interval**scale_factor
        alike = torch.Generator().manual_seed(iteration)  # on all ranks
        for param in model.parameters():
            if param.grad is not None:
                param.grad += sigma * 0.01 * torch.randn(param.grad.size(), generator=alike)

    @classmethod
    def run(cls, model, optimizers, schedulers, options):
        reporter = Reporter()
        training = relight.Training(
            model=model,
            optimizer=optimizers[0],
            scheduler=schedulers,
            data=lambda n: (torch.randn(4, 9, 6), torch.randint(1, 5, (4, 3))),
        )
        sub_reporter = valid_reporter = None
        for step in training.steps(until=options.max_epoch * options.num_iters_per_epoch):
            epoch, iiter = divmod(step.number, options.num_iters_per_epoch)
            with step as (speech, text):
                if iiter == 0:
                    reporter.set_epoch(epoch + 1)
                    sub_reporter = reporter.start_epoch("train")
                cls.train_one_batch(model, optimizers, schedulers, sub_reporter, speech, text, options)
                if iiter == options.num_iters_per_epoch - 1:
                    reporter.finish_epoch(sub_reporter)
                    with reporter.observe("valid") as valid_reporter:
                        cls.validate_one_epoch(model, valid_reporter)
            if step.committed and iiter == options.num_iters_per_epoch - 1:
                if reporter.check_early_stopping(options.patience, "valid", "loss"):
                    break
        return reporter

    @classmethod
    def train_one_batch(cls, model, optimizers, schedulers, reporter, speech, text, options):
        model.train()
        loss, stats, weight = model(speech, text)
        reporter.register({k: v for k, v in stats.items() if v is not None}, weight)
        loss.backward()
        if options.grad_noise:
            cls.add_gradient_noise(model, reporter.total_count)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=options.grad_clip)
        if not torch.isfinite(grad_norm):
            print("The grad norm is not finite. Skipping updating the model.")
        else:
            for optimizer, scheduler in zip(optimizers, schedulers):
                optimizer.step()
                scheduler.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        reporter.register(
            {f"optim{i}_lr{j}": pg["lr"] for i, o in enumerate(optimizers) for j, pg in enumerate(o.param_groups)}
        )
        reporter.next()

    @classmethod
    @torch.no_grad()
    def validate_one_epoch(cls, model, reporter):
        model.eval()
        for _ in range(2):
            loss, _, weight = model(torch.randn(4, 9, 6), torch.randint(1, 5, (4, 3)))
            dist.all_reduce(loss)
            reporter.register({"loss": loss}, weight)
            reporter.next()
        model.train()


job = relight.init()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(ASRModel())
optimizers = [torch.optim.Adadelta(model.parameters(), lr=1.0, rho=0.95, eps=1e-8)]
schedulers = [WarmupLR(optimizer) for optimizer in optimizers]
reporter = Trainer.run(model, optimizers, schedulers, TrainerOptions())
finish(job, model=model, optimizer=optimizers[0], scheduler=schedulers[0], stats=reporter.stats)
