"""`relight agent` and `relight controller`: the commands of hosts other than the first."""

import argparse
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relight.errors import UsageError
from relight.flags import add_tls, add_token_file
from relight.wire.connection.handshake import NAME

if TYPE_CHECKING:
    from relight.wire.connection.tls import Tls


def add_commands(choices: "argparse._SubParsersAction[Any]") -> None:
    """Add the commands of hosts other than the first."""
    agent = choices.add_parser(
        "agent",
        help="let this host join a running job",
        description="Join a running job: this host offers room for standbys and replacements until the job ends.",
    )
    agent.add_argument("--controller", required=True, metavar="HOST:PORT", help="the job's --rdzv-endpoint")
    agent.add_argument("--name", help="this host's name in the job; default: its host name")
    agent.add_argument("--quiet", action="store_true", help="show only the workers' output, warnings and errors")
    add_token_file(agent)
    add_tls(agent)
    agent.set_defaults(call=_agent)
    controller = choices.add_parser(
        "controller",
        help="resume a job whose controller's host is lost",
        description="Run another controller of a job on several hosts, on a host that sees its run directory. Its "
        "agents find the controller's address there. Training continues meanwhile; the lost host's ranks are "
        "replaced. Ctrl-C ends the job, as with `relight run`.",
    )
    controller.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="on storage that all hosts share")
    controller.add_argument(
        "--listen", required=True, metavar="HOST:PORT", help="where the job's hosts reach this controller"
    )
    controller.add_argument(
        "--take-over",
        action="store_true",
        help="take the journal even if the old controller still holds its lock, since it is frozen or its host cannot "
        "be reached. If it wakes up, it finds that the journal is no longer its own, and ends silently",
    )
    controller.add_argument("--quiet", action="store_true", help="show only warnings and errors")
    add_token_file(controller)
    add_tls(controller)
    controller.set_defaults(call=_controller)
    _add_commands_by_hand(choices)


def _add_commands_by_hand(choices: "argparse._SubParsersAction[Any]") -> None:
    """Add the commands that ask the controller of a running job for something."""
    drain = choices.add_parser(
        "drain",
        help="move the ranks of a host to others, and give the host back",
        description="Leave a host of a running job in order, before maintenance for example: once other hosts have a "
        "warm standby for each of its ranks, all ranks pause after a step, the standbys take over, and no step is "
        "repeated. Then the host leaves the job. SIGTERM to `relight agent`, or to `relight run` on a host other than "
        "the first, does the same. Exit status: 0 the host is free, 1 it is not.",
    )
    drain.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the job's run directory")
    drain.add_argument("host", metavar="HOST", help="the host's name in the job, for example node-1")
    add_token_file(drain)
    add_tls(drain)
    drain.set_defaults(call=_drain)
    end = choices.add_parser(
        "end",
        help="end a job on several hosts after a last step and a checkpoint",
        description="End a running job on several hosts: after the next step, and a checkpoint if it keeps some. Start "
        "the same command again to go on from there. Exit status: 0 it has ended, 1 it has not.",
    )
    end.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the job's run directory")
    add_token_file(end)
    add_tls(end)
    end.set_defaults(call=_end)


def _agent(arguments: argparse.Namespace) -> int:
    from relight.config import find_tls, parse_endpoint, read_shared_token
    from relight.launch.commands import join

    endpoint = parse_endpoint(arguments.controller, "--controller")
    name = arguments.name or host_name()
    if not NAME.fullmatch(name):
        raise UsageError(f"--name {name}: use a-z, 0-9 and '-', at most 64 of them")
    token = read_shared_token(arguments.token_file)
    tls = find_tls(arguments, endpoint, is_first=False)
    return join(endpoint, token, name, spare=True, quiet=arguments.quiet, tls=tls)


def _controller(arguments: argparse.Namespace) -> int:
    from relight.config import find_tls, hand_down_token_file, parse_endpoint, read_shared_token
    from relight.launch.commands import resume_job

    if not arguments.run_dir.is_dir():
        raise UsageError(f"there is no run directory {arguments.run_dir}; `relight run` prints the path of each run")
    endpoint = parse_endpoint(arguments.listen, "--listen")
    token = read_shared_token(arguments.token_file)
    hand_down_token_file(arguments)
    tls = find_tls(arguments, endpoint, is_first=True)
    return resume_job(arguments.run_dir, endpoint, token, take_over=arguments.take_over, quiet=arguments.quiet, tls=tls)


def _drain(arguments: argparse.Namespace) -> int:
    from relight.launch.asking import drain

    return drain(arguments.run_dir, arguments.host, *_credentials(arguments))


def _end(arguments: argparse.Namespace) -> int:
    from relight.launch.asking import end

    return end(arguments.run_dir, *_credentials(arguments))


def _credentials(arguments: argparse.Namespace) -> "tuple[bytes, Tls | None]":
    """Return what this process shows to the controller of a run directory, and how it knows that one."""
    from relight.config import find_tls, read_shared_token
    from relight.wire.connection.address import read_address

    token = read_shared_token(arguments.token_file)
    address = read_address(arguments.run_dir)
    return token, None if address is None else find_tls(arguments, address, is_first=False)


def host_name() -> str:
    """This host's name, in the letters that an agent's name may have."""
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in socket.gethostname().lower())[:64]
