"""OpenNMT's trainer: Statistics objects that are added, all-gathered as objects and renewed by the report manager, perplexity decides
on the decay, accumulation over a list of batches with a normalization by tokens, a moving average as a list of tensors."""

# ranks: 2
import math
import time
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Statistics:
    def __init__(self, loss=0, n_words=0, n_correct=0):
        self.loss, self.n_words, self.n_correct, self.n_src_words = loss, n_words, n_correct, 0
        self.start_time = time.time()

    @staticmethod
    def all_gather_stats(stat):
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, stat)
        our = gathered[0]
        for i, s in enumerate(gathered):
            if i > 0:
                our.update(s, update_n_src_words=True)
        return our

    def update(self, stat, update_n_src_words=False):
        self.loss += stat.loss
        self.n_words += stat.n_words
        self.n_correct += stat.n_correct
        if update_n_src_words:
            self.n_src_words += stat.n_src_words

    def ppl(self):
        return math.exp(min(self.loss / self.n_words, 100))


class ReportMgr:
    def __init__(self, report_every):
        self.report_every, self.start_time, self.progress_step = report_every, time.time(), 0
        self.lines = []

    def report_training(self, step, learning_rate, patience, report_stats):
        if step % self.report_every == 0:
            report_stats = Statistics.all_gather_stats(report_stats)
            self.lines.append(f"Step {step}; ppl: {report_stats.ppl():.4f}; lr: {learning_rate:.5f}; {patience}")
            self.progress_step += 1
            return Statistics()
        return report_stats


class Optimizer:
    def __init__(self, optimizer, learning_rate, start_decay_steps):
        self._optimizer, self._learning_rate, self.start_decay_steps = optimizer, learning_rate, start_decay_steps
        self._training_step, self._decay_step, self._max_grad_norm, self.last_ppl = 1, 1, 5, None

    def learning_rate(self):
        warm = self._decay_step ** (-0.5) if self._decay_step > self.start_decay_steps else 0.5
        return warm * self._learning_rate

    def step(self):
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate()
            torch.nn.utils.clip_grad_norm_(group["params"], self._max_grad_norm)
        self._optimizer.step()
        self._decay_step += 1
        self._training_step += 1

    def update_ppl(self, ppl):
        if self.last_ppl is not None and ppl > self.last_ppl:
            self._learning_rate *= 0.5
        self.last_ppl = ppl


class Trainer:
    def __init__(self, model, optim, report_manager, average_decay=0.1, average_every=2):
        self.model, self.optim, self.report_manager = model, optim, report_manager
        self.moving_average, self.average_decay, self.average_every = None, average_decay, average_every

    def _update_average(self, step):
        if self.moving_average is None:
            self.moving_average = [params.detach().float() for params in deepcopy(self.model).parameters()]
        else:
            decay = max(self.average_decay, 1 - (step + 1) / (step + 10))
            for i, (avg, cpt) in enumerate(zip(self.moving_average, self.model.parameters())):
                self.moving_average[i] = (1 - decay) * avg + cpt.detach().float() * decay

    def train(self, training, until):
        total_stats, report_stats = Statistics(), Statistics()
        for s in training.steps(until=until):
            with s as batches:
                step = self.optim._training_step
                normalization = sum(len(b) for b in batches)
                self._gradient_accumulation(batches, normalization, total_stats, report_stats)
                if self.average_decay > 0 and s.number % self.average_every == 0:
                    self._update_average(step)
                report_stats = self.report_manager.report_training(step, self.optim.learning_rate(), None, report_stats)
                if step % 5 == 0:
                    self.optim.update_ppl(self.validate().ppl())
        return total_stats

    def _gradient_accumulation(self, true_batches, normalization, total_stats, report_stats):
        self.optim._optimizer.zero_grad()
        for batch in true_batches:
            out = self.model(batch[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
            (loss / normalization).backward()
            stats = Statistics(loss.item(), batch[:, 1:].numel(), (out.argmax(-1) == batch[:, 1:]).sum().item())
            total_stats.update(stats)
            report_stats.update(stats)
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
        self.optim.step()

    def validate(self):
        self.model.eval()
        stats = Statistics()
        with torch.no_grad():
            x = torch.randint(0, 12, (4, 6))
            out = self.model(x[:, :-1])
            stats.update(Statistics(F.cross_entropy(out.flatten(0, 1), x[:, 1:].flatten(), reduction="sum").item(), 20))
        self.model.train()
        return Statistics.all_gather_stats(stats)


def main():
    job = relight.init()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 12))
    opt = Optimizer(torch.optim.Adam(model.parameters(), lr=0.01), 0.05, 6)
    training = relight.Training(
        model=model, optimizer=opt._optimizer, accumulate=2, data=lambda n: torch.randint(0, 12, (3 + n % 3, 6))
    )
    trainer = Trainer(model, opt, ReportMgr(4))
    total = trainer.train(training, 19)
    finish(
        job, model=model, opt=opt._optimizer, lr=opt._learning_rate, ppl=opt.last_ppl, ma=trainer.moving_average,
        lines=trainer.report_manager.lines, total=[total.loss, total.n_words, total.n_correct],
        steps=[opt._decay_step, opt._training_step],
    )  # fmt: skip


if __name__ == "__main__":
    main()
