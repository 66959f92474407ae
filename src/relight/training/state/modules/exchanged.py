"""Parameters in whose place a script has put others, which neither the optimizer nor DistributedDataParallel knows."""

from typing import Any

from torch import nn

_EXCHANGED = (
    "{path}: another parameter took its place while the loop ran. The optimizer and DistributedDataParallel go on with "
    "the old one, and a replacement's would go on with the new one. Write into the parameter instead: "
    "with torch.no_grad(): parameter.copy_(...)"
)


class ExchangedParameters:
    """Sees, at the beginning and the end of a step, whether a parameter that was assigned is another one now."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[dict[str, Any], str, Any]] = {}
        self._found: set[str] = set()

    def note(self, path: str, parameters: dict[str, Any], name: str) -> None:
        """Note a parameter that is about to be assigned; `parameters` is the table of its module."""
        self._before.setdefault(path, (parameters, name, parameters[name]))

    def look(self) -> None:
        """Look what took the places of those that were noted. The very parameter may be there again."""
        for path, (parameters, name, before) in self._before.items():
            now = parameters.get(name)
            if before is not None and isinstance(now, nn.Parameter) and now is not before:
                self._found.add(path)
        self._before.clear()

    def forget(self) -> None:
        """Forget what the step under way has assigned: that is undone."""
        self._before.clear()

    def risk(self) -> str:
        """Return the reason why a recovery cannot vouch for equal bits; empty if no parameter was exchanged.

        Between two steps, or once the step under way is undone.
        """
        self.look()
        return _EXCHANGED.format(path=min(self._found)) if self._found else ""
