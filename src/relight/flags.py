"""Flags made of declared settings, those of `relight run` and `relight chaos`, and hints for wrong ones. No torch.

The flags of `relight run` are torchrun's where torchrun has them, so that a launch line can be kept.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from relight.wire.connection.tls import FLAGS, VARIABLES
from relight.wire.option import SettingOption, options_of
from relight.wire.settings import (
    BUDDIES,
    DETECTION,
    GIVING_UP,
    JOB,
    LAUNCH,
    STRAGGLERS,
    SUPPLY,
    VERIFICATION,
    JobSettings,
)

_OPTIONS = tuple(options_of(JobSettings))
Settings = TypeVar("Settings", bound=msgspec.Struct)
ADDRESS_HELP = (
    "serve the page at this address; default 127.0.0.1:7117, or another port if that one is taken. An address that "
    "others can reach is protected by a token in the printed URL"
)


# Names that scripts hardly use for anything else.
_RELIGHTS_OWN = frozenset(
    {"--nproc-per-node", "--nproc_per_node", "--nnodes", "--standby", "--rdzv-endpoint", "--rdzv_endpoint", "--chaos"}
)
_LOGS = "the output of every worker goes to RUN_DIR/logs, and to the terminal; drop it"
# Flags of torchrun that relight lacks, and what to do instead.
_TORCHRUN_FLAGS = {
    "--log-dir": "logs go to RUN_DIR/logs (--run-dir says where that is); drop it",
    "-r": _LOGS,
    "--redirects": _LOGS,
    "-t": _LOGS,
    "--tee": _LOGS,
    "--local-ranks-filter": _LOGS,
    "--logs-specs": _LOGS,
    "--local-addr": "a host's own address is found by itself, or by RELIGHT_HOST_ADDRESS; drop it",
    "--run-path": "give the Python file as SCRIPT; drop it",
    "--start-method": "every worker is a new Python process; drop it",
    "--virtual-local-rank": "each worker finds its own device in job.device; drop it",
    "--numa-binding": "relight binds no processes to NUMA nodes; drop it, or run relight itself under numactl",
    "--event-log-handler": "`relight events` prints a job's events; drop it",
    "--signals-to-handle": "SIGINT, SIGTERM and SIGHUP are handled; drop it",
    "--duplicate-stdout-filters": _LOGS,
    "--duplicate-stderr-filters": _LOGS,
}


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `relight run`."""
    parser.add_argument("script_and_arguments", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help=argparse.SUPPRESS)
    launch = parser.add_argument_group(LAUNCH)
    _add_launch_flags(launch)
    add_settings(launch, LAUNCH)
    _add_ignored_flags(launch)
    job = parser.add_argument_group(JOB)
    add_settings(job, JOB)
    _add_job_flags(job)
    for group in (DETECTION, VERIFICATION, BUDDIES, STRAGGLERS, SUPPLY, GIVING_UP):
        add_settings(parser.add_argument_group(group), group)
    _add_chaos_flags(parser.add_argument_group("faults on purpose"))


def add_waiting_flags(group: argparse._ArgumentGroup) -> None:
    """Add what every command that starts a job has: time-outs and buddy memory."""
    add_settings(group, DETECTION)
    add_settings(group, BUDDIES)


def add_settings(group: argparse._ArgumentGroup, of: str) -> None:
    """Add the flags of one group of the job's settings."""
    for setting in _OPTIONS:
        if setting.option.group == of:
            _add_setting(group, setting)


def add_options(parser: argparse.ArgumentParser, kind: type[msgspec.Struct]) -> None:
    """Add a flag for each option that a type of settings declares."""
    for setting in options_of(kind):
        _add_setting(parser, setting)


def add_setting(group: argparse._ArgumentGroup, field: str) -> None:
    """Add the flag of one of the job's settings."""
    (setting,) = [each for each in _OPTIONS if each.field == field]
    _add_setting(group, setting)


def _add_setting(group: argparse._ActionsContainer, setting: SettingOption) -> None:
    text = setting.help.replace("%", "%%")
    if setting.kind is bool:
        action = "store_false" if setting.option.inverted else "store_true"
        group.add_argument(*setting.flags, dest=setting.field, action=action, help=text)
        return
    group.add_argument(
        *setting.flags,
        dest=setting.field,
        type=setting.kind,
        default=None if setting.is_required else setting.default,
        required=setting.is_required,
        metavar=None if setting.choices else setting.option.metavar,
        choices=setting.choices or None,
        help=text,
    )


def read_options(arguments: argparse.Namespace, kind: type[Settings]) -> Settings:
    """Return the settings that the flags of `add_options` give. Raises UsageError for a value out of bounds."""
    return kind(**{setting.field: _read(arguments, setting) for setting in options_of(kind)})


def read_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the job's settings that flags give, by field. Raises UsageError for a value out of bounds."""
    return {setting.field: _read(arguments, setting) for setting in _OPTIONS}


def read_setting(arguments: argparse.Namespace, field: str) -> Any:
    """Return the value of one of them. Raises UsageError if it is out of bounds."""
    (setting,) = (each for each in _OPTIONS if each.field == field)
    return _read(arguments, setting)


def _read(arguments: argparse.Namespace, setting: SettingOption) -> Any:
    value = getattr(arguments, setting.field)
    if setting.kind in (int, float):
        setting.option.check(value, next(flag for flag in setting.flags if flag.startswith("--")))
    return value


def _add_launch_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        *("--nproc-per-node", "--nproc_per_node"),
        metavar="N",
        help="workers to start on each node: a number, 'gpu', 'cpu', or 'auto' (one for each GPU, or else each core); "
        "default: PET_NPROC_PER_NODE, else 1",
    )
    add(
        "--nnodes",
        metavar="M",
        help="number of nodes, spares included; start the same command on each of them. 'auto': read it from the "
        "variables of Slurm, Kubernetes, SkyPilot, MPI or Ray, and with it, if they are not given, --node-rank and "
        "--rdzv-endpoint. Default: PET_NNODES, else 1",
    )
    add(
        *("--node-rank", "--node_rank"),
        type=int,
        metavar="R",
        help="this node's number, from 0; the controller runs on node 0. Default: as --nnodes auto reads it; else the "
        "host that owns the address of --rdzv-endpoint is node 0",
    )
    add(
        *("--rdzv-endpoint", "--rdzv_endpoint"),
        metavar="HOST:PORT",
        help="where the controller listens; default with several nodes: MASTER_ADDR:MASTER_PORT. On one node it has "
        "an effect only with a --token-file, so that other hosts can join",
    )
    add_token_file(group)
    add_tls(group)


def _add_ignored_flags(group: argparse._ArgumentGroup) -> None:
    """Add flags of torchrun that a launch line may keep, though nothing depends on them."""
    text = "accepted for torchrun's sake, without effect"
    for name, metavar in (("rdzv-backend", "NAME"), ("rdzv-id", "ID"), ("rdzv-conf", "CONF"), ("role", "NAME")):
        group.add_argument(*_spellings(name), metavar=metavar, help=text)
    group.add_argument("--standalone", action="store_true", help=text)
    group.add_argument(*_spellings("monitor-interval"), metavar="S", help=f"{text}: deaths are noticed at once")


def _spellings(name: str) -> tuple[str, ...]:
    """Return the flag as torchrun spells it: with dashes, and with underscores."""
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")))


def add_token_file(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help="the secret that the hosts of a job share, the same file on each; default: RELIGHT_TOKEN_FILE",
    )


def add_tls(group: argparse._ActionsContainer) -> None:
    """Add the flags of `wire.connection.tls.FLAGS`."""
    texts = (
        "use TLS, and accept only hosts whose certificate this authority has signed",
        "this host's certificate, for the name or address under which the others reach it",
        "the key of --tls-cert",
    )
    for flag, variable, text in zip(FLAGS, VARIABLES, texts, strict=True):
        group.add_argument(flag, metavar="PEM", help=f"{text}; default: {variable}")


def _add_job_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--run-dir",
        metavar="DIR",
        help="directory for journal, logs and report; default runs/SCRIPT-DATE-TIME. A directory that holds a "
        "finished run is used again: the old files move to DIR/earlier-N",
    )
    add("--oversubscribe", action="store_true", help="allow more than 16 processes for each core")
    add("--dashboard", action="store_true", help="serve a live page about the job on this machine, and print its URL")
    add("--dashboard-address", default="", metavar="HOST:PORT", help=ADDRESS_HELP)
    add("--quiet", action="store_true", help="show only the workers' output, warnings and errors")


def _add_chaos_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--chaos",
        action="append",
        default=[],
        metavar="SENTENCE",
        help='a fault, such as "kill rank 2 in BACKWARD of step 13"; may be repeated; all words: '
        "relight chaos --explain",
    )
    add(
        "--chaos-rate",
        type=float,
        default=0.0,
        metavar="P",
        help="probability of a random fault in each step; default 0",
    )
    add("--chaos-seed", type=int, default=0, metavar="SEED", help="seed of the random faults; default 0")


def hint_at_misplaced_flags(script_and_arguments: Sequence[str]) -> None:
    """Warn of relight's flags after the script's name. No error: a script may have flags of these names too."""
    after = {argument.partition("=")[0] for argument in script_and_arguments[1:]}
    for flag in sorted(after & _RELIGHTS_OWN):
        print(
            f"relight: {flag} comes after the script's name, so the script gets it; put relight's own flags before it",
            file=sys.stderr,
            flush=True,
        )


def unknown_hint(flag: str, command: str, parser: argparse.ArgumentParser) -> str:
    torchruns = _TORCHRUN_FLAGS.get(flag.partition("=")[0].replace("_", "-"))
    takes_script = command in ("run", "chaos", "prove")
    if torchruns and takes_script:
        return f"{flag} is torchrun's, and relight has no such flag: {torchruns}"
    known = [option for action in parser._actions for option in action.option_strings]
    word = flag.partition("=")[0]
    near = [option for option in known if option.startswith(word)] or difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    script = "Arguments of the script itself go after its name; " if takes_script else ""
    return f"unknown argument {flag}; {hint}{script}--help lists {'the others' if script else 'all'}"
