"""Writes down, in a job of `relight doctor`, what this process protects as a step begins."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from relight.training.worker.inventory import Inventory
from relight.wire.records.examined import Examined, Protected, write_examined

_OF_MACHINE = ("torch", "devices")  # keys of such notices


def examine(parts: Inventory) -> None:
    """Write it down, at the start of a step: a recovery that goes back to here finds the same."""
    runtime = parts.runtime
    said = runtime.notices.said
    found = Examined(
        rank=runtime.rank,
        steps=parts.runtime.worker.version,
        protected=tuple(_protected(parts)),
        has_data=parts.batches.are_handed_over,
        carried=tuple(parts.carried.names),
        risk=parts.standing_risk(),
        of_machine=tuple(said[key] for key in _OF_MACHINE if key in said),
    )
    write_examined(runtime.settings.run_dir, runtime.process, found)


def _protected(parts: Inventory) -> Iterator[Protected]:
    state = parts.state
    for name, module in state.modules.items():
        yield _counted(name, module, (*module.parameters(), *module.buffers()))
    for name, optimizer in state.optimizers.items():
        of_parameters = (slots for slots in optimizer.state.values() if isinstance(slots, dict))
        moments = (value for slots in of_parameters for value in slots.values())
        yield _counted(name, optimizer, (value for value in moments if isinstance(value, torch.Tensor)))
    for name, thing in state.objects.items():
        yield _counted(name, thing)
    for name, thing in state.per_rank.items():
        yield _counted(f"per_rank[{name!r}]", thing)


def _counted(name: str, thing: Any, tensors: Iterable[torch.Tensor] = ()) -> Protected:
    sizes = [tensor.nbytes for tensor in tensors]
    return Protected(name=name, kind=type(thing).__qualname__, tensors=len(sizes), nbytes=sum(sizes))
