"""Lookahead around RAdam: slow weights kept in the wrapper's state, a counter in Python; every fifth step writes twice."""

from collections import defaultdict

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import relight
from tests.idioms.digest import finish


class Lookahead(Optimizer):
    def __init__(self, optimizer, k=5, alpha=0.5):
        self.optimizer = optimizer
        self.k, self.alpha = k, alpha
        self.param_groups = self.optimizer.param_groups
        self.defaults = self.optimizer.defaults
        self.state = defaultdict(dict)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        for group in self.param_groups:
            group["counter"] = 0

    def update(self, group):
        for fast in group["params"]:
            param_state = self.state[fast]
            if "slow_param" not in param_state:
                param_state["slow_param"] = torch.zeros_like(fast.data)
                param_state["slow_param"].copy_(fast.data)
            slow = param_state["slow_param"]
            slow += (fast.data - slow) * self.alpha
            fast.data.copy_(slow)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                self.update(group)
            group["counter"] += 1
            if group["counter"] >= self.k:
                group["counter"] = 0
        return loss

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        slow = [self.state[p].get("slow_param") for group in self.param_groups for p in group["params"]]
        return {"fast": self.optimizer.state_dict(), "slow": slow}

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict["fast"])
        self.param_groups = self.optimizer.param_groups
        params = [p for group in self.param_groups for p in group["params"]]
        for p, slow in zip(params, state_dict["slow"]):
            if slow is not None:
                self.state[p]["slow_param"] = slow.clone()


def main():
    job = relight.init()
    torch.manual_seed(20)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ELU(), nn.Linear(16, 2)))
    optimizer = Lookahead(torch.optim.RAdam(model.parameters(), lr=5e-3))
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 5))
    for step in training.steps(until=18):
        with step as x:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer.state_dict())


if __name__ == "__main__":
    main()
