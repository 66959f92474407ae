"""Checkpoints of torch.distributed.checkpoint in the loop, with a Stateful application state."""

# ranks: 2
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.saves = 0

    def state_dict(self):
        self.saves += 1
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def main():
    job = relight.init()
    torch.manual_seed(80)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    app = AppState(model, optimizer)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=12):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
            optimizer.step()
        if step.committed and step.number % 4 == 3:
            dcp.save({"app": app}, checkpoint_id=f"dcp-{step.number}")
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
