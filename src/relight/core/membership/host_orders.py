"""Orders for hosts: which are open, and which are over. Bookkeeping only, no decisions.

An order's name is also the name under which the agent of its host joins. Names are never used twice, so an order that
is given again, by the successor of a controller, brings one host: the second agent of that name is refused.
"""

from dataclasses import dataclass

PREFIX = "ordered-"


@dataclass
class HostOrder:
    """One order that is not over."""

    name: str
    placed_at: float
    identifier: str = ""  # the cluster's word for it
    answered: bool = False  # the supplier has placed it
    waits_for: str = ""  # in the cluster's words
    here: bool = False  # its host has joined
    idle_since: float | None = None  # it is not needed, and has held no rank since


class HostOrders:
    """The orders of one job."""

    def __init__(self) -> None:
        self.open: dict[str, HostOrder] = {}  # by name, the oldest first
        self.cancelling: dict[str, str] = {}  # name -> identifier, until the supplier says that it is done
        self._next_number = 1

    def place(self, now: float) -> HostOrder:
        """Add an order under a new name."""
        order = HostOrder(f"{PREFIX}{self._next_number}", now)
        self._next_number += 1
        self.open[order.name] = order
        return order

    def close(self, order: HostOrder) -> None:
        """Take an order off the list: its host is not expected any more, or lost, or given back."""
        del self.open[order.name]

    def is_closed(self, name: str) -> bool:
        """Return whether this is the name of an order that is over."""
        number = name.removeprefix(PREFIX)
        return number != name and number.isdecimal() and int(number) < self._next_number and name not in self.open

    @property
    def awaited(self) -> list[HostOrder]:
        """The orders whose hosts have not joined yet, the oldest first."""
        return [order for order in self.open.values() if not order.here]

    @property
    def here(self) -> list[HostOrder]:
        """The orders whose hosts have joined, the oldest first."""
        return [order for order in self.open.values() if order.here]
