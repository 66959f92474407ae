"""Extras of composed scripts besides forward, backward and write: lines by slot and option."""

from dataclasses import dataclass, field

_METER = """
def make_meter():
    mean = 1.0

    def meter(value):
        nonlocal mean
        mean = 0.9 * mean + 0.1 * value
        return mean

    return meter
"""
_TRAINER = """
class Trainer:
    def __init__(self):
        self.mean = 1.0
"""
_HOLDER = """
class Holder:
    def __init__(self, net):
        self.net = net
        self.lowest = float("inf")
        self.best = []

    def keep(self, value):
        if value < self.lowest:
            self.lowest = value
            self.best = self.best[-1:] + [self.net.last.bias]

    def size(self):
        return sum(one.detach().abs().mean() for one in self.best)
"""
_READER = """
class Reader:
    def __init__(self, rank):
        self.rank, self.place = rank, 2 * rank
"""
RUNNING = """
class Running:
    def __init__(self):
        self.mean = 0.0

    def add(self, value):
        self.mean = 0.9 * self.mean + 0.1 * value

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]
"""
COUNT_CALLS = """
def count_calls(calls):
    def hook(module, inputs, output):
        if module.training:
            calls["number"] += 1
        return output * (1 + calls["number"] / 1000)

    return hook
"""
AVERAGE = """
def average_gradients(net):
    for p in net.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
"""
AVERAGE_FLAT = """
def average_gradients(net):
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient) / dist.get_world_size())
"""


@dataclass(frozen=True)
class Carried:
    """State that the script itself carries from step to step."""

    setup: tuple[str, ...]
    update: tuple[str, ...] = ()  # may use `value`, a number of this step
    on_input: tuple[str, ...] = ()
    on_loss: tuple[str, ...] = ()
    kept: str = ""
    imports: tuple[str, ...] = ()
    definition: str = ""
    global_names: tuple[str, ...] = field(default=())


CARRIED = {
    "running-mean": Carried(
        ("mean = 1.0",), ("mean = 0.9 * mean + 0.1 * value",), on_loss=("loss = loss / (1 + mean)",), kept="mean"
    ),
    "deque": Carried(
        ("recent = collections.deque(maxlen=4)",),
        ("recent.append(value)",),
        on_loss=("loss = loss / (1 + sum(recent))",),
        kept="list(recent)",
        imports=("import collections",),
    ),
    "counter": Carried(("seen = 0",), ("seen += len(x)",), on_loss=("loss = loss * (1 + seen / 1000)",), kept="seen"),
    "numpy-generator": Carried(
        ("noise = numpy.random.default_rng(7)",),
        on_input=("x = x + 0.1 * float(noise.normal())",),
        kept="noise.bit_generator.state",
        imports=("import numpy",),
    ),
    "torch-generator": Carried(
        ("noise = torch.Generator().manual_seed(7)",),
        on_input=("x = x + 0.1 * torch.randn(x.shape, generator=noise)",),
        kept="noise.get_state()",
    ),
    "attribute": Carried(
        ("trainer = Trainer()",),
        ("trainer.mean = 0.9 * trainer.mean + 0.1 * value",),
        on_loss=("loss = loss / (1 + trainer.mean)",),
        kept="trainer.mean",
        definition=_TRAINER,
    ),
    "global": Carried(
        (),
        ("total += value",),
        on_loss=("loss = loss / (1 + total)",),
        kept="total",
        definition="total = 0.0\n",
        global_names=("total",),
    ),
    "tensor": Carried(
        ("centre = torch.zeros(12)",),
        ("centre = 0.9 * centre + 0.1 * x.mean(0)",),
        on_input=("x = x - centre",),
        kept="centre",
    ),
    "list": Carried(
        ("history = []",),
        ("history.append(value)",),
        on_loss=("loss = loss / (1 + sum(history[-3:]))",),
        kept="history",
    ),
    "dict": Carried(
        ('meters = {"loss": 1.0}',),
        ('meters["loss"] = 0.9 * meters["loss"] + 0.1 * value',),
        on_loss=('loss = loss / (1 + meters["loss"])',),
        kept="meters",
    ),
    # Names of the script's own for parts of what was handed over, and values found by such parts.
    "part": Carried(
        ("favourite = None",),
        ("if step.number % 3 == 1:", "    favourite = list(net.parameters())[step.number % 2]"),
        on_loss=("if favourite is not None:", "    loss = loss * (1 + favourite.detach().abs().mean())"),
    ),
    "layer": Carried(
        ("layer = net",),
        ("if step.number % 3 == 2:", "    layer = list(net.modules())[-1 - step.number % 2]"),
        on_loss=("loss = loss * (1 + sum(p.detach().abs().mean() for p in layer.parameters()) / 10)",),
    ),
    "best-state": Carried(
        ('lowest, lowest_state = float("inf"), {}',),
        ("if value < lowest:", "    lowest, lowest_state = value, net.state_dict()"),
        on_loss=("loss = loss * (1 + sum(one.float().abs().mean() for one in lowest_state.values()) / 100)",),
        kept="lowest_state",
    ),
    "best-state-shown": Carried(
        ('lowest, lowest_state = float("inf"), None',),
        ("if value < lowest:", "    lowest, lowest_state = value, net.state_dict()"),
        kept="lowest_state",
    ),
    "best-copy": Carried(
        ('lowest, lowest_state = float("inf"), {}',),
        ("if value < lowest:", "    lowest, lowest_state = value, copy.deepcopy(net.state_dict())"),
        on_loss=("loss = loss * (1 + sum(one.float().abs().mean() for one in lowest_state.values()) / 100)",),
        kept="lowest_state",
        imports=("import copy",),
    ),
    "view": Carried(
        ("window = None",),
        ("if step.number == 2:", "    window = next(net.parameters()).data.view(-1)[1:4]"),
        on_loss=("if window is not None:", "    loss = loss * (1 + window.abs().mean())"),
    ),
    "optimizer-state": Carried(
        ("kept_state = {}",),
        (
            "if step.number % 2:",
            '    states = getattr(optimizer, "state", {})',
            "    kept_state = next((state for state in states.values() if state), {})",
        ),
        on_loss=(
            "for one in kept_state.values():",
            "    if torch.is_tensor(one):",
            "        loss = loss * (1 + one.float().abs().mean() / 100)",
        ),
    ),
    "by-parameter": Carried(
        ("averages = {p: torch.zeros_like(p) for p in net.parameters()}",),
        ("for p in net.parameters():", "    averages[p] = 0.9 * averages[p] + 0.1 * p.detach()"),
        on_loss=("loss = loss * (1 + sum(one.abs().mean() for one in averages.values()) / 10)",),
    ),
    "holder": Carried(
        ("holder = Holder(net)",),
        ("holder.keep(value)",),
        on_loss=("loss = loss * (1 + holder.size() / 10)",),
        definition=_HOLDER,
    ),
    # Made from the rank before the loop.
    "of-rank": Carried(("offset = 0.1 * (job.rank + 1)",), on_input=("x = x + offset",), kept="offset"),
    "reader-of-rank": Carried(
        ("reader = Reader(job.rank)",),
        ("reader.place += 1",),
        on_input=("x = x * (1 + (reader.rank + reader.place % 3) / 100)",),
        kept="(reader.rank, reader.place)",
        definition=_READER,
    ),
    "closure": Carried(
        ("meter = make_meter()",), on_loss=("loss = loss / (1 + meter(loss.item()))",), definition=_METER
    ),
}

DRAWS = {
    "torch": (("x = x + 0.1 * torch.randn_like(x)",), ()),
    "numpy": (("x = x * (1 + 0.1 * float(numpy.random.random()))",), ("import numpy",)),
    "random": (("x = x * (1 + 0.1 * random.random())",), ("import random",)),
    "all": (
        ("x = x + 0.1 * torch.rand(12) * random.random() * float(numpy.random.random())",),
        ("import numpy", "import random"),
    ),
}

SCHEDULES = {
    "step": "StepLR(optimizer, 3, gamma=0.5)",
    "cosine": "CosineAnnealingLR(optimizer, 12)",
    "one-cycle": "OneCycleLR(optimizer, max_lr=0.1, total_steps=14, "
    "cycle_momentum=bool(optimizer.defaults.keys() & {'momentum', 'betas'}))",
    "plateau": "ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.1)",
    "sequential": "SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=3), "
    "ExponentialLR(optimizer, 0.9)], milestones=[3])",
    "lambda": "LambdaLR(optimizer, lambda number: 1 / (1 + number))",
}

COLLECTIVES = {
    "all-reduce": ("size = x.abs().mean()", "dist.all_reduce(size)", "step.report(size=size)"),
    "all-gather": (
        "sizes = [torch.zeros(()) for _ in range(job.world_size)]",
        "dist.all_gather(sizes, x.abs().mean())",
        "step.report(largest=max(sizes))",
    ),
    "broadcast": ("first = x[0].clone()", "dist.broadcast(first, 0)", "step.report(first=first.mean())"),
}

HOOKS = {
    "handle": ("handle = net.last.register_forward_hook(lambda module, inputs, output: output * 0.9)",),
    "late": (
        "if step.number == 4:",
        "    net.last.register_forward_hook(lambda module, inputs, output: output * 0.9)",
    ),
}

TWEAKS_BEFORE_FORWARD = {
    "clamp-before": ("with torch.no_grad():", "    for p in net.parameters():", "        p.clamp_(-0.5, 0.5)"),
}
TWEAKS_BEFORE_WRITE = {
    "decay-before": ("with torch.no_grad():", "    for p in net.parameters():", "        p.mul_(0.995)"),
}
TWEAKS_AFTER_WRITE = {
    "clamp-after": ("for p in net.parameters():", "    p.data.clamp_(-0.5, 0.5)"),
    "noise-after": (
        "drawn = torch.Generator().manual_seed(step.number)",
        "with torch.no_grad():",
        "    for p in net.parameters():",
        "        p.add_(0.001 * torch.randn(p.shape, generator=drawn))",
    ),
    "prune-after": (
        "if step.number in (4, 6):",
        "    with torch.no_grad():",
        "        for p in net.parameters():",
        "            p.mul_(p.abs() > 0.05)",
    ),
    "data-swap": ("for p in net.parameters():", "    p.data = p.data * 0.999"),
}
