"""Hooks that tell the phases of a step, on modules that the script owns."""

import copy
import pickle

import torch
from torch import nn

from relight.training.worker.step.phases import before_forward


def test_a_module_can_be_copied_and_saved_with_its_hook() -> None:
    """Reptile and other meta-learning copies the model in each step."""
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(before_forward)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(torch.ones(2)), module(torch.ones(2)))
