"""A setting that cannot be honoured: its name, why, and what to do instead."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from relight.errors import UsageError

FIRST = "before the first step"
WHEN_MET = "when it is met"


@dataclass(frozen=True)
class Refusal:
    """A row of a table.

    Args:
        setting: as a script writes it.
        why: the reason.
        instead: what to do.
        applies: returns whether objects of the framework have the setting; None: code that meets it asks by itself.
        when: the job ends.
    """

    setting: str
    why: str
    instead: str
    applies: Callable[..., Any] | None = None
    when: str = FIRST

    def error(self, by: str, detail: str = "") -> UsageError:
        """Return the exception; `by` is the integration, `detail` what was found, in place of the general name."""
        return UsageError(f"{by}: {detail or self.setting}: {self.why}. Instead: {self.instead}")


def refuse(table: Iterable[Refusal], by: str, *things: Any) -> None:
    """Raise UsageError for the first row that applies to these objects."""
    for row in table:
        if row.applies is not None and row.applies(*things):
            raise row.error(by)


LATE_CHANGE = Refusal(
    "a hook that changes the dataset, with workers of the loader",
    "the workers have copies of it, and read ahead",
    "read it without workers (num_workers=0, dataloader_num_workers=0)",
    when=WHEN_MET,
)
