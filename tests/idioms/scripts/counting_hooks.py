"""Hooks on all modules and on tensors that are saved for the backward pass count into globals that scale the loss."""

# ranks: 2
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

COUNTS = {"forward": 0, "backward": 0, "packed": 0, "unpacked": 0}


def pack(tensor):
    COUNTS["packed"] += 1
    return tensor.double()


def unpack(tensor):
    COUNTS["unpacked"] += tensor.numel()
    return tensor.float()


def after_forward(module, inputs, output):
    COUNTS["forward"] += 1


def after_backward(module, grad_input, grad_output):
    COUNTS["backward"] += 1


def main():
    job = relight.init()
    torch.manual_seed(305)
    register_module_forward_hook(after_forward)
    register_module_full_backward_hook(after_backward)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Sigmoid(), nn.Linear(12, 3)))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                loss = (model(x) - x[:, :3]).square().mean()
            loss = loss * (1 + COUNTS["forward"] % 3 + COUNTS["packed"] % 2)
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.01 + 0.001 * (COUNTS["backward"] % 5) + 0.001 * (COUNTS["unpacked"] % 3)
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, **COUNTS)


if __name__ == "__main__":
    main()
