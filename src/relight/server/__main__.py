"""`python -m relight.server --private-dir DIR`: the job's controller as a process. Started by `relight run`."""

import argparse
import asyncio
import contextlib
import errno
import os
import resource
import signal
import sys
import time
from ipaddress import ip_address
from pathlib import Path

from relight.cluster.lease import LeaseError, LeaseKeeper
from relight.cluster.lease_file import find_server
from relight.errors import ProtocolError
from relight.parent import end_with_parent, is_dying, outlive_parent, tidy_up_for
from relight.server.network.listener import Listener
from relight.server.network.observers import Observers
from relight.server.records.journal import Journal, JournalInUse
from relight.server.server import Server
from relight.server.sessions.isolation import Isolation
from relight.server.sessions.shutdown import LAUNCHER_GONE
from relight.wire.connection.address import announce, find_address
from relight.wire.connection.handshake import read_token
from relight.wire.connection.tls import Tls
from relight.wire.settings import HAND_OVER, SUPERSEDED, JobSettings, read_settings

LEASES = 2  # durations to wait for a Lease whose last holder may be dead


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
    parser.add_argument("--holder", default="", help="the name under which this host takes part in the job's Lease")
    arguments = parser.parse_args()
    if arguments.parent:
        end_with_parent(arguments.parent)
    settings = read_settings(arguments.private_dir)
    _allow_many_files()
    try:
        return asyncio.run(_serve(settings, arguments))
    except (ProtocolError, JournalInUse, LeaseError) as error:
        print(f"relight: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        tidy_up_for(arguments.parent, arguments.private_dir)


async def _serve(settings: JobSettings, arguments: argparse.Namespace) -> int:
    """Serve the job, once this process holds its Lease, if it has one. Raises as `_serve_job`, and LeaseError."""
    isolation = Isolation(_give_way, begins=not arguments.resume)
    if not settings.lease:
        return await _serve_job(settings, arguments, None, isolation)
    place = find_server(
        *(settings.lease, settings.run_dir, settings.lease_seconds, isolation.doubt), begins=not arguments.resume
    )
    lease = LeaseKeeper(place, arguments.holder, settings.lease_seconds, _say)
    deadline = time.monotonic() + LEASES * settings.lease_seconds
    if not await lease.acquire(lambda: time.monotonic() < deadline):
        _say(f"the Lease {settings.lease} is held by {lease.holder or 'no one, and cannot be had'}")
        return SUPERSEDED
    keeping = asyncio.create_task(lease.keep())
    keeping.add_done_callback(lambda task: None if task.cancelled() else _give_way("its Lease is lost"))
    try:
        return await _serve_job(settings, arguments, lease, isolation)
    finally:
        keeping.cancel()
        lease.release()


async def _serve_job(
    settings: JobSettings, arguments: argparse.Namespace, lease: LeaseKeeper | None, isolation: Isolation
) -> int:
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
        may_act=lease.may_act if lease is not None else lambda: True,
    )
    server = Server(settings, token, journal, observers, tls)
    isolation.agents = server.job.agents
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _shut_down, server, number, arguments, lease)
    loop.add_signal_handler(HAND_OVER, _leave, lease, arguments)
    await listener.start(server.serve)
    host, port = listener.address
    if not ip_address(host).is_loopback and not ip_address(host).is_unspecified:
        with contextlib.suppress(OSError):  # hosts that know the address already do not need it
            announce(Path(settings.run_dir), settings.controller_address, port)
    announce(private_dir, host, port)
    try:
        return await server.run(listener)
    finally:
        outlive_parent()  # while SIGTERM is still handled


def _give_way(why: str = "another controller has taken over this job") -> None:
    """End at once: agents must not obey two controllers."""
    _say(f"{why}; this controller ends")
    os._exit(SUPERSEDED)


def _leave(lease: LeaseKeeper | None, arguments: argparse.Namespace) -> None:
    """Leave the job to a controller on another host. Nothing else is done here while the Lease is released."""
    if lease is not None:
        lease.release()
    tidy_up_for(arguments.parent, arguments.private_dir)
    _give_way("the job is left to another controller")


def _shut_down(server: Server, number: int, arguments: argparse.Namespace, lease: LeaseKeeper | None) -> None:
    """Tell a SIGTERM of the user from the kernel's, which says that `relight run` is gone."""
    gone = number == signal.SIGTERM and is_dying(arguments.parent)
    if gone and server.job.settings.has_successors:
        _leave(lease, arguments)
    server.shutdown.request(LAUNCHER_GONE if gone else signal.Signals(number).name)


def _say(text: str) -> None:
    print(f"relight: {text}", file=sys.stderr, flush=True)


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
