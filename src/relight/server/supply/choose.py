"""The supplier of a job, by its settings."""

import os
import shlex
import sys

from relight.server.supply.backend import Backend, CommandBackend, Job
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
    host = bracketed(settings.controller_address)
    job = Job(
        name=settings.job,
        run_dir=settings.run_dir,
        controller=f"{host}:{settings.controller_port}",
        token_file=os.environ.get(TOKEN_FILE, ""),
    )
    command = shlex.join(_RAY_ORDER) if settings.supplier == RAY else settings.supplier
    backend: Backend = CommandBackend(command, job)
    if settings.supplier == SLURM:
        backend = SlurmBackend(job, os.environ)
    return Supplier(backend, report)
