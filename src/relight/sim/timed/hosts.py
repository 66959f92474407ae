"""Hosts of a simulated job: what passes between them and the controller, how they are lost, cut off, and come back.

Modelled, not production: server.py (`_lose_agent`, `_welcome_agent`), agents.py, and TCP, which repeats
what was lost as long as the connection lives. What is decided about hosts is decided by the production core.
The controller runs on the first host, which therefore is never lost.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from relight.core.protocol import events as ev
from relight.core.protocol.commands import Kill
from relight.core.protocol.fault import Action as Fault
from relight.sim.model.schedule import NetworkFault
from relight.sim.model.worker.worker import SimulatedWorker

if TYPE_CHECKING:
    from relight.sim.timed.job import SimulatedJob

# The kernel gives a silent connection up after so long, and the server waits for another one: as with an
# --agent-timeout-seconds of 23, counted from the last sign of life.
CONNECTION_SECONDS = 8.0
RETURN_SECONDS = 15.0
FOR_EVER = 1e9


class Host:
    """One machine. Moments are of the virtual clock."""

    def __init__(self, name: str, slots: int, *, spare: bool = False, machine: str = "") -> None:
        """`machine`: the cluster's name for it, if that is another one."""
        self.name = name
        self.machine = machine
        self.slots = slots
        self.spare = spare
        self.alive = True
        self.known = False  # to the controller: joined, and not lost since
        self.silent_until = {"up": 0.0, "down": 0.0}  # nothing passes to the controller, or from it
        self.apart_until = 0.0  # nothing passes to other hosts, or from them


class Hosts:
    """All of a job."""

    def __init__(self, job: "SimulatedJob", count: int, slots: int, spares: int) -> None:
        """`spares` more are there from the start, and join in any order with the `count` nodes of the job."""
        self._job = job
        self._hosts = {f"node-{number}": Host(f"node-{number}", slots) for number in range(count)}
        for number in range(count, count + spares):
            self._hosts[f"spare-{number}"] = Host(f"spare-{number}", slots, spare=True)
        self._slots = slots

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def numbered(self, number: int) -> Host:
        """Counted round."""
        return list(self._hosts.values())[number % len(self._hosts)]

    def called(self, name: str) -> Host:
        """The host of a name."""
        return self._hosts[name]

    def has(self, name: str) -> bool:
        """Return whether a host of this name is or was here."""
        return name in self._hosts

    def of(self, process: str) -> Host:
        """Return the host on which a process runs, or is about to be started."""
        return self._hosts[self._job.host_of[process]]

    def workers(self, host: Host) -> list[SimulatedWorker]:
        """Workers that were started there, by name."""
        workers = self._job.workers
        return [workers[name] for name in sorted(workers) if self._job.host_of[name] == host.name]

    def apart_until(self, one: str, other: str) -> float:
        """Until when nothing passes between two processes; 0: it does."""
        mine, theirs = self.of(one), self.of(other)
        if mine is theirs:
            return 0.0
        if not (mine.alive and theirs.alive):
            return FOR_EVER
        until = max(mine.apart_until, theirs.apart_until)
        return until if until > self._job.now else 0.0

    def apart_from_any(self, process: str, others: list[str]) -> float:
        """Until when it is cut off from one of these."""
        return max((self.apart_until(process, other) for other in others), default=0.0)

    def perform(self, what: str, name: str) -> None:
        """Let something happen to a host, or to a process of one."""
        getattr(self, what)(name)

    # --- what happens to them -------------------------------------------------------------------------------------
    def joins(self, name: str, machine: str = "") -> None:
        """An agent connects for the first time."""
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = Host(name, self._slots, spare=True, machine=machine)
        if host.alive:
            self._welcome(host)

    def strike(self, fault: NetworkFault) -> None:
        """A fault of a host other than the first."""
        job = self._job
        others = list(self._hosts.values())[1:]
        if fault.kind == "join":
            self.joins(f"spare-{len(self._hosts)}", self._failed_machine() if job.schedule.remade else "")
            return
        if not others:
            return
        host = others[fault.host % len(others)]
        if not host.alive:
            return
        if fault.kind == "drain":
            if host.known:
                job.checker.disturbed.add("drain")
                job.feed(ev.HostDraining(agent=host.name, reason="maintenance"))
            return
        if fault.kind == "faulty":
            if host.known:
                job.checker.disturbed.add("drain")  # ranks move, or stay, and nothing is repeated
                job.feed(ev.HostFaulty(agent=host.name, reason="a device is lost"))
            return
        if fault.kind == "host":
            self._lose(host, silently=fault.up)
            return
        until = job.now + fault.seconds
        for direction, yes in (("up", fault.up), ("down", fault.down)):
            if yes:
                host.silent_until[direction] = max(host.silent_until[direction], until)
        if fault.kind == "cut":
            host.apart_until = max(host.apart_until, until)
            for worker in job.workers.values():  # on some hosts a collective is over, and on others not
                worker.struck = worker.struck or (worker.alive and worker.group_generation > 0)
        job.after(CONNECTION_SECONDS, ("host", "hangs_up", host.name))
        job.after(CONNECTION_SECONDS + RETURN_SECONDS, ("host", "given_up", host.name))
        job.after(fault.seconds + 0.01, ("host", "heals", host.name))

    def _failed_machine(self) -> str:
        """Return one that the job would rather not have; empty if there is none."""
        hosts = self._job.controller.job.hosts
        return next(iter((*hosts.lost_machines, *(machine for machine, _ in hosts.faults))), "")

    def _lose(self, host: Host, *, silently: bool) -> None:
        """Switch the machine off. Silently: no connection to it ends by that."""
        job = self._job
        for worker in self.workers(host):
            if not worker.alive:
                continue
            if silently and worker.group_generation:
                job.links.lose_data(worker.group_generation)
            job.checker.struck(Fault.KILL, worker)
            worker.struck = True
        host.alive = False
        host.silent_until = {"up": FOR_EVER, "down": FOR_EVER}
        for worker in self.workers(host):
            worker.die(-9)
            worker.page.slots = [None, None]
        job.after(CONNECTION_SECONDS + RETURN_SECONDS, ("host", "given_up", host.name))

    def hangs_up(self, name: str) -> None:
        """End the connection for both directions where one is silent; a new one needs both."""
        host = self._hosts[name]
        until = max(host.silent_until.values())
        if until > self._job.now:
            host.silent_until = {"up": until, "down": until}

    def given_up(self, name: str) -> None:
        """server.py, `_lose_agent`: it has not come back."""
        job, host = self._job, self._hosts[name]
        if not host.known or max(host.silent_until.values()) <= job.now:
            return
        if job.now < job.controller_life.deaf_until:  # its time begins anew with a new controller
            job.after(job.controller_life.deaf_until - job.now + RETURN_SECONDS, ("host", "given_up", name))
            return
        host.known = False
        for process, place in sorted(job.host_of.items()):
            if place == name and process not in job.fenced:
                job.fenced.add(process)
                job.channels.forget(process)
        lost = ev.AgentLost(agent=name, evidence="no connection to its agent")
        job.checker.lost_host(lost)
        job.note("FAULT", f"{name} is given up")
        job.feed(lost)

    def heals(self, name: str) -> None:
        """Make the host reachable again, unless something else is in the way."""
        job, host = self._job, self._hosts[name]
        for worker in list(job.workers.values()):
            if worker.alive and worker.copying is not None and not worker.copying.over:
                job.asked(worker)
        if not host.alive or host.known or job.end is not None:
            return
        wait = max(*host.silent_until.values(), job.controller_life.deaf_until) - job.now
        if wait > 0:
            job.after(wait + 0.01, ("host", "heals", name))
            return
        for worker in self.workers(host):  # agents.py, `attach`: "this job does not know it"
            if worker.alive:
                job.after(0.01, ("host", "kills", worker.name))
        self._welcome(host)

    def kills(self, process: str) -> None:
        """An agent is to kill the processes that lived on."""
        unknown = Kill(process=process, why="this job does not know it")
        self._job.agent_of(process).obey(self._job, process, unknown)

    def _welcome(self, host: Host) -> None:
        if host.known or self._job.end is not None:
            return
        if self._job.now < self._job.controller_life.deaf_until:
            self._job.after(self._job.controller_life.deaf_until - self._job.now + 0.01, ("host", "joins", host.name))
            return
        host.known = True
        joined = ev.AgentJoined(agent=host.name, slots=host.slots, spare=host.spare, machine=host.machine)
        self._job.checker.placement.hear(joined)
        self._job.feed(joined)
