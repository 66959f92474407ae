"""The times and the directory of checkpoints, as `Training.checkpoint` asked."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CheckpointSchedule:
    """Never, until a script asks."""

    root: Path = Path()
    every: int = 0  # steps; 0: no checkpoints
    keep: int = 0  # complete checkpoints
    resume: bool = True  # from the newest checkpoint there is

    def is_due(self, version: int) -> bool:
        """Return whether a checkpoint of this version is to be written."""
        return bool(self.every and version and version % self.every == 0)
