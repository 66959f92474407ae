"""The layouts of gradient buckets of all DDP wrappers of a script: part of the state that replicas have in common."""

from collections.abc import Iterable
from typing import Any, Protocol

from torch.nn.parallel import DistributedDataParallel

from relight.training.collectives.group import RelightProcessGroup
from relight.training.torch_private.distributed.ddp import BucketLayout


class Versioned(Protocol):
    """Knows the version of a state."""

    @property
    def version(self) -> int:
        """Optimizer steps applied to it."""


class Layouts:
    """The bucket layout of each DDP wrapper that a script has handed over, in their order."""

    def __init__(self, wrappers: Iterable[DistributedDataParallel], progress: Versioned, *, fixed: bool) -> None:
        """`progress`: of this process's state. If `fixed`, all keep their initial layouts."""
        self._progress = progress
        self._least = 0  # the version that has what was adopted last, or one before it: that of the process comes later
        self._layouts = []
        for wrapper in wrappers:
            self._layouts.append(BucketLayout(wrapper, fixed=fixed))
            if isinstance(wrapper.process_group, RelightProcessGroup):
                wrapper.process_group.serves_reducer = True

    def describe(self) -> list[Any]:
        """Return the layouts that are not initial, for `adopt`; empty if there are none."""
        version = max(self._progress.version, self._least)
        described = [layout.describe(version) for layout in self._layouts]
        return described if any(described) else []

    def adopt(self, described: list[Any]) -> None:
        """Take on the layouts of the version that this process has copied, or gone back to."""
        if len(described) not in (0, len(self._layouts)):
            return  # of a script with other wrappers, perhaps, that continues from the same checkpoint
        self._least = max((int(each[0]) for each in described if each is not None), default=0)
        for index, layout in enumerate(self._layouts):
            layout.adopt(described[index] if described else None)

    def begin_step(self) -> None:
        """Give every attempt of a step the same reducers, whatever came before."""
        version = self._progress.version
        for layout in self._layouts:
            layout.begin_step(version)

    def settle(self) -> None:
        """Fix, in front of the barrier, the layouts that the step has found out."""
        version = self._progress.version
        for layout in self._layouts:
            layout.settle(version)

    def reset(self) -> None:
        """Make the reducers ready again after a step that ended in its middle."""
        version = self._progress.version
        for layout in self._layouts:
            layout.reset(version)
