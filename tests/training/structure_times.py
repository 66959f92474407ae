"""Changes of a model and optimizer over time, by place and step: freezes, swaps, hooks, groups, pruning.

Each action is combined with a place in the step (before the write, after it, between steps), with the steps that do it,
and with code that relight can read or not. Each case is judged as those of `carried_times`: it ends with equal bits, or
relight refuses it, or doubts the bits; a job that is left alone ends equal or is refused by name:

    python -m tests.training.structure_times            # all cases once
    python -m tests.training.structure_times --action "a head is swapped"
"""

import argparse
import gc
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from tests.training.carried_scripts import IMPORTS
from tests.training.carried_times import FAILURES, SCHEDULES, judge

ACTIONS = {
    "freeze": "net.body.requires_grad_(False)",
    "freeze by hand": "for p in net.body.parameters():\n p.requires_grad = False",
    "unfreeze": "net.frozen.requires_grad_(True)",
    "freeze in turn": "net.body.requires_grad_(step.number % 2 == 0)",
    "unfreeze with a group": (
        "if len(opt.param_groups) < 2:\n net.frozen.requires_grad_(True)\n"
        " opt.add_param_group({'params': list(net.frozen.parameters()), 'lr': 0.5})"
    ),
    "a group is taken away": "del opt.param_groups[1:]",
    "a parameter changes its group": (
        "opt.param_groups[0]['params'].append(net.late.bias)\n"
        "if len(opt.param_groups[0]['params']) > 3: opt.param_groups[0]['params'].pop()"
    ),
    "a head is swapped": "net.active = 1 - net.active\ntorch.nn.init.ones_(net.heads[net.active].bias)",
    "a new head": "net.head = torch.nn.Linear(2, 2, dtype=torch.float64)",
    "another activation": "net.act = torch.nn.Softplus()",
    "another optimizer": "opt = torch.optim.Adam(net.parameters(), lr=0.1)",
    "momentum is forgotten": "opt.state.clear()",
    "momentum is scaled": "for state in opt.state.values():\n state['momentum_buffer'] *= 0.5",
    "the rate by hand": "opt.param_groups[0]['lr'] *= 0.5",
    "momentum by hand": "opt.param_groups[0]['momentum'] = 0.5",
    "a hook is added": "net.body.register_forward_hook(lambda module, given, out: out * 0.9)",
    "a gradient hook is added": "net.body.weight.register_hook(lambda gradient: gradient * 0.5)",
    "a hook of the optimizer is added": (
        "opt.register_step_pre_hook(lambda *_: [net.body.weight.data.mul_(0.9)] and None)"
    ),
    "a hook is removed": "handle.remove()",
    "weights are normed": (
        "if 'parametrizations' not in net.body._modules:\n torch.nn.utils.parametrizations.weight_norm(net.body)"
    ),
    "weights are pruned": "torch.nn.utils.prune.l1_unstructured(net.body, 'weight', 0.3)",
    "pruned in turn": (
        "if 'weight_mask' in net.body._buffers: torch.nn.utils.prune.remove(net.body, 'weight')\n"
        "else: torch.nn.utils.prune.l1_unstructured(net.body, 'weight', 0.3)"
    ),
    "weights are masked": "net.body.weight.data[0] = 0.0",
    "weights are written": "torch.nn.init.constant_(net.body.weight, 0.25)",
    "weights by a view": "with torch.no_grad():\n net.body.weight.view(-1)[0].mul_(0.5)",
    "weights are decayed": "with torch.no_grad():\n for p in net.parameters():\n  p *= 0.99",
    "a parameter is assigned": "net.body.weight = torch.nn.Parameter(net.body.weight.detach() * 0.5)",
    "a buffer is registered": "net.register_buffer('extra', torch.ones(1, dtype=torch.float64))",
    "evaluation": "net.drop.eval()",
    "in another dtype for a moment": "net.body.bfloat16().double()",
    "momentum is loaded": (
        "saved = opt.state_dict()\nfor one in saved['state'].values():\n"
        " one['momentum_buffer'] = one['momentum_buffer'] * 0.5\nopt.load_state_dict(saved)"
    ),
    "a parameter gives way to an equal one": "net._parameters['gain'] = torch.nn.Parameter(net.gain.detach().clone())",
    "a number of a module": "net.scale *= 0.9",
    "a container of a module": "net.table[0] *= 0.9",
    "a tensor of a module": "net.kept = net.kept * 0.9",
    "a tensor of a module in place": "net.kept.mul_(0.9)",
    "a layer is reset": "net.body.reset_parameters()",
    "a state is loaded": "net.body.load_state_dict({n: t * 0.5 for n, t in net.body.state_dict().items()})",
}
PLACES = {
    "before": "before",
    "after the write": "written",
    "between steps": "after",
    "above": "above",
}
TIMES = ("in step 1", "in step 6", "every 3rd", "from step 5")

_TOP = """import torch.nn.utils.prune, torch.nn.utils.parametrizations
class Net(torch.nn.Module):
 def __init__(self):
  super().__init__()
  make = lambda: torch.nn.Linear(2, 2, dtype=torch.float64)
  self.body, self.frozen, self.late, self.head = make(), make(), make(), make()
  self.heads, self.act, self.drop = torch.nn.ModuleList([make(), make()]), torch.nn.Tanh(), torch.nn.Dropout(0.3)
  self.active, self.scale, self.table, self.kept = 0, 1.0, [1.0], torch.ones(1, dtype=torch.float64)
  self.gain = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
 def forward(self, x):
  hidden = self.drop(self.act(self.frozen(self.body(x)))) + self.late(x)
  return self.head(self.heads[self.active](hidden)) * self.scale * self.table[0] * self.kept * self.gain
net = Net()
net.frozen.requires_grad_(False)
trained = [*net.body.parameters(), *net.heads.parameters(), *net.head.parameters(), net.gain]
opt = torch.optim.SGD([{'params': trained[:2]}, {'params': trained[2:]}], lr=0.1, momentum=0.9)
handle = net.body.register_forward_hook(lambda module, given, out: out * 1.1)
hand_over(net, opt)
"""


@dataclass(frozen=True)
class StructureCase:
    """One of the product."""

    action: str
    place: str
    schedule: str
    is_read: bool  # the action stands in the loop; else in a function that relight cannot find there

    def __str__(self) -> str:
        return f"{self.action} / {self.place} / {self.schedule} / {'read' if self.is_read else 'not read'}"

    def source(self) -> str:
        """Return the script."""
        acts = f"if {SCHEDULES[self.schedule]}:\n{indent(ACTIONS[self.action], ' ')}"
        where = {PLACES[self.place]: acts if self.is_read else "vars(box)['act']()"}
        after = where.get("after", "")  # also after an attempt that is undone
        block = [
            "x = torch.rand(2, dtype=torch.float64)\nstep.point(0)",
            where.get("before", ""),
            "step.point(1)\nnet(x).square().sum().backward()\nstep.point(2)",
            "opt.step()\nstep.point(3)\nopt.zero_grad()",
            where.get("written", ""),
        ]
        body = "\n".join([where.get("above", ""), "with step as b:", *(indent(one, " ") for one in block), after])
        act = f"def act():\n global opt\n{indent(acts, ' ')}\nbox = types.SimpleNamespace(act=act)\n"
        end = "result = [p.tolist() for p in net.parameters()]\n"
        return f"{IMPORTS}{_TOP}{'' if self.is_read else act}for step in steps():\n{indent(body, ' ')}\n{end}"


def cases(actions: tuple[str, ...] = ()) -> Iterator[StructureCase]:
    """All of them, or those of some actions."""
    for action, place, schedule, is_read in itertools.product(actions or ACTIONS, PLACES, TIMES, (True, False)):
        yield StructureCase(action, place, schedule, is_read)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--action", action="append", default=[], help="only cases with this one, or another so given")
    parser.add_argument("--every", type=int, default=1, help="only each case of so many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as directory:
        for number, case in enumerate(cases(tuple(options.action))):
            if number < options.first or number % options.every != options.first % options.every:
                continue
            verdict = judge(case, number, Path(directory))
            counts[kind := verdict.partition(":")[0]] += 1
            if kind != "equal":
                print(f"{number} {case}: {verdict}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    sys.exit(any(counts[kind] for kind in FAILURES))


if __name__ == "__main__":
    main()
