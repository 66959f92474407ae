"""Writes CLI.md, the reference of all commands and options, from the argument parsers. With --check, says whether it is
current.

    python docs/cli_page.py [--check]
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from made_page import write_or_check

from relight.chaos.plan import ACTION_WORDS, EXAMPLES, POINT_WORDS
from relight.cli import make_parser

PAGE = Path(__file__).with_name("CLI.md")
BASE = "relight run"  # its options are explained once; other commands that have them refer to it

INTRODUCTION = """\
<!-- Written by docs/cli_page.py from the argument parsers; change the help texts there, and run it. -->
# Commands

After this page you know every command and every option of `relight`. The same texts are in `relight COMMAND --help`.
"""

VARIABLES = """\
## Environment variables

| variable | read by | means |
|---|---|---|
| `RELIGHT_TOKEN_FILE` | `run`, `agent`, `controller` | default of `--token-file` |
| `RELIGHT_TLS_CA`, `RELIGHT_TLS_CERT`, `RELIGHT_TLS_KEY` | the same | defaults of the options `--tls-...` |
| `RELIGHT_HOST_ADDRESS` | `run`, `agent` | [this host's address for others](OPERATING.md#addresses-between-hosts) |
| `RELIGHT_MACHINE` | `run`, `agent` | the cluster's name for this machine; default: Slurm's, or the host name |
| `PET_NNODES`, `PET_NODE_RANK`, `PET_MASTER_ADDR`, ... | `run` | defaults of these options, as for torchrun |
| those of Slurm, Kubernetes, MPI, Ray | `run` | [with `--nnodes auto`](CLUSTERS.md#which-variables-are-read) |
| `OMP_NUM_THREADS` | workers | threads of torch; 1 unless you set it, in jobs of two ranks or more |
| `PYTHONHASHSEED` | workers | the order of sets of strings, equal in a replacement; 0 unless you set a number |

A worker finds the variables of torchrun: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `GROUP_RANK`,
`GROUP_WORLD_SIZE`, `ROLE_RANK`, `ROLE_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_RESTART_COUNT` (always
0) and `TORCHELASTIC_RUN_ID` (the job's name). A standby shows itself as the last rank; when it takes a rank, relight
updates `RANK` and `LOCAL_RANK`. Prefer `job.rank`.
"""


def render() -> str:
    """The text of the page."""
    parsers = list(find_commands(make_parser()))
    shared = {help_of(parser, action): BASE for name, parser in parsers if name == BASE for action in options(parser)}
    rows = "".join(f"| [`{name}`](#{name.replace(' ', '-')}) | {cell(text)} |\n" for name, text in summaries())
    page = [INTRODUCTION, f"| command | does |\n|---|---|\n{rows}"]
    page += [render_command(name, parser, {} if name == BASE else shared) for name, parser in parsers]
    return "\n".join([*page, render_faults(), VARIABLES])


def render_faults() -> str:
    """The words of `--chaos`: what happens, and where."""
    lines = ["## Faults", "", "The words of `--chaos SENTENCE`; `relight chaos --explain` prints them.", ""]
    for title, words in (("action", ACTION_WORDS), ("point", POINT_WORDS)):
        lines += [f"| {title} | means |", "|---|---|"]
        lines += [f"| `{word.value}` | {cell(text)} |" for word, text in words.items()]
        lines.append("")
    return "\n".join([*lines, "```text", *EXAMPLES, "```", ""])


def find_commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command that does something, with its full name."""
    for action in subcommands(parser):
        for child in action.choices.values():
            if list(subcommands(child)):
                yield from find_commands(child)
            else:
                yield child.prog, child


def summaries() -> Iterator[tuple[str, str]]:
    """Yield the name and the one line of each command that does something."""
    yield from _summaries(make_parser())


def _summaries(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in subcommands(parser):
        for entry in action._choices_actions:
            child = action.choices[entry.dest]
            if list(subcommands(child)):
                yield from _summaries(child)
            else:
                yield child.prog, entry.help or ""


def subcommands(parser: argparse.ArgumentParser) -> "Iterator[argparse._SubParsersAction[argparse.ArgumentParser]]":
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield action


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options and positional arguments of a command, without --help."""
    return [a for a in parser._actions if a.help != argparse.SUPPRESS and not isinstance(a, argparse._HelpAction)]


def render_command(name: str, parser: argparse.ArgumentParser, shared: dict[str, str]) -> str:
    """A section: usage, what the command does, and a table for each group of options."""
    formatter = argparse.HelpFormatter(prog=name, width=120)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    lines = [f"## {name}", ""]
    if parser.description:
        lines += [*(line.strip() for line in parser.description.strip().splitlines()), ""]
    lines += ["```", *formatter.format_help().rstrip().removeprefix("usage: ").splitlines(), "```", ""]
    elsewhere = []
    for group in parser._action_groups:
        own = [a for a in group._group_actions if a in options(parser)]
        elsewhere += [a for a in own if help_of(parser, a) in shared]
        own = [a for a in own if a not in elsewhere]
        if own:
            is_named = group.title not in ("options", "positional arguments", "optional arguments")
            lines += [f"**{(group.title or '').capitalize()}**", ""] if is_named else []
            lines += ["| argument | meaning |", "|---|---|"]
            lines += [f"| {spelling(a)} | {cell(meaning(parser, a))} |" for a in own]
            lines.append("")
    if elsewhere:
        listed = ", ".join(f"`{long_name(a)}`" for a in elsewhere)
        lines += [f"As for [`{BASE}`](#{BASE.replace(' ', '-')}): {listed}.", ""]
    if parser.epilog and name != BASE and "a script needs these lines" not in parser.epilog:
        lines += ["```text", *parser.epilog.strip().splitlines(), "```", ""]
    return "\n".join(lines)


def spelling(action: argparse.Action) -> str:
    """All names of an argument, with its value."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = "" if action.nargs == 0 else f" {action.metavar or ('{' + ','.join(action.choices or ()) + '}')}"
    if action.nargs != 0 and not action.metavar and not action.choices:
        value = f" {action.dest.upper()}"
    return ", ".join(f"`{name}{value}`" for name in names(action))


def names(action: argparse.Action) -> list[str]:
    """The names of an option, without torchrun's spelling with underscores."""
    return [n for n in action.option_strings if "_" not in n]


def long_name(action: argparse.Action) -> str:
    return next((name for name in names(action) if name.startswith("--")), str(action.metavar or action.dest))


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return f"{action.option_strings} {meaning(parser, action)}"


def meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def cell(text: str) -> str:
    """Text in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def spellings(parser: argparse.ArgumentParser) -> Iterable[str]:
    """Every option that a parser knows, torchrun's spellings too."""
    return [name for action in options(parser) for name in action.option_strings]


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], PAGE, render()))
