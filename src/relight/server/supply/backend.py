"""Backends of the supplier: the command line that orders a host, and the one that cancels an order. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from relight.core.protocol.commands import CancelHost, OrderHost

MAX_IDENTIFIER = 200  # characters


@dataclass(frozen=True)
class Job:
    """The facts about a job that an order needs."""

    name: str
    run_dir: str
    controller: str  # HOST:PORT
    token_file: str


@dataclass(frozen=True)
class Call:
    """A command to run. `environment` is added to that of the controller; None takes a variable away."""

    command: tuple[str, ...]
    environment: Mapping[str, str | None] = field(default_factory=dict)


class Backend(Protocol):
    """One way to order hosts."""

    def order(self, order: OrderHost) -> Call:
        """Return the command that places an order and prints the cluster's word for it."""

    def cancel(self, order: CancelHost) -> Call:
        """Return the command that cancels an order, whether its host has come or not."""


def read_identifier(output: str) -> str:
    """Return the identifier that a command has printed: one line. Raises ValueError."""
    lines = output.strip().splitlines()
    if not lines:
        raise ValueError("it printed no identifier")
    if len(lines) > 1 or len(lines[0]) > MAX_IDENTIFIER or not lines[0].isprintable():
        shown = repr(output.strip()[:60])
        raise ValueError(f"it printed {shown} ... instead of one line with an identifier")
    return lines[0].strip()


class CommandBackend:
    """A command of the user's, run by the shell. It finds all that it needs in its environment."""

    def __init__(self, command: str, job: Job) -> None:
        self._command = command
        self._job = job

    def order(self, order: OrderHost) -> Call:
        """Return the command, to order a host."""
        return self._call("order", order.order, "", exclude=order.exclude)

    def cancel(self, order: CancelHost) -> Call:
        """Return the command, to cancel an order."""
        return self._call("cancel", order.order, order.identifier)

    def _call(self, action: str, order: str, identifier: str, exclude: tuple[str, ...] = ()) -> Call:
        environment = {
            "RELIGHT_ACTION": action,
            "RELIGHT_ORDER": order,
            "RELIGHT_ORDER_ID": identifier,
            "RELIGHT_EXCLUDE": ",".join(exclude),
            "RELIGHT_JOB": self._job.name,
            "RELIGHT_RUN_DIR": self._job.run_dir,
            "RELIGHT_CONTROLLER": self._job.controller,
            "RELIGHT_TOKEN_FILE": self._job.token_file,
        }
        return Call(("/bin/sh", "-c", self._command), environment)
