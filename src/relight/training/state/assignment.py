"""This rank's part of the job: of a divided state, and of a step's batches."""

from dataclasses import dataclass

from relight.training.state.tracked import TrackedState


@dataclass
class Assignment:
    """One object for the life of a process. `follow` is called when it takes another rank than it was built as."""

    shard: str = ""  # key of its part of a divided state; empty: all of it
    batch_index: int = 0  # which of a step's batches it computes on

    def follow(self, state: TrackedState, rank: int, world_size: int) -> None:
        """Become the assignment of `rank`. Raises UsageError if some tensor is not in a form that could be restored."""
        self.shard = state.division.shard(world_size)
        self.batch_index = state.division.batch_index(rank, world_size)
