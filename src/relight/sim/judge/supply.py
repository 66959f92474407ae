"""Judge orders for hosts: no more than are wanted, nothing on hosts whose orders are over, none left at the end.

Hosts on machines that were lost twice or have reported a fault are not counted: others are ordered beside them.
"""

from collections import Counter
from collections.abc import Iterable

from relight.core.protocol import commands as cmd
from relight.core.protocol.events import AgentJoined, AgentLost, Event, HostFaulty, HostRefused

_IS_DRAINED = " is drained: "  # what the controller says when it begins to leave a host
_MAX_LOSSES = 2  # of a machine: then it is to be avoided
_PAUSE_SECONDS = 10.0  # at least, after an order that brought no host of use
_TOLERANCE_SECONDS = 1e-6
_MAX_RETURNS = 3  # of a machine, when it comes


class Supply:
    """The hosts and orders of a job, by its journal."""

    def __init__(self) -> None:
        self._here: set[str] = set()  # hosts that are to stay
        self._leaving: set[str] = set()
        self._faulty: set[str] = set()
        self._open: set[str] = set()  # orders
        self._over: set[str] = set()
        self._machines: dict[str, str] = {}  # by host
        self._failed: Counter[str] = Counter()  # losses of machines; a fault counts as two
        self._returned: Counter[str] = Counter()  # machines that were given back when they came
        self._began = False
        self._last_failed_at: float | None = None  # when an order last brought no host of use

    def judge(self, event: Event | None, commands: Iterable[cmd.Command], now: float) -> str:
        """Describe the first fault of an event and all that the controller ordered after it; or nothing.

        It does not matter whether the controller lives to carry them out.
        """
        if event is not None:
            self.hear(event, now)
        return next(filter(None, (self.fault(command, now) for command in commands)), "")

    def hear(self, event: Event, now: float) -> None:
        """Take note of hosts that come and go, and of refusals."""
        match event:
            case AgentJoined() if event.agent not in self._over | self._leaving | self._faulty:
                is_new = event.agent not in self._here
                self._here.add(event.agent)
                self._machines[event.agent] = event.machine or event.agent
                if is_new and event.agent in self._open and self._is_avoided(event.agent):
                    self._last_failed_at = now
            case HostFaulty() if event.agent in self._here | self._leaving:
                self._failed[self._machine(event.agent)] += _MAX_LOSSES
                self._here.discard(event.agent)
                self._faulty.add(event.agent)
            case AgentLost():
                self._failed[self._machine(event.agent)] += self._began and self._is_here(event.agent)
                self._forget(event.agent)
            case HostRefused() if event.order in self._open and not self._is_here(event.order):
                self._last_failed_at = now
                if not event.uncertain:
                    self._end(event.order)

    def _machine(self, agent: str) -> str:
        return self._machines.get(agent, agent)

    def _is_here(self, agent: str) -> bool:
        return agent in self._here | self._leaving | self._faulty

    def _is_avoided(self, agent: str) -> bool:
        return self._failed[self._machine(agent)] >= _MAX_LOSSES

    def _forget(self, agent: str) -> None:
        for names in (self._here, self._leaving, self._faulty):
            names.discard(agent)

    def fault(self, command: cmd.Command, now: float) -> str:
        """Describe what is wrong with a command, or return an empty string."""
        self._began = self._began or isinstance(command, cmd.Spawn)
        match command:
            case cmd.OrderHost():
                return self._ordered(command, now)
            case cmd.CancelHost():
                self._end(command.order)
            case cmd.ReleaseHost():
                return self._given_back(command)
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

    def _given_back(self, command: cmd.ReleaseHost) -> str:
        agent, machine = command.agent, self._machine(command.agent)
        has_come = agent in self._here and agent not in self._over and not command.why.startswith("again: ")
        is_avoided = self._is_avoided(agent)
        self._forget(agent)
        if not has_come:
            return ""
        self._returned[machine] += 1
        if is_avoided and self._returned[machine] <= _MAX_RETURNS:
            return ""
        return f"I22: {agent} is given back when it comes on {machine}, the {self._returned[machine]}. time"

    def _ordered(self, command: cmd.OrderHost, now: float) -> str:
        is_new = command.order not in self._open | self._over
        self._open.add(command.order)
        if command.why.startswith("again: "):
            return "" if command.order not in self._over else f"I18: {command.order} is over, and ordered again"
        if not is_new:
            return f"I18: {command.order} is ordered a second time"
        coming = (self._here | self._open) - self._leaving - self._faulty
        coming = {name for name in coming if name not in self._here or not self._is_avoided(name)}
        if len(coming) > command.wanted:
            return f"I18: {len(coming)} hosts are here or on order, and {command.wanted} are wanted"
        since = None if self._last_failed_at is None else now - self._last_failed_at
        if since is not None and since < _PAUSE_SECONDS - _TOLERANCE_SECONDS:
            return f"I18: {command.order} is ordered {since:.1f} s after an order that brought no host of use"
        return ""

    def _end(self, order: str) -> None:
        self._open.discard(order)
        self._over.add(order)
