"""A script under construction: its sections, and what it hands over to `relight.Training`."""

import textwrap
from dataclasses import dataclass, field

_HEAD = '''"""Composed by tests/idioms/compose.py: {description}.

STRIKES names places at which a rank dies, as RANK.STEP.PLACE; STRUCK a directory for marks, so that each strikes once.
"""
'''

_HERE = '''
def here(job, step, place):
    """Die here if STRIKES says so, once."""
    mark = f"{job.rank}.{step.number}.{place}"
    if not step.warmup and mark in os.environ.get("STRIKES", "").split():
        try:
            os.mkdir(os.path.join(os.environ["STRUCK"], mark))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
'''

_DIGEST = '''
def feed(sha, value):
    if isinstance(value, torch.Tensor):
        sha.update(f"{value.dtype} {list(value.shape)}".encode())
        sha.update(value.detach().contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            sha.update(repr(key).encode())
            feed(sha, value[key])
    elif isinstance(value, (list, tuple)):
        for part in value:
            feed(sha, part)
    else:
        sha.update(repr(value).encode())


def digest(**values):
    """The bits of each value."""
    found = {}
    for name, value in values.items():
        sha = hashlib.sha256()
        feed(sha, value)
        found[name] = sha.hexdigest()[:12]
    return found
'''


@dataclass
class Script:
    """Lines of a script, without their place in it."""

    imports: set[str] = field(default_factory=set)
    definitions: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    models: dict[str, str] = field(default_factory=dict)  # names and expressions that are handed over
    optimizers: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    block: list[str] = field(default_factory=list)  # inside `with step as batch`
    between: list[str] = field(default_factory=list)  # after it
    kept: dict[str, str] = field(default_factory=dict)  # what is digested at the end, by name
    globals: list[str] = field(default_factory=list)  # names that `main` declares global

    def define(self, text: str) -> None:
        """A function or class, once."""
        if text.strip() and text not in self.definitions:
            self.definitions.append(text)

    def text(self, description: str, *, steps: int, in_main: bool) -> str:
        """The whole script."""
        body = [
            *((f"global {', '.join(self.globals)}",) if self.globals and in_main else ()),
            "torch.set_num_threads(1)",
            "job = relight.init()",
            "torch.manual_seed(0)",
            "inputs = torch.randn(40 * job.world_size, 12)",
            "labels = torch.randint(0, 4, (40 * job.world_size,))",
            *self.setup,
            *self._training(),
            f"for step in training.steps(until={steps}):",
            "    with step as batch:",
            *_indent(self.block, 8),
            *_indent(self.between, 4),
            *self._end(),
        ]
        whole = [*_indent(body, 4)] if in_main else body
        plain = {"import hashlib", "import os", "import signal", "import torch", "import relight", *self.imports}
        sections = [
            _HEAD.format(description=description),
            "\n".join(sorted(line for line in plain if line.startswith("import"))),
            "\n".join(sorted(line for line in plain if not line.startswith("import"))),
            *("\n" + text.strip("\n") + "\n" for text in (_HERE, _DIGEST, *self.definitions)),
            "\n" + "\n".join(["def main():", *whole, "", "", 'if __name__ == "__main__":', "    main()"])
            if in_main
            else "\n" + "\n".join(whole),
        ]
        return "\n".join(section for section in sections if section) + "\n"

    def _training(self) -> list[str]:
        arguments = [
            f"model={_handed(self.models)}",
            f"optimizer={_handed(self.optimizers)}",
            *(f"{name}={expression}" for name, expression in self.others.items()),
        ]
        return ["training = relight.Training(", *(f"    {argument}," for argument in arguments), ")"]

    def _end(self) -> list[str]:
        values = [f"    {name}={expression}," for name, expression in self.kept.items()]
        return ["found = digest(", *values, ")", 'print(f"digest rank={job.rank} {found}", flush=True)']


def _handed(things: dict[str, str]) -> str:
    if len(things) == 1:
        return next(iter(things.values()))
    return "{" + ", ".join(f'"{name}": {expression}' for name, expression in things.items()) + "}"


def _indent(lines: list[str], by: int) -> list[str]:
    return textwrap.indent("\n".join(lines), " " * by).splitlines()
