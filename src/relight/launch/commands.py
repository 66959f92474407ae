"""`relight run`, `relight join` and `relight resume`: one job from its start to its end, or one host's part in it."""

import asyncio
import contextlib
import os
import secrets
import signal
import time
from pathlib import Path

import msgspec

from relight.agent.connection.join import address_towards, fetch_settings, resolve
from relight.errors import ProtocolError
from relight.launch.launcher import OUTPUT_SECONDS, Launcher
from relight.launch.private_dir import make_private_dir
from relight.launch.summary import sum_up
from relight.parent import remove_private_dir
from relight.server.records.claim import remove_unused
from relight.server.records.journal import read_header
from relight.terminal import Screen
from relight.transfer.io.channel import SOCKET_NAME
from relight.wire.connection.address import Address
from relight.wire.connection.loopback import is_default
from relight.wire.connection.tls import Tls, leave_to_children
from relight.wire.settings import FIRST_NODE, HOST_ADDRESS, JobSettings

NAME_SECONDS = 30.0  # for the name of this host to be known
JOIN_SECONDS = 300.0  # for a controller on another host to be there
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(
    settings: JobSettings,
    token: bytes | None = None,
    *,
    quiet: bool,
    dashboard: str | None = None,
    tls: Tls | None = None,
) -> int:
    """Run one job to its end, with its controller here; returns the exit status of `relight run`.

    `token` is the one that the job's hosts share; a job that keeps to this host makes its own.
    `dashboard`: where to serve the live page, as "HOST:PORT"; None: nowhere. `tls`: None for none.
    """
    screen = Screen(quiet=quiet)
    try:
        if not is_default(settings.controller_address):
            os.environ.setdefault(HOST_ADDRESS, _resolve_own(settings.controller_address))
        if tls is not None:
            leave_to_children(tls.files)
        secret = token or secrets.token_bytes(32)
        return asyncio.run(_launch(settings, secret, screen, FIRST_NODE, quiet=quiet, dashboard=dashboard, tls=tls))
    except OSError as error:
        screen.say(f"the job could not be started: {error}", "error")
        remove_unused(Path(settings.run_dir))
        return 1
    finally:
        screen.close(OUTPUT_SECONDS)


def _resolve_own(name: str) -> str:
    """Return the address of this host's name, which a cluster may know only some time after it has started the host."""
    deadline = time.monotonic() + NAME_SECONDS
    while True:
        try:
            return resolve(name)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise OSError(
                    f"the name of this host for the others, {name}, cannot be resolved here "
                    f"({error.strerror or error}); give an address: --rdzv-endpoint ADDRESS:PORT on all nodes"
                ) from error
        time.sleep(1.0)


def join(
    controller: tuple[str, int],
    token: bytes,
    name: str,
    *,
    spare: bool,
    quiet: bool,
    tls: Tls | None = None,
    settings: JobSettings | None = None,
) -> int:
    """Run what a job's controller on another host orders, until the job ends; returns the exit status.

    `spare`: this host is none of the nodes that the job starts on. `settings`: of a job whose controller may be gone,
    since this host may take it over; None: the controller has them.
    """
    screen = Screen(quiet=quiet)
    where = f"{controller[0]}:{controller[1]}"
    screen.say(f"{name}: looking for the job's controller at {where}")
    try:
        if tls is not None:
            leave_to_children(tls.files)
        settings = settings or asyncio.run(fetch_settings(controller, token, JOIN_SECONDS, tls))
        os.environ.setdefault(HOST_ADDRESS, address_towards(*controller))
        address = Address(host=controller[0], port=controller[1], pid=0)
        return asyncio.run(_launch(settings, token, screen, name, quiet=True, controller=address, tls=tls, spare=spare))
    except (OSError, ProtocolError) as error:
        screen.say(f"cannot join the job at {where}: {error}", "error")
        return 1
    finally:
        screen.close(OUTPUT_SECONDS)


def resume_job(
    run_dir: Path, listen: tuple[str, int], token: bytes, *, take_over: bool, quiet: bool, tls: Tls | None = None
) -> int:
    """Run another controller of a job whose controller's host is gone, until the job ends; returns the exit status."""
    screen = Screen(quiet=quiet)
    try:
        if tls is not None:
            leave_to_children(tls.files)
        settings = read_header(run_dir / "journal.jsonl").settings
        settings = msgspec.structs.replace(
            settings, run_dir=str(run_dir.absolute()), controller_address=listen[0], controller_port=listen[1]
        )
        resume = ("--resume", "--take-over") if take_over else ("--resume",)
        return asyncio.run(_launch(settings, token, screen, "controller", quiet=quiet, tls=tls, resume=resume))
    except (OSError, msgspec.MsgspecError) as error:
        screen.say(f"the job in {run_dir} cannot be resumed: {error}", "error")
        return 1
    finally:
        screen.close(OUTPUT_SECONDS)


async def _launch(
    settings: JobSettings,
    token: bytes,
    screen: Screen,
    name: str,
    *,
    quiet: bool,
    controller: Address | None = None,
    dashboard: str | None = None,
    tls: Tls | None = None,
    resume: tuple[str, ...] = (),
    spare: bool = False,
) -> int:
    loop = asyncio.get_running_loop()
    early: list[int] = []
    for number in _SIGNALS:
        loop.add_signal_handler(number, early.append, number)
    private_dir = make_private_dir(settings, token)
    launcher = Launcher(settings, private_dir, screen, name, controller, dashboard, tls, resume, spare=spare)
    for number in _SIGNALS:
        loop.add_signal_handler(number, launcher.interrupt, number)
    for received in early:
        launcher.interrupt(received)
    try:
        status = await launcher.run()
    finally:
        await launcher.end()
        remove_private_dir(private_dir)
        with contextlib.suppress(OSError):  # a publisher that was killed could not
            Path(settings.run_dir, SOCKET_NAME).unlink()
    screen.end_progress()
    if launcher.has_started:
        sum_up(settings, screen, launcher.ended, show_report=not quiet)
    else:
        remove_unused(Path(settings.run_dir))
    return status
