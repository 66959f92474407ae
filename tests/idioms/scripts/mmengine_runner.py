"""A runner in the shape of OpenMMLab: registries, hooks by priority, a message hub that is a global, an optimizer wrapper."""

# ranks: 2
import copy
from collections import OrderedDict
from enum import Enum

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import relight
from tests.idioms.digest import finish


class Registry:
    def __init__(self, name):
        self._name, self._module_dict = name, {}

    def register_module(self, cls=None):
        self._module_dict[cls.__name__] = cls
        return cls

    def build(self, cfg, **kwargs):
        cfg = copy.deepcopy(cfg)
        return self._module_dict[cfg.pop("type")](**cfg, **kwargs)


HOOKS, SCHEDULERS = Registry("hook"), Registry("scheduler")


class ManagerMeta(type):
    def __init__(cls, *args):
        cls._instance_dict = OrderedDict()
        super().__init__(*args)


class ManagerMixin(metaclass=ManagerMeta):
    def __init__(self, name=""):
        self._instance_name = name

    @classmethod
    def get_instance(cls, name, **kwargs):
        if name not in cls._instance_dict:
            cls._instance_dict[name] = cls(name=name, **kwargs)
        return cls._instance_dict[name]

    @classmethod
    def get_current_instance(cls):
        if not cls._instance_dict:
            cls.get_instance("default")
        return next(iter(reversed(cls._instance_dict.values())))


class HistoryBuffer:
    def __init__(self, max_length=50):
        self.max_length = max_length
        self._log_history, self._count_history = np.array([]), np.array([])

    def update(self, value, count=1):
        self._log_history = np.append(self._log_history, value)
        self._count_history = np.append(self._count_history, count)
        if len(self._log_history) > self.max_length:
            self._log_history = self._log_history[-self.max_length :]
            self._count_history = self._count_history[-self.max_length :]

    def mean(self, window=5):
        logs, counts = self._log_history[-window:], self._count_history[-window:]
        return logs.sum() / counts.sum()


class MessageHub(ManagerMixin):
    def __init__(self, name):
        super().__init__(name)
        self._log_scalars, self._runtime_info = OrderedDict(), OrderedDict()

    def update_scalar(self, key, value, count=1):
        if key not in self._log_scalars:
            self._log_scalars[key] = HistoryBuffer()
        self._log_scalars[key].update(value, count)

    def update_info(self, key, value):
        self._runtime_info[key] = value

    def get_info(self, key, default=None):
        return self._runtime_info.get(key, default)

    def get_scalar(self, key):
        return self._log_scalars[key]


class Priority(Enum):
    VERY_HIGH = 10
    NORMAL = 50
    LOW = 70


class Hook:
    priority = "NORMAL"

    def before_train_iter(self, runner, batch_idx):
        pass

    def after_train_iter(self, runner, batch_idx, outputs=None):
        pass

    def every_n(self, runner, n):
        return (runner.iter + 1) % n == 0


@HOOKS.register_module
class RuntimeInfoHook(Hook):
    priority = "VERY_HIGH"

    def before_train_iter(self, runner, batch_idx):
        runner.message_hub.update_info("iter", runner.iter)

    def after_train_iter(self, runner, batch_idx, outputs=None):
        for key, value in outputs.items():
            runner.message_hub.update_scalar(f"train/{key}", value)


@HOOKS.register_module
class ParamSchedulerHook(Hook):
    priority = "LOW"

    def after_train_iter(self, runner, batch_idx, outputs=None):
        for scheduler in runner.param_schedulers:
            scheduler.step()


@HOOKS.register_module
class EarlyHalving(Hook):
    def __init__(self, patience):
        self.patience, self.best_score, self.wait = patience, None, 0

    def after_train_iter(self, runner, batch_idx, outputs=None):
        score = runner.message_hub.get_scalar("train/loss").mean(4)
        if self.best_score is None or score < self.best_score:
            self.best_score, self.wait = score, 0
        else:
            self.wait += 1
            if self.wait >= self.patience:
                runner.optim_wrapper.base_lr_scale *= 0.5
                self.wait = 0


@SCHEDULERS.register_module
class LinearLR:
    def __init__(self, optimizer, start_factor, end):
        self.optimizer, self.start_factor, self.end, self.last_step, self._global_step = (
            optimizer,
            start_factor,
            end,
            -1,
            -1,
        )
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.step()

    def step(self):
        self.last_step += 1
        self._global_step += 1
        factor = self.start_factor + (1 - self.start_factor) * min(self.last_step, self.end) / self.end
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def state_dict(self):
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state_dict):
        self.__dict__.update(state_dict)


class OptimWrapper:
    def __init__(self, optimizer, accumulative_counts=1, clip_grad=None):
        self.optimizer, self._accumulative_counts, self.clip_grad = optimizer, accumulative_counts, clip_grad
        self._inner_count, self.base_lr_scale, self.message_hub = 0, 1.0, MessageHub.get_current_instance()

    def update_params(self, loss):
        (loss * self.base_lr_scale).backward()
        self._inner_count += 1
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.clip_grad:
            grad = torch.nn.utils.clip_grad_norm_(params, **self.clip_grad)
            self.message_hub.update_scalar("train/grad_norm", float(grad))
        self.optimizer.step()
        self.optimizer.zero_grad()


class Runner:
    def __init__(self, cfg):
        self.cfg, self.iter = cfg, 0
        self.message_hub = MessageHub.get_instance(cfg["experiment_name"])
        self.model = DistributedDataParallel(
            nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))
        )
        self.optim_wrapper = OptimWrapper(
            torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9), clip_grad=cfg["clip"]
        )
        self.param_schedulers = [
            SCHEDULERS.build(c, optimizer=self.optim_wrapper.optimizer) for c in cfg["param_scheduler"]
        ]
        self._hooks = []
        for hook in cfg["hooks"]:
            self.register_hook(HOOKS.build(hook))

    def register_hook(self, hook):
        value = Priority[hook.priority].value
        for i in range(len(self._hooks) - 1, -1, -1):
            if value >= Priority[self._hooks[i].priority].value:
                self._hooks.insert(i + 1, hook)
                return
        self._hooks.insert(0, hook)

    def call_hook(self, fn_name, **kwargs):
        for hook in self._hooks:
            if hasattr(hook, fn_name):
                getattr(hook, fn_name)(self, **kwargs)

    def run_iter(self, batch):
        self.call_hook("before_train_iter", batch_idx=self.iter)
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        outputs = {"loss": mean.item() / dist.get_world_size()}
        self.optim_wrapper.update_params(loss)
        self.call_hook("after_train_iter", batch_idx=self.iter, outputs=outputs)
        self.iter += 1

    def train(self):
        training = relight.Training(
            model=self.model,
            optimizer=self.optim_wrapper.optimizer,
            scheduler=self.param_schedulers,
            data=lambda n: (torch.randn(8, 6), torch.randint(0, 2, (8,))),
        )
        for step in training.steps(until=self.cfg["max_iters"]):
            with step as data_batch:
                self.run_iter(data_batch)


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(0)
    runner = Runner(
        dict(
            experiment_name="exp",
            max_iters=16,
            clip=dict(max_norm=1.0),
            param_scheduler=[dict(type="LinearLR", start_factor=0.1, end=6)],
            hooks=[
                dict(type="ParamSchedulerHook"),
                dict(type="EarlyHalving", patience=2),
                dict(type="RuntimeInfoHook"),
            ],
        )
    )
    runner.train()
    hub = MessageHub.get_current_instance()
    finish(
        job,
        model=runner.model,
        opt=runner.optim_wrapper.optimizer,
        scale=runner.optim_wrapper.base_lr_scale,
        it=runner.iter,
        inner=runner.optim_wrapper._inner_count,
        info=hub.get_info("iter"),
        loss=hub.get_scalar("train/loss")._log_history,
        norm=hub.get_scalar("train/grad_norm")._log_history,
    )
