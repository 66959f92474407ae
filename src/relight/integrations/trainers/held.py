"""Things that trainers and callbacks hold, in the shape in which `relight.Training` takes them."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel


class HeldScheduler:
    """A scheduler that follows a metric: it steps after an evaluation, which is not the write of a step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return that of the scheduler."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Pass it on to the scheduler."""
        self._scheduler.load_state_dict(saved)


def modules_held(holders: Mapping[str, Any], known: Iterable[nn.Module]) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """Return modules with parameters that objects have as attributes, by names made of holder and attribute.

    A teacher, say; averages of torch's AveragedModel are returned by themselves. `known`: modules that are handed over
    anyway, with all in them.
    """
    seen = {id(inner) for module in known for inner in module.modules()}
    modules: dict[str, nn.Module] = {}
    averages: dict[str, Any] = {}
    for holder, thing in holders.items():
        for name, value in vars(thing).items():
            if not isinstance(value, nn.Module) or next(value.parameters(), None) is None:
                continue
            inner = {id(each) for each in value.modules()}
            if inner & seen:
                continue  # it is handed over, or wraps what is
            seen |= inner
            found: dict[str, Any] = averages if isinstance(value, AveragedModel) else modules
            found[f"{holder}_{name}"] = value
    return modules, averages
