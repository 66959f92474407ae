"""Where processes are placed: the hosts that are here, each a failure domain of its own. Pure."""

from collections import Counter
from collections.abc import Iterable

from relight.core.members import Process


class Hosts:
    """The job's hosts by the names of their agents, with what each has room for."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._lives: dict[str, str] = {}

    def __contains__(self, agent: str) -> bool:
        return agent in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, agent: str, slots: int, life: str = "") -> None:
        self._slots[agent] = slots
        self._lives[agent] = life

    def life(self, agent: str) -> str:
        """Which run of this agent was here last; empty: it is not known."""
        return self._lives.get(agent, "")

    def remove(self, agent: str) -> None:
        self._slots.pop(agent, None)
        self._lives.pop(agent, None)

    def in_order(self) -> tuple[str, ...]:
        """Names in the order of the numbers at their ends: node-2 comes before node-10."""
        return tuple(sorted(self._slots, key=_by_number))

    def initial(self, world_size: int, nodes: int) -> tuple[tuple[str, int], ...]:
        """Host and slot of each initial rank: neighbouring ranks share a host, as with torchrun."""
        per_host = world_size // nodes
        hosts = self.in_order()[:nodes]
        return tuple((hosts[rank // per_host], rank % per_host) for rank in range(world_size))

    def place(self, processes: Iterable[Process]) -> tuple[str, int]:
        """Host and slot for one more process: where the fewest standbys are, so that no single loss takes them all.

        Among those, the one with the most room.
        """
        living = [process for process in processes if process.alive and not process.failed]
        standbys = Counter(process.agent for process in living if process.rank is None)
        used = Counter(process.agent for process in living)
        host = min(self.in_order(), key=lambda name: (standbys[name], used[name] - self._slots[name]))
        taken = {process.slot for process in living if process.agent == host}
        return host, next(slot for slot in range(len(taken) + 1) if slot not in taken)


def _by_number(name: str) -> tuple[str, int]:
    stem = name.rstrip("0123456789")
    number = name[len(stem) :]
    return stem, int(number) if number else -1
