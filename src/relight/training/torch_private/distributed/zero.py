"""ZeroRedundancyOptimizer.

See tests/training/test_zero_private.py. Nothing here imports it: a script that does not use it pays nothing.

Each rank of its group updates some parameters, and keeps the optimizer's state for these only; then it sends them to
the others. So what a rank has of the state are its own parameters and their optimizer state. The other parameters are
copies, made anew after each step, and after each recovery.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from relight.errors import UsageError
from relight.training.shards import Cut
from relight.training.torch_private.installed import refuse_missing_of


class ZeroOptimizers:
    """Those of a script's optimizers that divide their state among ranks."""

    def __init__(self, optimizers: dict[str, Optimizer]) -> None:
        """Raises UsageError for one that writes during the backward pass."""
        self._named: dict[str, Any] = {name: o for name, o in optimizers.items() if is_zero(o)}
        self._optimizers = list(self._named.values())
        if self._optimizers:
            refuse_missing_of("ZeroRedundancyOptimizer")
        for name, optimizer in optimizers.items():
            if is_zero(optimizer) and optimizer._overlap_with_ddp:  # type: ignore[attr-defined]
                raise UsageError(
                    f"{name} updates parameters during the backward pass (ZeroRedundancyOptimizer with "
                    "overlap_with_ddp=True), so an interrupted step could not be repeated: leave the flag out"
                )

    def __bool__(self) -> bool:
        return bool(self._optimizers)

    def cuts(self) -> Iterator[Cut]:
        """Yield the part that this rank keeps."""
        for optimizer in self._optimizers:
            yield Cut("zero", optimizer.rank, optimizer.world_size)

    def copies(self) -> set[int]:
        """The `id` of each parameter that another rank updates."""
        return {
            id(parameter)
            for optimizer in self._optimizers
            for rank, groups in enumerate(optimizer._partition_parameters())
            for group in groups
            for parameter in group["params"]
            if rank != optimizer.rank
        }

    def owner_of(self, thing: Any) -> str | None:
        """The name of the optimizer whose part for this rank `thing` is, if it is one."""
        return next((name for name, optimizer in self._named.items() if optimizer.optim is thing), None)

    def rebind(self) -> None:
        """This process has taken another rank than it was built as: it updates other parameters."""
        for optimizer in self._optimizers:
            optimizer.rank = dist.get_rank(optimizer.process_group)
            optimizer.global_rank = dist.get_global_rank(optimizer.process_group, optimizer.rank)
            optimizer._init_local_optimizer()

    def watch(self, gathering: Callable[[], AbstractContextManager[None]]) -> None:
        """Send parameters to each other inside of `gathering()`: what is cut short there is done again."""
        for optimizer in self._optimizers:
            optimizer._sync_params = _inside(gathering, optimizer._sync_params)

    def gather(self) -> None:
        """Get the parameters that other ranks update. All ranks do so together."""
        with torch.no_grad():
            for optimizer in self._optimizers:
                optimizer._sync_params()


def is_zero(optimizer: Any) -> bool:
    """Return whether it is a ZeroRedundancyOptimizer, or derived from it."""
    return any(
        kind.__name__ == "ZeroRedundancyOptimizer" and kind.__module__.startswith("torch.distributed.")
        for kind in type(optimizer).__mro__
    )


def state_of(optimizer: Optimizer) -> Any:
    """Return an optimizer's state by parameter; of this rank's part, if it is divided."""
    return optimizer.optim.state if is_zero(optimizer) else optimizer.state  # type: ignore[attr-defined]


def _inside(around: Callable[[], AbstractContextManager[None]], call: Callable[[], None]) -> Callable[[], None]:
    def called() -> None:
        with around():
            call()

    return called
