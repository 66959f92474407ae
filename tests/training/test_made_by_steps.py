"""Modules, optimizers and schedulers that steps make and later ones use, found in the code before the first step."""

import builtins
from pathlib import Path
from textwrap import indent

import pytest

from tests.training.carried_shapes import read_script

SETUP = """
import copy, torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import SWALR, AveragedModel
net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
opt = torch.optim.SGD(net.parameters(), 0.1)
late = other = None
kept, use, use_late = [], True, False
class Own(nn.Linear): ...
def teacher_of(net):
 made = copy.deepcopy(net)
 made.eval()
 return made
class Trainer:
 teacher = None
 def loss(self, x):
  if self.teacher is None:
   self.teacher = copy.deepcopy(net)
  return self.teacher(x)
trainer = Trainer()
"""
USE = "if late is not None:\n late(b).backward()"

# name: (what a step does, the classes of what it makes and keeps)
SHAPES = {
    "a copy": (f"if step.number == 5: late = copy.deepcopy(net)\n{USE}", "Sequential"),
    "a copy, frozen": (
        f"if step.number == 5: late = copy.deepcopy(net).eval().requires_grad_(False)\n{USE}",
        "Sequential",
    ),
    "a class of its own": (f"if late is None: late = Own(2, 2)\n{USE}", "Own"),
    "a function makes it": (f"if step.number == 5: late = teacher_of(net)\n{USE}", "Sequential"),
    "a function makes it, in evaluation": (f"if step.number == 5: late = teacher_of(net).eval()\n{USE}", "Sequential"),
    "a name for it first": (f"if step.number == 5:\n made = Own(2, 2)\n late = made\n{USE}", "Own"),
    "either": (f"late = late if late is not None else Own(2, 2)\n{USE}", "Own"),
    "two at once": (
        f"if step.number == 5: late, other = AveragedModel(net), SWALR(opt, 0.1)\n{USE}\nif other: other.step()",
        "AveragedModel SWALR",
    ),
    "in a list": (
        "if step.number % 5 == 0: kept.append(copy.deepcopy(net))\nfor one in kept: one(b).backward()",
        "Sequential",
    ),
    "an attribute": ("trainer.loss(b).backward()", "Sequential"),
    "another optimizer": ("if step.number == 5: opt = torch.optim.AdamW(net.parameters())\nopt.step()", "AdamW"),
    "another scheduler": ("if step.number == 5: late = ExponentialLR(opt, 0.9)\nif late: late.step()", "ExponentialLR"),
    "compiled": ("if step.number == 5: net = torch.compile(net)\nnet(b).backward()", "Sequential"),
    "a layer": ("if step.number == 5: net.head = nn.Linear(2, 2)\nnet(b).backward()", "net.head"),
    "if it is switched on": (f"if use and step.number > 3: late = copy.deepcopy(net)\n{USE}", "Sequential"),
    "if a step switches it on": (
        f"if use_late and late is None: late = Own(2, 2)\n{USE}\nif step.number > 3: use_late = True", "Own",
    ),
    "a loss with weights": (
        f"if late is None: late = nn.CrossEntropyLoss(weight=torch.ones(2))\n{USE}", "CrossEntropyLoss",
    ),
    "an activation with weights": (f"if late is None: late = nn.PReLU()\n{USE}", "PReLU"),
    # --- nothing that a later step needs
    "in each step": ("late = copy.deepcopy(net)\nlate(b).backward()", ""),
    "a layer in each step": ("net.drop = nn.Dropout(0.1 * step.number)\nnet(b).backward()", ""),
    "a loss": ("late = nn.MSELoss()(b, b) if late is None else late + nn.MSELoss()(b, b)\nlate.backward()", ""),
    "a loss, once": (f"if late is None: late = nn.CrossEntropyLoss(label_smoothing=0.1)\n{USE}", ""),
    "an activation": (f"if step.number == 5: late = nn.ReLU().to('cpu')\n{USE}", ""),
    "the best so far": ("if b > 3: best = copy.deepcopy(net)\nnet(b).backward()", ""),
    "switched off": (f"if use_late and step.number > 3: late = copy.deepcopy(net)\n{USE}", ""),
    "switched off otherwise": (f"if not use or use_late == 1:\n late = Own(2, 2)\nelse:\n pass\n{USE}", ""),
    "a copy of numbers": ("if step.number == 5: late = copy.deepcopy(kept)\nif late: b.backward()", ""),
}  # fmt: skip


# What a step does: (its code, names of the parameters that it unfreezes)
UNFREEZES = {
    "a module": ("if step.number == 5: net[0].requires_grad_(True)", "0.weight 0.bias"),
    "without an argument": ("if step.number == 5: net.requires_grad_()", "0.weight 0.bias"),
    "a parameter": ("if step.number == 5: net[0].bias.requires_grad = True", "0.bias"),
    "each of a module": (
        "if step.number == 5:\n for p in net.parameters():\n  p.requires_grad = True", "0.weight 0.bias",
    ),
    "in a function": ("if step.number == 5: unfreeze(net)", "0.weight 0.bias"),
    "some of a module": ("for p in net.parameters():\n if p.ndim > step.number: p.requires_grad_(True)", ""),
    "a condition": ("net.requires_grad_(step.number > 5)", ""),
    "frozen": ("net.requires_grad_(False)", ""),
    "switched off": ("if use_late: net.requires_grad_(True)", ""),
}  # fmt: skip
UNFREEZE = """
def unfreeze(layer):
 for p in layer.parameters():
  p.requires_grad_(True)
"""


@pytest.mark.parametrize("name", UNFREEZES)
def test_finds_what_steps_unfreeze(name: str, tmp_path: Path) -> None:
    block, expected = UNFREEZES[name]
    setup = f"{SETUP}\n{UNFREEZE}\nimport builtins\nbuiltins.net_of_test = net"
    source = f"{setup}\nfor step in steps(net, opt):\n with step as b:\n{indent(block, '  ')}\n"
    names = read_script(source, tmp_path)
    net = vars(builtins).pop("net_of_test")
    assert names is not None
    unfrozen = {id(parameter) for _, parameters in names.unfrozen for parameter in parameters}
    assert [name for name, p in net.named_parameters() if id(p) in unfrozen] == expected.split()


@pytest.mark.parametrize("name", SHAPES)
def test_finds_what_steps_make(name: str, tmp_path: Path) -> None:
    block, expected = SHAPES[name]
    names = read_script(f"{SETUP}\nfor step in steps(net, opt):\n with step as b:\n{indent(block, '  ')}\n", tmp_path)
    assert names is not None
    found = [one.made.kind.__name__ for one in names.found.values() if one.made is not None and one.feeds]
    found += [names.new_layer.layer] if names.new_layer is not None else []
    assert " ".join(sorted(set(found))) == expected
