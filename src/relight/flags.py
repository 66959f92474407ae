"""The flags of `relight run` and `relight chaos`, and the hints for wrong ones. No torch.

They are torchrun's where torchrun has them, so that a launch line can be kept.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from relight.wire.settings import JobSettings

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(JobSettings)}
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
    parser.add_argument("script_and_arguments", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help=argparse.SUPPRESS)
    _add_launch_flags(parser.add_argument_group("launch, as with torchrun"))
    _add_job_flags(parser.add_argument_group("the job"))
    detection = parser.add_argument_group("noticing failures")
    _add_detection_flags(detection)
    _add_verify_flag(detection)
    _add_buddy_flag(detection)
    _add_slow_flags(detection)
    _add_retry_flags(parser.add_argument_group("giving up"))
    _add_chaos_flags(parser.add_argument_group("faults on purpose"))


def add_waiting_flags(group: argparse._ArgumentGroup) -> None:
    """How long failures take to be noticed, and buddy memory: what any command that starts a job has."""
    _add_detection_flags(group)
    _add_buddy_flag(group)


def _add_launch_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        *("--nproc-per-node", "--nproc_per_node"),
        default="1",
        metavar="N",
        help="workers to start: a number, 'gpu', 'cpu', or 'auto' (one for each GPU, or else each core); default 1",
    )
    add("--nnodes", default="1", metavar="M", help="number of nodes; start the same command on each of them; default 1")
    add(
        *("--node-rank", "--node_rank"),
        type=int,
        metavar="R",
        help="this node's number; the controller runs on node 0. Default: the host that owns the address of "
        "--rdzv-endpoint is node 0",
    )
    add(
        *("--rdzv-endpoint", "--rdzv_endpoint"),
        metavar="HOST:PORT",
        help="where the controller listens; default with several nodes: MASTER_ADDR:MASTER_PORT. On one node it has "
        "an effect only with a --token-file, so that other hosts can join",
    )
    add(*("--rdzv-backend", "--rdzv_backend"), metavar="NAME", help="accepted for torchrun's sake, without effect")
    add(*("--rdzv-id", "--rdzv_id"), metavar="ID", help="accepted for torchrun's sake, without effect")
    add_token_file(group)
    add_tls(group)
    add(
        "--standalone",
        action="store_true",
        help="accepted for torchrun's sake, without effect",
    )
    add("--role", metavar="NAME", help="accepted for torchrun's sake, without effect")
    add(
        *("--monitor-interval", "--monitor_interval"),
        metavar="S",
        help="accepted for torchrun's sake, without effect: deaths are noticed at once",
    )
    add(*("--rdzv-conf", "--rdzv_conf"), metavar="CONF", help="accepted for torchrun's sake, without effect")
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as with python -m")
    add(
        *("--no-python", "--no_python"),
        action="store_true",
        help="SCRIPT is a program, run as it is. It must become the Python process that calls relight.init(): a shell "
        "script ends with `exec python train.py`",
    )
    add(
        *("--master-addr", "--master_addr"),
        default=_DEFAULTS["master_address"],
        metavar="HOST",
        help="value of MASTER_ADDR for the script; relight itself does not use it",
    )
    add(
        *("--master-port", "--master_port"),
        type=int,
        default=_DEFAULTS["master_port"],
        metavar="PORT",
        help="value of MASTER_PORT for the script",
    )


def add_token_file(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help="the secret that the hosts of a job share, the same file on each; default: RELIGHT_TOKEN_FILE",
    )


def add_tls(group: argparse._ActionsContainer) -> None:
    """The names of `wire.tls.FLAGS`."""
    texts = {
        "--tls-ca": "use TLS, and accept only hosts whose certificate this authority has signed",
        "--tls-cert": "this host's certificate, for the name or address under which the others reach it",
        "--tls-key": "the key of --tls-cert",
    }
    for flag, text in texts.items():
        variable = f"RELIGHT_{flag.removeprefix('--').replace('-', '_').upper()}"
        group.add_argument(flag, metavar="PEM", help=f"{text}; default: {variable}")


def _add_job_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--standby",
        type=int,
        default=_DEFAULTS["standbys"],
        metavar="N",
        help="warm processes in reserve, which take lost ranks without starting Python and torch; default 0",
    )
    add(
        "--run-dir",
        metavar="DIR",
        help="directory for journal, logs and report; default runs/SCRIPT-DATE-TIME. A directory that holds a "
        "finished run is used again: the old files move to DIR/earlier-N",
    )
    add("--seed", type=int, default=_DEFAULTS["seed"], help="seed of the random streams of each step; default 0")
    add("--controller-port", type=int, default=0, metavar="PORT", help="port of the controller; default: a free one")
    add("--oversubscribe", action="store_true", help="allow more than 16 processes for each core")
    add("--dashboard", action="store_true", help="serve a live page about the job on this machine, and print its URL")
    add("--dashboard-address", default="", metavar="HOST:PORT", help=ADDRESS_HELP)
    add("--quiet", action="store_true", help="show only the workers' output, warnings and errors")


def _add_detection_flags(group: argparse._ArgumentGroup) -> None:
    texts = {
        "hang_timeout_seconds": "replace a rank after this long without progress inside a step, while others wait for "
        "it; grows by itself for jobs with long steps",
        "outside_hang_timeout_seconds": "the same between two steps, for example in an evaluation",
        "startup_timeout_seconds": "the same from the start of the script to the end of its first step",
        "frozen_timeout_seconds": "replace a process after it was stopped by a signal (SIGSTOP) for this long",
        "agent_timeout_seconds": "give up a host, with all its processes, if its agent was out of reach for this long",
        "controller_timeout_seconds": "continue without a controller for this long; then end the job",
        "stop_timeout_seconds": "replace a survivor too if it has not paused this long after a failure",
        "restore_timeout_seconds": "time limit for the copy of a healthy rank's state to a replacement; raise it for "
        "a large state over a slow network",
    }
    for name, text in texts.items():
        default = _DEFAULTS[name]
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=float, default=default, metavar="S", help=f"{text}; default {default:g}")


def _add_verify_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--verify-every",
        type=int,
        default=_DEFAULTS["verify_every"],
        metavar="K",
        help="compare the state of all ranks bit for bit every K steps, before the write; a rank that is outvoted "
        "(with 3 or more ranks) is replaced, since its memory was corrupted; default 0: only at the second step, "
        "in recoveries and at the end",
    )
    group.add_argument(
        "--no-repeat-check",
        action="store_true",
        help="do not compute the second step of the job twice. By default relight does, and compares the bits, "
        "to find scripts that a recovery could not repeat. For devices whose operations are not deterministic",
    )


def _add_buddy_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--buddy-every",
        type=int,
        default=_DEFAULTS["buddy_every"],
        metavar="K",
        help="for state that is divided over ranks: copy each rank's part into the host memory of another rank every "
        "K steps. training.buddy(every=K) in the script takes precedence; default 0: never",
    )


def _add_slow_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slow-factor",
        type=float,
        default=_DEFAULTS["slow_factor"],
        metavar="F",
        help="report a rank whose own work, without waiting for others, takes F times as long as that of the median "
        "rank; default %(default)s",
    )
    group.add_argument(
        "--slow-window-seconds",
        type=float,
        default=_DEFAULTS["slow_window_seconds"],
        metavar="S",
        help="length of a window; a rank is slow after three in a row, of ten steps or more each; default %(default)g",
    )
    group.add_argument(
        "--replace-slow", action="store_true", help="replace such a rank by a warm standby, between two steps"
    )


def _add_retry_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        *("--max-failures", "--max-restarts", "--max_restarts"),
        type=int,
        default=None,
        metavar="N",
        help="end the job at failure N+1; default: never, since a failure costs one step",
    )
    add(
        "--max-failures-per-step",
        type=int,
        default=None,
        metavar="N",
        help="end the job if one step fails more often, for any reason; default: 10 for failures that the script "
        "may cause (exceptions, hangs, broken collectives), no limit for failures from outside (signals, exits, "
        "freezes, lost hosts)",
    )
    add(
        "--max-failed-attempts",
        type=int,
        default=None,
        metavar="N",
        help="end the job after N failed attempts in a row to replace a rank (a process lost before it had finished "
        "a step, or a restore that broke); default: never, as long as an intact replica is left. After three failed "
        "attempts the next ones begin after pauses of 1, 2, 4, ... s, at most 60",
    )


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
