"""`python -m relight.server --private-dir DIR`: the job's controller as a process. Started by `relight run`."""

import argparse
import asyncio
import contextlib
import errno
import os
import resource
import signal
import sys
from ipaddress import ip_address
from pathlib import Path

from relight.errors import ProtocolError
from relight.parent import end_with_parent, is_dying, tidy_up_for
from relight.server.network.listener import Listener
from relight.server.network.observers import Observers
from relight.server.records.journal import Journal, JournalInUse
from relight.server.server import Server
from relight.server.sessions.shutdown import LAUNCHER_GONE
from relight.wire.connection.address import announce, find_address
from relight.wire.connection.handshake import read_token
from relight.wire.connection.tls import Tls
from relight.wire.settings import SUPERSEDED, JobSettings, read_settings


def main() -> int:
    """Serve one job; return the exit status."""
    parser = argparse.ArgumentParser(prog="relight.server", description="The controller of one job.")
    parser.add_argument("--private-dir", type=Path, required=True, help="where settings.json and the token lie")
    parser.add_argument("--parent", type=int, default=0, help="end when this parent process ends")
    parser.add_argument(
        "--resume", action="store_true", help="continue the job of a controller that died, by its journal"
    )
    parser.add_argument(
        "--take-over", action="store_true", help="with --resume: also if another controller holds the journal's lock"
    )
    arguments = parser.parse_args()
    if arguments.parent:
        end_with_parent(arguments.parent)
    settings = read_settings(arguments.private_dir)
    _allow_many_files()
    try:
        return asyncio.run(_serve(settings, arguments))
    except (ProtocolError, JournalInUse) as error:
        print(f"relight: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        tidy_up_for(arguments.parent, arguments.private_dir)


async def _serve(settings: JobSettings, arguments: argparse.Namespace) -> int:
    """Open the port, then the journal; serve the job. Raises ProtocolError or JournalInUse."""
    private_dir: Path = arguments.private_dir
    tls = Tls.from_environment()
    token = read_token(private_dir)
    before = find_address(private_dir) if arguments.resume else None
    try:
        listener = await Listener.open(settings, before.port if before else 0)
    except OSError as error:
        return _refuse_to_listen(settings, error)
    observers = Observers()
    journal = Journal(
        Path(settings.run_dir),
        settings,
        observers.tell,
        resume=arguments.resume,
        take_over=arguments.take_over,
        give_way=_give_way,
    )
    server = Server(settings, token, journal, observers, tls)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _shut_down, server, number, arguments.parent)
    await listener.start(server.serve)
    host, port = listener.address
    if not ip_address(host).is_loopback and not ip_address(host).is_unspecified:
        with contextlib.suppress(OSError):  # hosts that know the address already do not need it
            announce(Path(settings.run_dir), settings.controller_address, port)
    announce(private_dir, host, port)
    return await server.run(listener)


def _give_way() -> None:
    """End at once: another controller has taken the job over, and agents must not obey two of them."""
    print("relight: another controller has taken over this job; this one ends", file=sys.stderr, flush=True)
    os._exit(SUPERSEDED)


def _shut_down(server: Server, number: int, parent: int) -> None:
    """Tell a SIGTERM of the user from the kernel's, which says that `relight run` is gone."""
    gone = number == signal.SIGTERM and is_dying(parent)
    server.shutdown.request(LAUNCHER_GONE if gone else signal.Signals(number).name)


def _allow_many_files() -> None:
    """A connection for each agent: as many as the system lets this user have, not as many as a shell begins with."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _refuse_to_listen(settings: JobSettings, error: OSError) -> int:
    where = f"{settings.controller_address}:{settings.controller_port}"
    if error.errno == errno.EADDRINUSE:
        what = f"port {where} is in use; choose another with --controller-port, or leave the flag out"
    else:
        what = f"cannot listen on {where}: {error.strerror or error}; choose another port with --controller-port"
    print(f"relight: {what}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
