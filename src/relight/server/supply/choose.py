"""The supplier of a job, and what watches the cluster meanwhile, by the job's settings."""

import os
import shlex
import sys
from collections.abc import Callable

from relight.core.controller import Controller
from relight.core.protocol.events import Event
from relight.server.supply.backend import Backend, CommandBackend, Job
from relight.server.supply.drain_watch import DrainWatch
from relight.server.supply.order_watch import OrderWatch
from relight.server.supply.slurm import SlurmBackend
from relight.server.supply.supplier import Report, Supplier
from relight.wire.connection.address import bracketed
from relight.wire.settings import JobSettings

SLURM = "slurm"
RAY = "ray"
_RAY_ORDER = (sys.executable, "-P", "-m", "relight.integrations.ray_order")
TOKEN_FILE = "RELIGHT_TOKEN_FILE"


def make_supplier(settings: JobSettings, report: Report) -> Supplier | None:
    """Return what orders the hosts of a job; None if none are ordered."""
    if not settings.supplier:
        return None
    command = shlex.join(_RAY_ORDER) if settings.supplier == RAY else settings.supplier
    backend: Backend = CommandBackend(command, _job(settings))
    if settings.supplier == SLURM:
        backend = SlurmBackend(_job(settings), os.environ)
    return Supplier(backend, report)


def make_watches(
    settings: JobSettings, core: Controller, feed: Callable[[Event], None], say: Callable[[str], None]
) -> list[DrainWatch | OrderWatch]:
    """Return what asks the cluster now and then, for as long as the job runs. `say`: tell people."""
    if settings.supplier != SLURM:
        return []
    orders = OrderWatch(core, SlurmBackend(_job(settings), os.environ), feed)
    return [DrainWatch(core, feed, say), orders]


def _job(settings: JobSettings) -> Job:
    host = bracketed(settings.controller_address)
    return Job(
        name=settings.job,
        run_dir=settings.run_dir,
        controller=f"{host}:{settings.controller_port}",
        token_file=os.environ.get(TOKEN_FILE, ""),
    )
