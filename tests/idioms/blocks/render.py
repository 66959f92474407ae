"""Writes the script of a plan."""

import re

from tests.idioms.blocks import extras
from tests.idioms.blocks.data import SOURCES
from tests.idioms.blocks.nets import GENERATOR, IMPORTS, KEPT, NETS, VALUE
from tests.idioms.blocks.passes import is_manual, on_input, step_body
from tests.idioms.blocks.plan import GANS, TWO_WRITES, Plan
from tests.idioms.blocks.script import Script
from tests.idioms.blocks.updates import make_optimizer

_DDP = {
    "ddp": "DDP({})",
    "ddp-view": "DDP({}, gradient_as_bucket_view=True)",
    "ddp-unused": "DDP({}, find_unused_parameters=True)",
    "ddp-local-buffers": "DDP({}, broadcast_buffers=False)",
    "ddp-small-buckets": "DDP({}, bucket_cap_mb=0.0005)",
    "ddp-static": "DDP({}, static_graph=True)",
}


def render(plan: Plan) -> str:
    """The script. The same plan gives the same text."""
    script = Script()
    script.imports |= {"import torch.distributed as dist", "import torch.nn.functional as F", "from torch import nn"}
    _models(script, plan)
    make_optimizer(script, plan)
    _second_optimizer(script, plan)
    _companions(script, plan)
    _data(script, plan)
    _carried(script, plan)
    script.block += _block(script, plan)
    script.between += _between(plan)
    blocks = " ".join(plan.blocks()) or "the simplest"
    text = script.text(f"{blocks} (seed {plan.seed})", steps=plan.steps, in_main=plan["scope"] == "main")
    return _without_unused(text)


def places(text: str) -> list[str]:
    """Places in a script at which a rank can be told to die."""
    return sorted(set(re.findall(r'here\(job, step, "([a-z-]+)"\)', text)))


def _wrap(script: Script, plan: Plan, name: str) -> str:
    if is_manual(plan):
        script.define(extras.AVERAGE if plan["wrapper"] == "manual" else extras.AVERAGE_FLAT)
        return name
    script.imports.add("from torch.nn.parallel import DistributedDataParallel as DDP")
    return _DDP[plan["wrapper"]].format(name)


def _models(script: Script, plan: Plan) -> None:
    script.define(NETS[plan["net"]])
    script.imports |= set(IMPORTS.get(plan["net"], ()))
    script.setup.append("net = Net()")
    if plan["hooks"] == "gradient":
        script.setup.append("next(net.parameters()).register_hook(lambda gradient: gradient * 0.5)")
    if plan["hooks"] == "forward":
        script.define(extras.COUNT_CALLS)
        script.setup += ['calls = {"number": 0}', "net.last.register_forward_hook(count_calls(calls))"]
        script.kept["calls"] = "calls"
    shape = plan["shape"]
    if shape == "momentum":
        script.imports.add("import copy")
        script.setup.append("key = copy.deepcopy(net).requires_grad_(False)")
        script.kept["key"] = "key.state_dict()"
    script.setup.append(f"model = {_wrap(script, plan, 'net')}")
    script.models["model"] = "model"
    if shape == "distill":
        script.setup.append("teacher = Net().eval().requires_grad_(False)")
        script.models |= {"teacher": "teacher"} if plan.seed % 2 else {}
    if shape == "momentum":
        script.models["key"] = "key"
    if shape in TWO_WRITES:
        script.define(GENERATOR if shape in GANS else VALUE)
        script.setup.append(f"other_net = {'Generator' if shape in GANS else 'Value'}()")
        script.setup.append(f"other = {_wrap(script, plan, 'other_net')}")
        script.models["other"] = "other"
        script.kept["other"] = "other_net.state_dict()"
    if plan["net"] == "rnn-carried":
        script.setup.append("hidden = torch.zeros(1, 8, 8)")
        script.kept["hidden"] = "hidden"
    script.kept["model"] = "net.state_dict()"
    for number, expression in enumerate(KEPT.get(plan["net"], ())):
        script.kept[f"kept_{number}"] = expression


def _second_optimizer(script: Script, plan: Plan) -> None:
    if plan["shape"] in TWO_WRITES:
        script.setup.append("other_optimizer = torch.optim.Adam(other_net.parameters(), lr=0.01)")
        script.optimizers["other"] = "other_optimizer"
        script.kept["other_optimizer"] = "other_optimizer.state_dict()"


def _companions(script: Script, plan: Plan) -> None:
    schedule, ema = plan["schedule"], plan["ema"]
    if schedule in extras.SCHEDULES:
        made = extras.SCHEDULES[schedule]
        names = sorted(set(re.findall(r"[A-Z][A-Za-z]+LR(?:OnPlateau)?|ReduceLROnPlateau", made)))
        script.imports.add(f"from torch.optim.lr_scheduler import {', '.join(names)}")
        script.setup.append(f"scheduler = {made}")
        script.others["scheduler"] = "scheduler"
        script.kept["scheduler"] = "scheduler.state_dict()"
    if plan["scaler"] != "none":
        script.setup.append('scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)')
        script.others["scaler"] = "scaler"
        script.kept["scaler"] = "scaler.state_dict()"
    if ema.startswith("averaged"):
        script.imports.add("from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn")
        buffers = ", use_buffers=True" if ema == "averaged-buffers" else ""
        script.setup.append(f"ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9){buffers})")
    elif ema != "none":
        script.imports.add("import copy")
        script.setup.append("ema = copy.deepcopy(net).requires_grad_(False)")
    if ema != "none":
        script.others["ema"] = "ema"
        script.kept["ema"] = "ema.state_dict()"
    for slot, name in (("per_rank", "running"), ("stateful", "normalizer")):
        if plan[slot] != "none":
            script.define(extras.RUNNING)
            script.setup.append(f"{name} = Running()")
            script.kept[name] = f"{name}.mean"
    if plan["per_rank"] != "none":
        script.others["per_rank"] = '{"running": running}'
    if plan["stateful"] != "none":
        script.others["normalizer"] = "normalizer"
    if plan["rng"] != "step":
        script.others["rng"] = '"preserve"'
    if plan["accumulate"] == "two":
        script.imports.add("import contextlib")
        script.others["accumulate"] = "2"


def _data(script: Script, plan: Plan) -> None:
    source = SOURCES[plan["data"]]
    script.imports |= set(source.imports)
    script.define(source.definitions)
    script.setup += source.setup
    if source.handed:
        script.others["data"] = source.handed


def _carried(script: Script, plan: Plan) -> None:
    if plan["draws"] != "none":
        script.imports |= set(extras.DRAWS[plan["draws"]][1])
        if plan["rng"] == "preserve":  # the streams are the script's own: seeded, or two runs would differ
            seeds = {"import numpy": "numpy.random.seed(0)", "import random": "random.seed(0)"}
            script.setup += [seeds[line] for line in extras.DRAWS[plan["draws"]][1]]
    if plan["carried"] == "none":
        return
    carried = extras.CARRIED[plan["carried"]]
    script.imports |= set(carried.imports)
    script.define(carried.definition)
    script.setup += carried.setup
    script.globals += carried.global_names
    if carried.kept:
        script.kept["carried"] = carried.kept


def _block(script: Script, plan: Plan) -> list[str]:
    """The lines inside `with step as batch`."""
    lines: list[str] = []
    if plan["accumulate"] == "two" and plan["data"] == "own":
        unpack = SOURCES["own"].unpack.partition(" = ")[2]
        lines += ["batch = [tuple(part) for part in 2 * [list(" + unpack[1:-1] + ")]]"]
    elif plan["accumulate"] == "one":
        lines += [SOURCES[plan["data"]].unpack, *on_input(plan)]
    if plan["accumulate"] == "two":
        lines.append("x, y = batch[0]")
    lines.append('here(job, step, "start")')
    lines += extras.HOOKS.get(plan["hooks"], ())
    if plan["flags"] == "freeze-until":
        lines.append("net.first.requires_grad_(step.number >= 4)")
    if plan["flags"] == "freeze-batchnorm":
        lines.append("net.norm.train(step.number < 4)")
    if plan["shape"] == "momentum":
        lines += [
            "with torch.no_grad():",
            "    for kept, p in zip(key.parameters(), net.parameters()):",
            "        kept.mul_(0.9).add_(p, alpha=0.1)",
            'here(job, step, "moved")',
        ]
    lines += extras.TWEAKS_BEFORE_FORWARD.get(plan["tweak"], ())
    lines += _objects(plan)
    evaluation = _evaluation(plan)
    if plan["evaluate"] in ("in-block", "collective"):
        lines += evaluation
    lines += _collective_before(plan)
    lines += _step_with_preparations(plan)
    lines.append('here(job, step, "after-write")')
    if plan["hooks"] == "handle":
        lines.append("handle.remove()")
    lines += _after_writes(plan)
    if plan["evaluate"] == "after-write":
        lines += evaluation
    if plan["report"] == "after":
        lines.append("step.report(loss)")
    lines.append('here(job, step, "end")')
    return lines


def _objects(plan: Plan) -> list[str]:
    lines = []
    if plan["per_rank"] != "none":
        lines.append("running.add(x.abs().mean().item())")
    if plan["stateful"] != "none":
        lines += ["level = x.abs().mean()", "dist.all_reduce(level)", "normalizer.add(level.item() / job.world_size)"]
    return lines


def _collective_before(plan: Plan) -> list[str]:
    kind = plan["before"]
    if kind == "async":
        return ["early = x.abs().mean()", "early_work = dist.all_reduce(early, async_op=True)"]
    return list(extras.COLLECTIVES.get(kind, ()))


def _step_with_preparations(plan: Plan) -> list[str]:
    """Forward to last write, with what people put just before a write."""
    body = step_body(plan)
    prepared: list[str] = []
    if plan["before"] == "async":
        prepared += ["early_work.wait()", "step.report(early=early)"]
    if plan["report"] == "before":
        prepared.append("step.report(loss)")
    if plan["schedule"] == "edit-before":
        prepared.append('optimizer.param_groups[0]["lr"] = 0.05 / (1 + step.number)')
    prepared += extras.TWEAKS_BEFORE_WRITE.get(plan["tweak"], ())
    if plan["schedule"] == "plateau":
        prepared += ["measured = loss.detach().clone()", "dist.all_reduce(measured)"]
    if plan["carried"] != "none" and plan.seed % 2 and not _passes_inside(plan):
        prepared += ["value = loss.item()", *extras.CARRIED[plan["carried"]].update]
    if plan["after"] == "async":
        prepared += ["late = loss.detach().clone()", "late_work = dist.all_reduce(late, async_op=True)"]
    at = next((i for i, line in enumerate(body) if line.strip() == 'here(job, step, "before-write")'), None)
    if at is None or body[at].startswith(" "):  # the update is inside a closure, a loop or a condition
        return [*body, *prepared]
    return [*body[: at + 1], *prepared, *body[at + 1 :]]


def _passes_inside(plan: Plan) -> bool:
    return plan["optimizer"] in ("lbfgs", "closure")


def _after_writes(plan: Plan) -> list[str]:
    lines: list[str] = []
    if plan["middle"] == "async" and plan["shape"] != "actor-critic":
        lines.append("work.wait()")
    if plan["after"] == "all-reduce":
        lines += ["late = loss.detach().clone()", "dist.all_reduce(late)"]
    if plan["after"] == "async":
        lines.append("late_work.wait()")
    if plan["after"] == "barrier":
        lines.append("dist.barrier()")
    late = plan["after"] in ("all-reduce", "async")
    if late:
        lines.append("step.report(late=late)")
    lines += extras.TWEAKS_AFTER_WRITE.get(plan["tweak"], ())
    if plan["ema"].startswith("averaged"):
        lines.append("ema.update_parameters(net)")
    elif plan["ema"] == "hand-data":
        lines += [
            "for kept, p in zip(ema.parameters(), net.parameters()):",
            "    kept.data = 0.9 * kept.data + 0.1 * p.data",
        ]
    elif plan["ema"] == "hand-inplace":
        lines += [
            "with torch.no_grad():",
            "    for kept, p in zip(ema.parameters(), net.parameters()):",
            "        kept.mul_(0.9).add_(p, alpha=0.1)",
        ]
    if plan["ema"].startswith("hand"):
        lines += ["for kept, b in zip(ema.buffers(), net.buffers()):", "    kept.data.copy_(b.data)"]
    if plan["schedule"] == "edit-after":
        lines += ["for group in optimizer.param_groups:", '    group["lr"] *= 0.95']
    elif plan["schedule"] == "plateau":
        lines.append("scheduler.step(measured)")
    elif plan["schedule"] in extras.SCHEDULES:
        lines.append("scheduler.step()")
    if plan["carried"] != "none" and (plan.seed % 2 == 0 or _passes_inside(plan)):
        value = "late.item() / job.world_size" if late else "loss.item()"
        lines += [f"value = {value}", *extras.CARRIED[plan["carried"]].update]
    return lines


def _evaluation(plan: Plan) -> list[str]:
    lines = [
        "net.eval()",
        'here(job, step, "evaluation")',
        "with torch.no_grad():",
        "    accuracy = (net(x).argmax(1) == y).float().mean()",
        *(("dist.all_reduce(accuracy)",) if plan["evaluate"] == "collective" else ()),
        "net.train()",
    ]
    if plan["evaluate"] != "between":
        lines.append("step.report(accuracy=accuracy)")
    return ["if step.number % 3 == 1:", *(f"    {line}" for line in lines)]


def _between(plan: Plan) -> list[str]:
    lines: list[str] = []
    if plan["between"] == "print":
        lines += ["if step.committed:", '    print(f"step {step.number}: loss {loss.item():.4f}")']
    if plan["between"] == "draws":
        lines += ["if step.committed:", "    torch.randn(3)"]
    if plan["between"] == "best":
        lines += ["if step.committed and step.number % 4 == 3:", "    best = copy.deepcopy(net.state_dict())"]
    if plan["evaluate"] == "between":
        evaluation = _evaluation(plan)
        lines += ["if step.committed and step.number % 3 == 1:", *evaluation[1:]]
    return lines


def _without_unused(text: str) -> str:
    """Imports that the blocks did not need after all are left out, and one that a block forgot is added."""
    if "copy.deepcopy" in text and "import copy\n" not in text:
        text = text.replace("import hashlib\n", "import copy\nimport hashlib\n", 1)
    if "contextlib." not in text:
        text = text.replace("import contextlib\n", "")
    if "dist." not in text:
        text = text.replace("import torch.distributed as dist\n", "")
    return text if "F." in text else text.replace("import torch.nn.functional as F\n", "")
