"""fairseq's trainer: an iterator that counts itself, batches in groups, an FP16 optimizer whose scaler raises
OverflowError, counts of updates handed to model, criterion and task, a dummy batch, an inverse square root schedule."""

# ranks: 2
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import relight
from tests.idioms.digest import finish


class DynamicLossScaler:
    def __init__(self, init_scale=2.0**7, scale_factor=2.0, scale_window=5, tolerance=0.0, min_loss_scale=1e-4):
        self.loss_scale, self.scale_factor, self.scale_window, self.tolerance = (
            init_scale,
            scale_factor,
            scale_window,
            tolerance,
        )
        self._iter, self._last_overflow_iter, self._last_rescale_iter, self._overflows_since_rescale = 0, -1, -1, 0
        self.min_loss_scale = min_loss_scale

    def scale(self, outputs):
        return self.loss_scale * outputs

    def update(self):
        if (self._iter - self._last_overflow_iter) % self.scale_window == 0:
            self.loss_scale *= self.scale_factor
            self._last_rescale_iter = self._iter
        self._iter += 1

    def check_overflow(self, grad_norm):
        if grad_norm == float("inf") or grad_norm != grad_norm:
            prev_scale, iter_since_rescale = self.loss_scale, self._iter - self._last_rescale_iter
            self._last_overflow_iter = self._iter
            self._overflows_since_rescale += 1
            pct_overflow = self._overflows_since_rescale / float(iter_since_rescale)
            if pct_overflow >= self.tolerance:
                self.loss_scale /= self.scale_factor
                self._last_rescale_iter, self._overflows_since_rescale = self._iter, 0
            if self.loss_scale <= self.min_loss_scale:
                self.loss_scale = prev_scale
                raise FloatingPointError("Minimum loss scale reached. Try lowering the learning rate.")
            self._iter += 1
            raise OverflowError("setting loss scale to: " + str(self.loss_scale))


class FP16Optimizer:
    def __init__(self, params, optimizer, scaler):
        self.params, self.optimizer, self.scaler, self._multiply_factor = list(params), optimizer, scaler, 1.0

    def backward(self, loss):
        self.scaler.scale(loss).backward()
        self._multiply_factor = 1.0 / self.scaler.loss_scale

    def multiply_grads(self, c):
        self._multiply_factor *= c

    def clip_grad_norm(self, max_norm):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm() * self._multiply_factor
        if max_norm > 0.0:
            self.scaler.check_overflow(norm.item())
            self._multiply_factor *= min(1.0, max_norm / (norm.item() + 1e-6))
        return norm

    def step(self):
        for p in self.params:
            p.grad.mul_(self._multiply_factor)
        self.optimizer.step()
        self.scaler.update()

    def zero_grad(self):
        self.optimizer.zero_grad()
        self._multiply_factor = 1.0 / self.scaler.loss_scale


class InverseSquareRootSchedule:
    def __init__(self, optimizer, lr=5e-3, warmup_updates=4):
        self.optimizer, self.warmup_updates = optimizer, warmup_updates
        self.lr_step, self.decay_factor, self.lr = lr / warmup_updates, lr * warmup_updates**0.5, 1e-7
        self.optimizer.param_groups[0]["lr"] = self.lr

    def step_update(self, num_updates):
        if num_updates < self.warmup_updates:
            self.lr = 1e-7 + num_updates * self.lr_step
        else:
            self.lr = self.decay_factor * num_updates**-0.5
        self.optimizer.param_groups[0]["lr"] = self.lr
        return self.lr


class LabelSmoothedCriterion(nn.Module):
    def __init__(self, eps=0.1, ignore_prefix_size=0):
        super().__init__()
        self.eps, self.num_updates = eps, 0

    def set_num_updates(self, num_updates):
        self.num_updates = num_updates
        self.eps = 0.1 * min(1.0, num_updates / 10)

    def forward(self, model, sample):
        out = model(sample["src"])
        loss = nn.functional.cross_entropy(
            out.transpose(1, 2), sample["target"], label_smoothing=self.eps, reduction="sum"
        )
        return loss, sample["ntokens"], {"loss": loss.item(), "ntokens": sample["ntokens"]}


class TransformerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.fc, self.out = nn.Embedding(16, 12), nn.Linear(12, 24), nn.Linear(24, 16)
        self.num_updates, self.layerdrop = 0, 0.5

    def set_num_updates(self, num_updates):
        self.num_updates = num_updates

    def forward(self, src):
        x = self.fc(self.embed(src))
        if self.training and self.num_updates > 6:
            x = nn.functional.dropout(x, 0.1)
        return self.out(torch.relu(x))


class Trainer:
    def __init__(self, rank):
        self.rank, self._num_updates, self._dummy_batch, self._logs = rank, 0, None, []
        self._model, self._criterion = TransformerModel(), LabelSmoothedCriterion()
        self.model = DistributedDataParallel(self._model)
        self._inner = torch.optim.Adam(self._model.parameters(), 1e-7, betas=(0.9, 0.98))
        self.optimizer = FP16Optimizer(self._model.parameters(), self._inner, DynamicLossScaler())
        self.lr_scheduler = InverseSquareRootSchedule(self._inner)
        self.overflows = 0

    def set_num_updates(self, num_updates):
        self._num_updates = num_updates
        self.lr_scheduler.step_update(num_updates)
        self._model.set_num_updates(num_updates)
        self._criterion.set_num_updates(num_updates)

    def train_step(self, samples, raise_oom=False):
        self._model.train()
        self.optimizer.zero_grad()
        logging_outputs, sample_size, ooms = [], 0, 0
        for i, sample in enumerate(samples):
            is_dummy = sample is None
            if self._dummy_batch is None:
                self._dummy_batch = sample
            sample = self._dummy_batch if is_dummy else sample
            with self.model.no_sync() if i < len(samples) - 1 else contextlib.ExitStack():
                loss, size, log = self._criterion(self.model, sample)
                self.optimizer.backward(loss * (0.0 if is_dummy else 1.0))
            if not is_dummy:
                logging_outputs.append(log)
                sample_size += size
        total = torch.tensor(float(sample_size))
        dist.all_reduce(total)
        try:
            self.optimizer.multiply_grads(dist.get_world_size() / total.item())
            if self._num_updates == 9 and self.overflows == 0:
                next(self._model.parameters()).grad.fill_(float("inf"))
            grad_norm = self.optimizer.clip_grad_norm(0.5)
            self.optimizer.step()
        except OverflowError:
            self.overflows += 1
            grad_norm = torch.tensor(0.0)
            self.optimizer.zero_grad()
            self.optimizer.scaler._iter += 0
            return None
        self.set_num_updates(self._num_updates + 1)
        self._logs.append(grad_norm.item())
        return logging_outputs


def load(number, rank):
    n = 3 + number % 3
    if (number + rank) % 7 == 6:
        return None  # this rank's shard is shorter
    tokens = torch.randint(16, (4, n + 1))
    return {"src": tokens[:, :-1], "target": tokens[:, 1:], "ntokens": 4 * n}


job = relight.init()
torch.manual_seed(1)
trainer = Trainer(job.rank)
training = relight.Training(
    model=trainer.model, optimizer=trainer._inner, data=lambda n: [load(2 * n + k, job.rank) for k in range(2)]
)
for step in training.steps(until=20):
    with step as samples:
        log_output = trainer.train_step(samples)
finish(
    job, model=trainer._model, optimizer=trainer._inner, updates=trainer._num_updates, logs=trainer._logs,
    scaler=vars(trainer.optimizer.scaler), lr=trainer.lr_scheduler.lr, eps=trainer._criterion.eps, overflows=trainer.overflows,
)  # fmt: skip
