"""Writes MESSAGES.md, the reference of events, commands and actions, from their docstrings. With --check, says whether
it is current.

    python docs/messages_page.py [--check]
"""

import dataclasses
import enum
import importlib
import inspect
import sys
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import msgspec
from made_page import write_or_check

import relight.core

PAGE = Path(__file__).with_name("MESSAGES.md")
CORE = Path(relight.core.__file__).parent
KINDS = ("events", "commands", "actions")  # the names of files of the core that define messages
OTHERS = {  # machines outside of the core, whose files define more than messages: the unions to show
    "relight.agent.decisions.host": {"Event": "Events of the agent", "Action": "Actions of the agent"},
    "relight.transfer.plan.update.orders": {"Order": "Orders of a weight update"},
}

INTRODUCTION = """\
<!-- Written by docs/messages_page.py from the docstrings in src/relight; change them there, and run it. -->
# Messages

After this page you can read a `journal.jsonl` line by line. The core takes events (what happened) and answers with
commands or actions (what to do). [The recovery protocol](PROTOCOL.md) shows which event leads to which command.
`relight events` has a schema of its own, which is stable ([Watching](WATCHING.md#events-for-programs)); these messages
change with relight. The last sections are those of two smaller machines, which keep no journal.
"""


def render() -> str:
    """The text of the page."""
    return "\n".join([INTRODUCTION, *(render_table(title, path, messages) for title, path, messages in sections())])


def sections() -> Iterator[tuple[str, str, list[type]]]:
    """Yield each section: its title, the file that defines its messages, and these."""
    for module in find_modules():
        yield title_of(module), path_of(module), find_messages(module)
    for name, unions in OTHERS.items():
        module = importlib.import_module(name)
        for union, title in unions.items():
            yield title, path_of(module), list(typing.get_args(vars(module)[union]))


def find_modules() -> list[ModuleType]:
    """The modules of the core that define messages; those of the controller first."""
    paths = sorted(CORE.rglob("*.py"), key=lambda path: (path.parent.name != "protocol", path.stem != "events", path))
    return [
        importlib.import_module(".".join(("relight", "core", *path.relative_to(CORE).with_suffix("").parts)))
        for path in paths
        if path.stem in KINDS
    ]


def find_messages(module: ModuleType) -> list[type]:
    """The public classes that a module defines, in the order of the file."""
    return [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and not issubclass(value, enum.Enum)
    ]


def path_of(module: ModuleType) -> str:
    """A module's file, from src/relight."""
    return module.__name__.removeprefix("relight.").replace(".", "/") + ".py"


def render_table(title: str, path: str, messages: Iterable[type]) -> str:
    """A section with a table of messages."""
    lines = [f"## {title}", "", f"Defined in `{path}`.", "", "| name | means | fields |", "|---|---|---|"]
    for message in messages:
        text = cell(inspect.cleandoc(message.__doc__ or ""))
        named = ", ".join(f"`{name}`" for name in fields_of(message))
        lines.append(f"| `{message.__name__}` | {text} | {named} |")
    return "\n".join([*lines, ""])


def title_of(module: ModuleType) -> str:
    """`core.protocol.events` are the controller's; `core.worker.actions` belong to the worker."""
    *_, folder, kind = module.__name__.split(".")
    return f"{kind.capitalize()} of the {'controller' if folder == 'protocol' else folder}"


def fields_of(message: type) -> tuple[str, ...]:
    if issubclass(message, msgspec.Struct):
        return message.__struct_fields__
    if dataclasses.is_dataclass(message):
        return tuple(field.name for field in dataclasses.fields(message))
    return ()


def cell(text: str) -> str:
    """Text in a cell of a table; a docstring that Python has made up counts as none."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], PAGE, render()))
