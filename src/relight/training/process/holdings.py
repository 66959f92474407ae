"""Questions of the runtime to the parts above it: about a process's state, and about the loop as the script ends."""

from typing import Protocol

from relight.core.protocol.events import Snapshot
from relight.core.protocol.fault import Action


class Holdings(Protocol):
    """The state of a process and its copies, as reports tell of them."""

    def is_derivable(self) -> bool:
        """Return whether this rank's private state follows from rank and step."""

    def doubt_if_lost(self) -> str:
        """Return why to doubt results where a derivable state is lost: it has variables no step needs; empty: none."""

    def is_optimizer_at_work(self) -> bool:
        """Return whether a call of optimizer.step() is under way."""

    def standing_risk(self, *, recovers: bool = False) -> str:
        """Return why any recovery, or start from here, makes the bits doubtful; empty: none does.

        `recovers`: a recovery is under way.
        """

    def has_begun_state(self) -> bool:
        """Return whether all tensors are still those with which the code before the newest step began."""

    def kept_snapshots(self) -> tuple[Snapshot, ...]:
        """Complete ones in this process's memory."""

    def readable_checkpoints(self) -> tuple[int, ...]:
        """Versions of complete ones on disk, newest first."""

    def flip(self, action: Action) -> None:
        """Flip a bit of the state: a planned fault."""


class NoHoldings:
    """Holdings before anything was handed over."""

    def has_begun_state(self) -> bool:
        return False

    def is_derivable(self) -> bool:
        return False

    def doubt_if_lost(self) -> str:
        return ""

    def is_optimizer_at_work(self) -> bool:
        return False

    def standing_risk(self, *, recovers: bool = False) -> str:  # noqa: ARG002
        return ""

    def kept_snapshots(self) -> tuple[Snapshot, ...]:
        return ()

    def readable_checkpoints(self) -> tuple[int, ...]:
        return ()

    def flip(self, action: Action) -> None:
        """There is nothing to flip."""


class Lifecycle(Protocol):
    """The loop of steps, when the script ends or fails."""

    def at_end_of_script(self) -> None:
        """Finish with the other ranks, if the script left the loop early."""

    @property
    def saves(self) -> bool:
        """True if this job writes checkpoints, so that a last one may be made of what this process has."""

    def hold_for_save(self) -> None:
        """Answer orders until this process is killed."""
