"""SAM as in public image classifiers: BatchNorm's momentum is set aside for the second pass; a step schedule by class."""

# ranks: 2
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, adaptive=False, **kwargs):
        super().__init__(params, dict(rho=rho, adaptive=adaptive, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                e_w = (torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * scale.to(p)
                p.add_(e_w)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def _grad_norm(self):
        return torch.norm(
            torch.stack(
                [
                    ((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2)
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
            ),
            p=2,
        )


def disable_running_stats(model):
    def _disable(module):
        if isinstance(module, _BatchNorm):
            module.backup_momentum = module.momentum
            module.momentum = 0

    model.apply(_disable)


def enable_running_stats(model):
    def _enable(module):
        if isinstance(module, _BatchNorm) and hasattr(module, "backup_momentum"):
            module.momentum = module.backup_momentum

    model.apply(_enable)


class StepLR:
    def __init__(self, optimizer, learning_rate, total_epochs):
        self.optimizer, self.total_epochs, self.base = optimizer, total_epochs, learning_rate

    def __call__(self, epoch):
        if epoch < self.total_epochs * 3 / 10:
            lr = self.base
        elif epoch < self.total_epochs * 6 / 10:
            lr = self.base * 0.2
        else:
            lr = self.base * 0.2**2
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr

    def lr(self):
        return self.optimizer.param_groups[0]["lr"]


class Log:
    def __init__(self, log_each, initial_epoch=-1):
        self.loading_bar, self.best_accuracy, self.log_each, self.epoch = [], 0.0, log_each, initial_epoch

    def train(self, len_dataset):
        self.epoch += 1
        self.last_steps_state, self.epoch_state, self.step = {"loss": 0.0, "steps": 0}, {"loss": 0.0, "steps": 0}, 0

    def __call__(self, loss):
        self.last_steps_state["loss"] += loss.sum().item()
        self.last_steps_state["steps"] += loss.size(0)
        self.epoch_state["loss"] += loss.sum().item()
        self.epoch_state["steps"] += loss.size(0)
        self.step += 1
        if self.step % self.log_each == self.log_each - 1:
            self.loading_bar.append(self.last_steps_state["loss"] / self.last_steps_state["steps"])
            self.last_steps_state = {"loss": 0.0, "steps": 0}


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(42)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = SAM(
        model.parameters(), torch.optim.SGD, rho=0.5, adaptive=True, lr=0.1, momentum=0.9, weight_decay=5e-4
    )
    scheduler, log = StepLR(optimizer, 0.1, 4), Log(log_each=2)
    data = torch.utils.data.TensorDataset(torch.randn(80, 8), torch.randint(0, 4, (80,)))
    loader = torch.utils.data.DataLoader(data, 8, sampler=torch.utils.data.DistributedSampler(data))
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    for step in training.steps(until=4 * len(loader)):
        with step as (inputs, targets):
            if step.number % len(loader) == 0:
                log.train(len(loader))
            model.train()
            enable_running_stats(model)
            loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1, reduction="none")
            loss.mean().backward()
            optimizer.first_step(zero_grad=True)
            disable_running_stats(model)
            F.cross_entropy(model(inputs), targets, label_smoothing=0.1).backward()
            optimizer.second_step(zero_grad=True)
            with torch.no_grad():
                log(loss)
                scheduler(log.epoch)
    finish(job, model=model, optimizer=optimizer, bar=log.loading_bar, epoch=log.epoch, state=log.epoch_state)
