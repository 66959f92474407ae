"""The process groups of a script in this process, and what is formed for them in the current generation."""

import contextlib
from collections.abc import Iterator

from relight.training.collectives.generation_group import GenerationGroup, GenerationGroups
from relight.training.collectives.group import RelightProcessGroup
from relight.training.collectives.groups import GroupTable
from relight.training.collectives.waits import Waits
from relight.training.torch_private.distributed.mesh import regroup


class ProcessGroups:
    """All groups of the script; each stays the same object for the whole job."""

    def __init__(self, world_size: int) -> None:
        self.all: list[RelightProcessGroup] = []  # the default group is the first
        self.table = GroupTable(world_size)
        self.waits = Waits()  # whether this rank waits for others, where ranks run different modules

    def formed(self) -> list[GenerationGroup]:
        """Return each formed group once, however many of the script's groups share it."""
        return list({id(group.formed): group.formed for group in self.all if group.formed is not None}.values())

    def break_connections(self) -> None:
        """Make collectives in flight fail at once."""
        for formed in self.formed():
            formed.break_connections()

    @property
    def is_broken(self) -> bool:
        """True if some peer's connection has ended."""
        return any(formed.is_broken() for formed in self.formed())

    def await_launched(self) -> None:
        """Return once every collective that the script has launched, on any group, has its result.

        The script may hold the work of one and wait for it later: it has it at once, also after a recovery. Sends and
        receives are not waited for. Raises RuntimeError or StepInterrupted as waiting for the operation would.
        """
        for formed in self.formed():
            formed.await_launched()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Collectives complete at once, in this process alone; then they are what they were."""
        kept = [(group, group.formed) for group in self.all]
        for group, _ in kept:
            group.formed = None
            group.detach()
        try:
            yield
        finally:
            for group, formed in kept:
                group.formed = formed

    def follow_rank(self, rank: int) -> None:
        """Have the members of a process with this rank."""
        for group in self.all:
            group.ranks = self.table.acting(group.place, group.built_as, rank)
            regroup(group, group.ranks)

    def detach(self) -> None:
        """Leave the groups of the generation."""
        for group in self.all:
            group.detach()

    def attach(self, generation_groups: GenerationGroups) -> None:
        """Send collectives through the groups of a new generation."""
        for group in self.all:
            if group.has_member:
                group.attach(generation_groups[group.ranks])
        self.waits.forget()
