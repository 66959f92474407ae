"""`python -m relight.server --private-dir DIR`: the job's controller as a process. Started by `relight run`."""

import argparse
import asyncio
import contextlib
import errno
import resource
import signal
import sys
from ipaddress import ip_address
from pathlib import Path

from relight.errors import ProtocolError
from relight.parent import end_with_parent, is_dying, tidy_up_for
from relight.server.journal import JournalInUse
from relight.server.server import LAUNCHER_GONE, Server
from relight.wire.address import announce, find_address
from relight.wire.handshake import read_token
from relight.wire.settings import JobSettings, read_settings
from relight.wire.tls import Tls


def main() -> int:
    """Serve one job; return the exit status."""
    parser = argparse.ArgumentParser(prog="relight.server", description="The controller of one job.")
    parser.add_argument("--private-dir", type=Path, required=True, help="where settings.json and the token lie")
    parser.add_argument("--parent", type=int, default=0, help="end when this parent process ends")
    parser.add_argument(
        "--resume", action="store_true", help="go on where a controller that died stopped, by the journal it left"
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
        token = read_token(arguments.private_dir)
        server = Server(
            settings,
            token,
            tls=Tls.from_environment(),
            resume=arguments.resume,
            take_over=arguments.take_over,
        )
        return asyncio.run(
            _serve(server, settings, arguments.private_dir, resume=arguments.resume, parent=arguments.parent)
        )
    except ProtocolError as error:
        print(f"relight: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        tidy_up_for(arguments.parent, arguments.private_dir)


async def _serve(server: Server, settings: JobSettings, private_dir: Path, *, resume: bool, parent: int) -> int:
    before = find_address(private_dir) if resume else None
    try:
        host, port = await server.listen(before.port if before else 0)
    except OSError as error:
        return _refuse_to_listen(settings, error)
    except JournalInUse as error:
        print(f"relight: {error}", file=sys.stderr, flush=True)
        return 2
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _shut_down, server, number, parent)
    if not ip_address(host).is_loopback and not ip_address(host).is_unspecified:
        with contextlib.suppress(OSError):  # hosts that know the address already do not need it
            announce(Path(settings.run_dir), settings.controller_address, port)
    announce(private_dir, host, port)
    return await server.run()


def _shut_down(server: Server, number: int, parent: int) -> None:
    """The kernel's word that `relight run` is gone is a SIGTERM too."""
    gone = number == signal.SIGTERM and is_dying(parent)
    server.shut_down(LAUNCHER_GONE if gone else signal.Signals(number).name)


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
