"""`python -m relight.agent`: the agent of one node as a process. Started by `relight run`."""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from relight.agent.agent import Agent
from relight.agent.processes.process import WORKER_COMMAND, Launch
from relight.errors import ProtocolError, UsageError
from relight.parent import end_with_parent, outlive_parent, tidy_up_for
from relight.wire.connection.address import read_address
from relight.wire.connection.handshake import NAME, read_token
from relight.wire.connection.tls import Tls
from relight.wire.settings import read_settings

_EPILOG = """\
The private directory is the job's: settings.json says what to run, token proves to the controller that this agent
belongs to the job. The agent starts processes when the controller orders it to, shows what they print as
"[rank 2] ..." and keeps it in logs/ of the run directory.

It ends, and its processes with it, when the controller says so, when the process that started the agent goes away, or
on SIGTERM or Ctrl-C. Without a controller its processes train on, and it looks for the controller's successor, for some
minutes. Only after SIGKILL do its processes live on without it: start an agent with the same --name and --private-dir
and with --adopt in time, and it takes them over.

exit status: 0 ended as ordered, 2 wrong usage, 3 the controller is gone for good
"""


def main(arguments: Sequence[str] | None = None, command: tuple[str, ...] = WORKER_COMMAND) -> int:
    """Run one agent whose processes are started with `command`; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m relight.agent",
        description="Starts, watches and ends the processes of one node.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--controller", type=_address, required=True, metavar="HOST:PORT", help="where the controller listens"
    )
    parser.add_argument(
        "--name", type=_name, required=True, help="this node's name in the job: a-z, 0-9 and '-', for example node-0"
    )
    parser.add_argument(
        "--private-dir", type=Path, required=True, metavar="DIR", help="the job's directory with settings and token"
    )
    parser.add_argument(
        "--adopt", action="store_true", help="take over the processes of an agent of this name that was killed"
    )
    parser.add_argument(
        "--spare", action="store_true", help="offer room for standbys and replacements; the job does not start here"
    )
    parser.add_argument(
        "--parent", type=int, default=0, metavar="PID", help="check at the start that this parent still lives"
    )
    options = parser.parse_args(arguments)
    end_with_parent(options.parent)
    try:
        return asyncio.run(_run(options, command))
    except (UsageError, ProtocolError, OSError, msgspec.ValidationError) as error:
        print(f"relight: agent {options.name}: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        tidy_up_for(options.parent, options.private_dir)


async def _run(options: argparse.Namespace, command: tuple[str, ...]) -> int:
    private_dir = options.private_dir.resolve()
    settings = read_settings(private_dir)
    launch = Launch(
        settings=settings,
        private_dir=private_dir,
        node=options.name,
        socket_path=private_dir / f"agent-{options.name}.sock",
        command=(settings.script, *settings.script_arguments) if settings.no_python else command,
    )

    run_dir = Path(launch.settings.run_dir)

    def find_controller() -> tuple[str, int]:
        return read_address(run_dir, private_dir) or options.controller

    here = read_address(private_dir) is not None  # the controller runs on this host: known by the endpoint's name
    told_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, told_to_end.set)
    agent = Agent(
        options.name,
        launch,
        read_token(private_dir),
        find_controller,
        take_over=options.adopt,
        spare=options.spare,
        machine=os.environ.get("RELIGHT_MACHINE") or os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        tls=Tls.from_environment(),
        # The run directory has the name that the controller was given.
        server_name=lambda address: (
            address[0]
            if address == read_address(run_dir)
            else launch.settings.controller_address
            if here
            else options.controller[0]
        ),
    )
    try:
        return await agent.run(told_to_end)
    finally:
        outlive_parent()  # while SIGTERM is still handled


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, for example 127.0.0.1:29400")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name for an agent: use a-z, 0-9 and '-'")
    return text


if __name__ == "__main__":
    sys.exit(main())
