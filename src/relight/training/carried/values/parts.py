"""Parts of what was handed over: a script's variable that stands for one is carried as the part's name."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from relight.training.state.modules.references import NotNameable


class Parts(Protocol):
    """Objects that were handed over, by names that are equal in every process."""

    def name_of(self, value: Any) -> Sequence[Any] | None:
        """Strings, numbers and names; None: it is no part. Raises NotNameable."""
        ...

    def at(self, name: Sequence[Any]) -> Any:
        """The part of this process that has the name. Raises LookupError."""
        ...

    def owners(self) -> Iterator[tuple[Sequence[str], Any]]:
        """Names and objects of modules and parameters, on which a script may set attributes."""
        ...

    def optimizers(self) -> Iterator[tuple[str, Any]]:
        """Optimizers by name, of which the script's own may have attributes too."""
        ...


class NoParts:
    """Nothing was handed over."""

    def name_of(self, value: Any) -> None: ...

    def at(self, name: Sequence[Any]) -> Any:
        raise LookupError(name)

    def owners(self) -> Iterator[tuple[Sequence[str], Any]]:
        return iter(())

    def optimizers(self) -> Iterator[tuple[str, Any]]:
        return iter(())


def is_part(parts: Parts, value: Any) -> bool:
    """Return whether the step's transaction keeps a value: only which one it is can be carried."""
    try:
        return parts.name_of(value) is not None
    except NotNameable:
        return True
