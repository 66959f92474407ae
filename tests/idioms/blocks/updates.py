"""Writes of parameters in composed scripts: the optimizer's setup, and the lines that use it."""

from tests.idioms.blocks.plan import Plan
from tests.idioms.blocks.script import Script

_DESCENT = """
class Descent:
    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        self.velocity = [torch.zeros_like(p) for p in self.parameters]
        self.lr = lr

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p, v in zip(self.parameters, self.velocity):
            if p.grad is not None:
                v.mul_(0.9).add_(p.grad)
                p.sub_(self.lr * v)

    def state_dict(self):
        return {"velocity": self.velocity}

    def load_state_dict(self, state):
        for v, found in zip(self.velocity, state["velocity"]):
            v.copy_(found)
"""

_ONE_LINE = {
    "sgd": "torch.optim.SGD(parameters, lr=0.05)",
    "sgd-momentum": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)",
    "adamw": "torch.optim.AdamW(parameters, lr=0.01)",
    "rmsprop": "torch.optim.RMSprop(parameters, lr=0.005, momentum=0.9)",
    "adagrad": "torch.optim.Adagrad(parameters, lr=0.05)",
    "lbfgs": "torch.optim.LBFGS(parameters, lr=0.1, max_iter=2, tolerance_change=0, tolerance_grad=0)",
    "sam": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9)",
    "closure": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9)",
    "lookahead": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9)",
    "own-class": "Descent(parameters, lr=0.05)",
}
_BY_DIMENSIONS = (
    "matrices = [p for p in parameters if p.ndim >= 2]",
    "vectors = [p for p in parameters if p.ndim < 2]",
)


def make_optimizer(script: Script, plan: Plan) -> None:
    """Make the optimizer that updates `net`."""
    kind = plan["optimizer"]
    if plan["shape"] == "two-heads":
        script.setup += [
            'parameters = [p for name, p in net.named_parameters() if not name.startswith("last")]',
            "head_optimizer = torch.optim.SGD(net.last.parameters(), lr=0.02)"
            if plan["net"] != "tied"
            else "head_optimizer = torch.optim.SGD([net.last.bias], lr=0.02)",
        ]
        script.kept["head_optimizer"] = "head_optimizer.state_dict()"
    else:
        script.setup.append("parameters = list(net.parameters())")
    if kind == "hand":
        return
    if kind == "hand-momentum":
        script.setup.append("velocity = [torch.zeros_like(p) for p in parameters]")
        script.kept["velocity"] = "velocity"
        return
    if kind == "groups":
        script.setup += [
            *_BY_DIMENSIONS,
            'groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.005}]',
            "optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)",
        ]
    elif kind == "two-optimizers":
        script.setup += [
            *_BY_DIMENSIONS,
            "optimizer = torch.optim.SGD(matrices, lr=0.05, momentum=0.9)",
            "vector_optimizer = torch.optim.AdamW(vectors, lr=0.01)",
        ]
        script.kept["vector_optimizer"] = "vector_optimizer.state_dict()"
    else:
        script.setup.append(f"optimizer = {_ONE_LINE[kind]}")
    if kind == "own-class":
        script.define(_DESCENT)
    if kind == "lookahead":
        script.imports.add("import copy")
        script.setup.append("slow = copy.deepcopy(net).requires_grad_(False)")
        script.kept["slow"] = "slow.state_dict()"
        script.models["slow"] = "slow"
    script.optimizers["optimizer"] = "optimizer"
    script.kept["optimizer"] = "optimizer.state_dict()"
    if kind == "two-optimizers":
        script.optimizers["vectors"] = "vector_optimizer"
    if plan["shape"] == "two-heads":
        script.optimizers["head"] = "head_optimizer"


def zero_gradients(plan: Plan) -> list[str]:
    """Set the gradients of `net` to zero: by its optimizer where there is one."""
    if plan["optimizer"] in ("hand", "hand-momentum", "two-optimizers") or plan["shape"] == "two-heads":
        return ["net.zero_grad()"]
    return ["optimizer.zero_grad()"]


def update(plan: Plan, passes: list[str]) -> list[str]:
    """Forward, backward (these are `passes`) and the write of `net`."""
    kind = plan["optimizer"]
    here = 'here(job, step, "before-write")'
    if kind in ("lbfgs", "closure"):
        return [
            "",
            "def closure():",
            "    optimizer.zero_grad()",
            *(f"    {line}" for line in passes),
            "    return loss",
            "",
            "loss = optimizer.step(closure)",
        ]
    if kind == "sam":
        return [
            *passes,
            "with torch.no_grad():",
            "    norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()",
            "    moves = [0.05 * (p.grad if p.grad is not None else 0 * p) / (norm + 1e-6) for p in parameters]",
            "    for p, move in zip(parameters, moves):",
            "        p.add_(move)",
            "optimizer.zero_grad()",
            'here(job, step, "moved")',
            *passes,
            "with torch.no_grad():",
            "    for p, move in zip(parameters, moves):",
            "        p.sub_(move)",
            here,
            "optimizer.step()",
        ]
    return [*passes, here, *_write(plan, kind)]


def _write(plan: Plan, kind: str) -> list[str]:
    if kind == "hand" and plan.seed % 2:
        return ["for p in parameters:", "    if p.grad is not None:", "        p.data.add_(p.grad, alpha=-0.05)"]
    if kind == "hand":
        return [
            "with torch.no_grad():",
            "    for p in parameters:",
            "        if p.grad is not None:",
            "            p -= 0.05 * p.grad",
        ]
    if kind == "hand-momentum":
        return [
            "with torch.no_grad():",
            "    for p, v in zip(parameters, velocity):",
            "        if p.grad is not None:",
            "            v.mul_(0.9).add_(p.grad)",
            "            p.sub_(0.05 * v)",
        ]
    names = ["optimizer", *(["vector_optimizer"] if kind == "two-optimizers" else [])]
    if plan["scaler"] != "none":
        lines = [*(f"scaler.step({name})" for name in names), "scaler.update()"]
    else:
        lines = [f"{name}.step()" for name in names]
    if plan["shape"] == "two-heads":
        lines += ["if step.number % 3 == 2:", '    here(job, step, "middle")', "    head_optimizer.step()"]
    if kind == "lookahead":
        lines += [
            "if step.number % 3 == 2:",
            '    here(job, step, "middle")',
            "    for kept, p in zip(slow.parameters(), parameters):"
            if plan["shape"] != "two-heads"
            else "    for kept, p in zip(slow.parameters(), net.parameters()):",
            "        kept.data.lerp_(p.data, 0.5)",
            "        p.data.copy_(kept.data)",
        ]
    return lines
