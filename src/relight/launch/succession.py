"""This host's part in the Lease of a job: it takes the controller over when the holder has fallen silent."""

import argparse
import asyncio
import os
import secrets
import socket
from pathlib import Path

import msgspec

from relight.agent.connection.join import resolve
from relight.cluster.allocation import doubt
from relight.cluster.lease import LeaseKeeper, check_name
from relight.cluster.lease_file import IN_FILE, find_server
from relight.errors import UsageError
from relight.launch.observer import Observer
from relight.launch.private_dir import make_private_dir
from relight.server.records.earlier import going_on
from relight.terminal import Screen
from relight.wire.settings import JobSettings, host_address

LOOK_SECONDS = 1.0
SILENT_LOOKS = 3  # without an update of the controller, which is due twice a second, before the Lease is looked at


def find_run(arguments: argparse.Namespace) -> JobSettings | None:
    """Return the settings of the run that goes on in --run-dir, which a host that is started anew joins.

    With a Lease in a file none is joined: Slurm starts no lost node anew, but only all of them.

    Raises UsageError if the Lease cannot be used, or if that run is one of another script.
    """
    if arguments.lease != IN_FILE:
        check_name(arguments.lease)
    if not arguments.run_dir:
        raise UsageError("--lease: give --run-dir too, a directory on storage that all hosts of the job share")
    if arguments.lease == IN_FILE:
        return None
    found = going_on(Path(arguments.run_dir))
    given = tuple(arguments.script_and_arguments)
    if found is None or not given or (found.script, *found.script_arguments) == given:
        return found and msgspec.structs.replace(found, run_dir=str(Path(arguments.run_dir).absolute()))
    raise UsageError(
        f"--run-dir {arguments.run_dir} holds a run of another command that has no end "
        f"({' '.join((found.script, *found.script_arguments))}); choose another directory"
    )


class Succession:
    """Waits for the Lease, and prepares a controller here."""

    def __init__(self, settings: JobSettings, private_dir: Path, screen: Screen, observer: Observer) -> None:
        self._settings = settings
        self._private_dir = private_dir
        self._screen = screen
        self._observer = observer
        # Of this process alone. Its controllers have the same name, so that one continues the term of another.
        self.holder = f"{socket.gethostname()}_{secrets.token_hex(4)}"

    async def win(self) -> None:
        """Return once this host holds the Lease. While the controller is heard, nothing is asked."""
        while True:
            await self._await_silence()
            keeper = LeaseKeeper(
                find_server(
                    *(self._settings.lease, self._settings.run_dir, self._settings.lease_seconds),
                    lambda: doubt(os.environ),
                ),
                *(self.holder, self._settings.lease_seconds, lambda text: self._screen.say(text, "warning")),
            )
            counting = asyncio.create_task(self._count_looks())
            try:
                if await keeper.acquire(self._is_silent, insists=True):
                    self._screen.say("the controller is lost, and this host takes over", "warning")
                    return
            finally:
                counting.cancel()

    def prepare(self) -> tuple[JobSettings, Path]:
        """Return the settings of a controller on this host, and a private directory for it."""
        address = host_address() or resolve(socket.gethostname())
        settings = msgspec.structs.replace(self._settings, controller_address=address)
        return settings, make_private_dir(settings, (self._private_dir / "token").read_bytes())

    def _is_silent(self) -> bool:
        return self._observer.ended is None and self._observer.silent_looks >= SILENT_LOOKS

    async def _await_silence(self) -> None:
        self._observer.silent_looks = 0
        while not self._is_silent():
            await self._look()

    async def _count_looks(self) -> None:
        while True:
            await self._look()

    async def _look(self) -> None:
        await asyncio.sleep(LOOK_SECONDS)
        self._observer.silent_looks += 1
