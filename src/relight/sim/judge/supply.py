"""Judge orders for hosts: no more than are wanted, nothing on hosts whose orders are over, none left at the end."""

from collections.abc import Iterable

from relight.core.protocol import commands as cmd
from relight.core.protocol.events import AgentJoined, AgentLost, Event, HostFaulty, HostRefused

_IS_DRAINED = " is drained: "  # what the controller says when it begins to leave a host


class Supply:
    """The hosts and orders of a job, by its journal."""

    def __init__(self) -> None:
        self._here: set[str] = set()  # hosts that are to stay
        self._leaving: set[str] = set()
        self._faulty: set[str] = set()
        self._open: set[str] = set()  # orders
        self._over: set[str] = set()

    def judge(self, event: Event | None, commands: Iterable[cmd.Command]) -> str:
        """Describe the first fault of an event and all that the controller ordered after it; or nothing.

        It does not matter whether the controller lives to carry them out.
        """
        if event is not None:
            self.hear(event)
        return next(filter(None, map(self.fault, commands)), "")

    def hear(self, event: Event) -> None:
        """Take note of hosts that come and go, and of refusals."""
        match event:
            case AgentJoined() if event.agent not in self._over | self._leaving | self._faulty:
                self._here.add(event.agent)
            case HostFaulty():
                self._here.discard(event.agent)
                self._faulty.add(event.agent)
            case AgentLost():
                self._here.discard(event.agent)
                self._leaving.discard(event.agent)
                self._faulty.discard(event.agent)
            case HostRefused() if event.order in self._open - self._here and not event.uncertain:
                self._end(event.order)

    def fault(self, command: cmd.Command) -> str:
        """Describe what is wrong with a command, or return an empty string."""
        match command:
            case cmd.OrderHost():
                return self._ordered(command)
            case cmd.CancelHost():
                self._end(command.order)
            case cmd.ReleaseHost():
                self._here.discard(command.agent)
                self._leaving.discard(command.agent)
                self._faulty.discard(command.agent)
            case cmd.Notice() if _IS_DRAINED in command.why:
                agent = command.why.partition(_IS_DRAINED)[0]
                if agent in self._here:
                    self._here.discard(agent)
                    self._leaving.add(agent)
            case cmd.RefuseDrain() if command.agent in self._leaving:
                self._leaving.discard(command.agent)
                self._here.add(command.agent)
            case cmd.Spawn() if command.agent in self._over:
                return f"I19: {command.process} is started on {command.agent}, whose order is over"
            case cmd.EndJob() if self._open:
                return f"I19: the job ends, and {sorted(self._open)} are still on order"
        return ""

    def _ordered(self, command: cmd.OrderHost) -> str:
        is_new = command.order not in self._open | self._over
        self._open.add(command.order)
        if command.why.startswith("again: "):
            return "" if command.order not in self._over else f"I18: {command.order} is over, and ordered again"
        if not is_new:
            return f"I18: {command.order} is ordered a second time"
        coming = len((self._here | self._open) - self._leaving - self._faulty)
        if coming > command.wanted:
            return f"I18: {coming} hosts are here or on order, and {command.wanted} are wanted"
        return ""

    def _end(self, order: str) -> None:
        self._open.discard(order)
        self._over.add(order)
