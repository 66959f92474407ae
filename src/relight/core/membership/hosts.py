"""Placement of processes on the hosts that are here, each a failure domain of its own. Pure."""

from collections import Counter
from collections.abc import Iterable

from relight.core.membership.members import Process
from relight.core.membership.recent import Recent

MAX_LOSSES = 2  # of one host: then it is used only where no other one has room
MAX_FAULTS = 256  # machines whose faults are known
MAX_RETURNS = 3  # of one machine that is to be avoided: a cluster that gives it again and again has no other one


class Hosts:
    """The job's hosts by the names of their agents, with what each has room for."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._lives: dict[str, str] = {}
        self._machines: dict[str, str] = {}
        self._spares: set[str] = set()
        self._losses: Recent[str] = Recent()
        self._faults: dict[str, str] = {}  # by machine: the first that its hardware reported
        self._released: Recent[str] = Recent()  # lives of agents that were given back
        self._returned: Recent[str] = Recent()  # machines that were given back when they came, to have others instead
        self.faulty: dict[str, str] = {}  # hosts that are here, and have reported a fault while they were
        self.draining: dict[str, str] = {}  # hosts that are to be left, and why

    def __contains__(self, agent: str) -> bool:
        return agent in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, agent: str, slots: int, life: str = "", *, spare: bool = False, machine: str = "") -> None:
        self._slots[agent] = slots
        self._lives[agent] = life
        self._machines[agent] = machine or agent
        if spare:
            self._spares.add(agent)
        else:
            self._spares.discard(agent)

    @property
    def spares(self) -> int:
        """The number of hosts that offer room only for standbys and replacements."""
        return len(self._spares)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The hosts that the job may start on, in order."""
        return tuple(name for name in self.in_order() if name not in self._spares)

    def life(self, agent: str) -> str:
        """Return the run of this agent that was here last; empty: it is not known."""
        return self._lives.get(agent, "")

    def remove(self, agent: str) -> None:
        self._slots.pop(agent, None)
        self._lives.pop(agent, None)
        self._machines.pop(agent, None)
        self._spares.discard(agent)
        self.draining.pop(agent, None)
        self.faulty.pop(agent, None)

    def release(self, agent: str) -> None:
        """Give a host back. Its agent may connect once more before it hears so."""
        self._released.add(f"{agent} {self.life(agent)}")
        self.remove(agent)

    def send_back(self, agent: str, life: str, machine: str) -> int:
        """Give a host back that has come on a machine that is to be avoided; return how often it may come again."""
        self._released.add(f"{agent} {life}")
        self._returned.add(machine)
        return MAX_RETURNS - self._returned[machine]

    def may_send_back(self, machine: str) -> bool:
        """Return whether another machine may come if this one, which is to be avoided, is given back."""
        return self._returned[machine] < MAX_RETURNS

    def was_released(self, agent: str, life: str) -> bool:
        """Return whether this run of an agent was given back. Another run of it is welcome."""
        return self._released[f"{agent} {life}"] > 0

    def machine(self, agent: str) -> str:
        """Return the name that the cluster has for this host, or its agent's name if that is not known."""
        return self._machines.get(agent, agent)

    def note_loss(self, machine: str) -> None:
        """Count that this machine was lost while the job was on its way."""
        self._losses.add(machine)

    def note_fault(self, agent: str, reason: str) -> bool:
        """Note that the hardware of this host has reported a fault; return False if one was known before."""
        machine = self.machine(agent)
        is_new = machine not in self._faults and len(self._faults) < MAX_FAULTS
        if is_new:
            self._faults[machine] = self.faulty[agent] = reason
        return is_new

    def why_avoided(self, agent: str) -> str:
        """Return why another host is better than this one, or an empty string."""
        return self.flaw(self.machine(agent))

    def flaw(self, machine: str) -> str:
        """Return why another machine is better than this one, or an empty string."""
        if fault := self._faults.get(machine):
            return f"reported a fault ({fault})"
        return "was lost twice in this job" if self._losses[machine] >= MAX_LOSSES else ""

    def is_unreliable(self, agent: str) -> bool:
        """Return whether another host is better than this one: it was lost too often, or has reported a fault."""
        machine = self.machine(agent)
        return machine in self._faults or self._losses[machine] >= MAX_LOSSES

    @property
    def lost_machines(self) -> tuple[str, ...]:
        """Machines that were lost so often that others are better."""
        return tuple(sorted(machine for machine, count in self._losses.items() if count >= MAX_LOSSES))

    @property
    def faults(self) -> tuple[tuple[str, str], ...]:
        """Machines whose hardware has reported a fault, each with the first one."""
        return tuple(sorted(self._faults.items()))

    @property
    def unwanted_machines(self) -> tuple[str, ...]:
        """Machines that another host must not be: those that are here, were lost twice, or have reported a fault."""
        return tuple(sorted({*self.lost_machines, *self._faults, *self._machines.values()}))

    @property
    def staying(self) -> int:
        """The number of hosts that are neither to be left nor to be avoided."""
        return sum(1 for name in self._slots if name not in self.draining and not self.is_unreliable(name))

    def in_order(self) -> tuple[str, ...]:
        """Names in the order of the numbers at their ends: node-2 comes before node-10."""
        return tuple(sorted(self._slots, key=_by_number))

    def initial(self, world_size: int, nodes: int) -> tuple[tuple[str, int], ...]:
        """Host and slot of each initial rank: neighbouring ranks share a node, as with torchrun. Spares get none."""
        per_host = world_size // nodes
        hosts = self.nodes[:nodes]
        return tuple((hosts[rank // per_host], rank % per_host) for rank in range(world_size))

    def free_slots(self, processes: Iterable[Process], *, without: str) -> int:
        """The number of slots that no process has, on hosts that are to stay."""
        used = Counter(process.agent for process in processes if process.alive and not process.failed)
        left = {without, *self.draining}
        return sum(max(0, slots - used[name]) for name, slots in self._slots.items() if name not in left)

    def inviting_slots(self, processes: Iterable[Process]) -> int:
        """The number of slots to which a standby may move from a crowded host."""
        used = Counter(process.agent for process in processes if process.alive and not process.failed)
        hosts = [name for name in self._slots if name not in self.draining and not self.is_unreliable(name)]
        return sum(max(0, self._slots[name] - used[name]) for name in hosts)

    def crowded(self, processes: Iterable[Process]) -> list[Process]:
        """The standbys that belong on another host, newest first: they share a slot, or theirs is to be avoided."""
        living = [process for process in processes if process.alive and not process.failed]
        used = Counter(process.agent for process in living)
        out: list[Process] = []
        for process in reversed(living):
            crowds = used[process.agent] > self._slots.get(process.agent, 0) or self.is_unreliable(process.agent)
            if process.rank is None and crowds:
                used[process.agent] -= 1
                out.append(process)
        return out

    def place(self, processes: Iterable[Process]) -> tuple[str, int]:
        """Host and slot for one more process: one with a free slot, so that two ranks need not share a device.

        Among those, one that need not be avoided; then where the fewest standbys are, so that no single loss
        takes them all; then the one with the most room.
        """
        living = [process for process in processes if process.alive and not process.failed]
        standbys = Counter(process.agent for process in living if process.rank is None)
        used = Counter(process.agent for process in living)

        def preference(name: str) -> tuple[bool, bool, int, int]:
            taken, room = used[name], self._slots[name]
            return taken >= room, self.is_unreliable(name), standbys[name], taken - room

        hosts = [name for name in self.in_order() if name not in self.draining]
        host = min(hosts or self.in_order(), key=preference)
        taken = {process.slot for process in living if process.agent == host}
        return host, next(slot for slot in range(len(taken) + 1) if slot not in taken)


def _by_number(name: str) -> tuple[str, int]:
    stem = name.rstrip("0123456789")
    number = name[len(stem) :]
    return stem, int(number) if number else -1
