"""Agents of a timed job: how they notice deaths, what is lost with one, and what its successor finds.

Modelled, not production: agent/processes/adoption.py, and `attach` of server/network/agents.py. What agents decide is
production code: see agent.py.
"""

from typing import TYPE_CHECKING

import msgspec

from relight.agent.decisions.host import Dying, Started
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Spawn
from relight.core.protocol.position import Position
from relight.sim.model.worker.worker import SimulatedWorker
from relight.sim.timed.faults import be_silent
from relight.sim.timed.hosts import Host
from relight.sim.world import node

if TYPE_CHECKING:
    from relight.sim.timed.job import SimulatedJob

_NOTICE_SECONDS = (0.0005, 0.01)


class AgentLife:
    """The deaths of agents, and what each notices of its processes."""

    def __init__(self, job: "SimulatedJob") -> None:
        self._job = job
        self._unwitnessed: set[str] = set()  # processes that ended, and then their agent before it could report it
        self._unconnected: set[str] = set()  # frozen processes that have not met the successor of their agent

    # --- deaths ---------------------------------------------------------------------------------------------------
    def plan_notice(self, worker: SimulatedWorker, status: int) -> None:
        """Plan the moments at which a death is seen: by the main thread's end, and by the end of the process."""
        job = self._job
        job.note("exit", f"{worker.name} (rank {worker.rank}) {status}")
        seen = job.between(_NOTICE_SECONDS)
        job.after(seen, ("dying", worker.name))
        job.after(seen + 0.5 * job.chance(), ("dead", worker.name, status))

    def report_dying(self, process: str) -> None:
        """Report that a main thread has ended, before the memory of its process is freed."""
        job = self._job
        job.agent_of(process).feed(job, Dying(process, job.workers[process].page.position(counters=True), 1))

    def report_exit(self, process: str, status: int) -> None:
        """Report that a process has ended."""
        if process not in self._unwitnessed:
            node.report_exit(self._job, process, status)

    # --- the death of an agent ------------------------------------------------------------------------------------
    def die(self, host: Host, until: float) -> None:
        """Lose the messages that an agent had not passed on, both ways; later ones wait for its successor."""
        job = self._job
        if not host.alive:
            return
        if host.name in job.agents:
            job.agents[host.name] = job.agents[host.name].successor()
        for queues in (job.up, job.down):
            for process in sorted(queues):
                if job.host_of[process] == host.name and job.chance() < 0.5:
                    queues[process].clear()
        for worker in job.hosts.workers(host):
            if worker.alive:
                continue
            worker.page.slots = [None, None]  # with the last mapping of its page
            self._unwitnessed.add(worker.name)  # its successor cannot say how it ended
            queue = job.up.get(worker.name)
            if queue is not None:
                left = [m for m in queue if not isinstance(m, ev.ProcessExited | ev.ProcessDying)]
                queue.clear()
                queue.extend(left)
        be_silent(host, until, up=True, down=True)
        job.after(until - job.now, ("agent_back", host.name))

    def come_back(self, host_name: str) -> None:
        """Let a successor adopt the processes of a host."""
        job = self._job
        host = job.hosts.called(host_name)
        if not host.known:
            self._adopt(host)
            return
        if job.several_hosts and host.alive and max(host.silent_until.values()) > job.now:
            job.after(max(host.silent_until.values()) - job.now, ("agent_back", host_name))
            return
        for name in sorted(job.spawned - job.fenced):
            if job.host_of[name] != host_name:
                continue
            worker = job.workers.get(name)
            coming = any(isinstance(message, Spawn) for message in job.down[name])
            if not coming and (worker is None or not worker.alive):
                job.feed(self.unseen_exit(name))
        job.feed(ev.AgentJoined(agent=host_name, slots=host.slots, spare=host.spare, machine=host.machine))
        self._adopt(host)

    def _adopt(self, host: Host) -> None:
        job = self._job
        for worker in job.hosts.workers(host):
            if worker.alive:
                agent = job.agent_of(worker.name)
                agent.feed(job, Started(worker.name, 1, agent.table[worker.name]))
                self._connect_again(worker)

    def _connect_again(self, worker: SimulatedWorker) -> None:
        """Connect a process to the agent's successor. A frozen one does so once it is not frozen any more."""
        if worker.frozen:
            self._unconnected.add(worker.name)
            return
        if worker.last_report is not None:
            self._job.send(worker, worker.last_report)
        worker.say_again()

    def thaw(self, process: str) -> None:
        """Let a frozen process run again (SIGCONT)."""
        worker = self._job.workers[process]
        if worker.hung:
            return
        worker.thaw()
        if worker.alive and process in self._unconnected and process not in self._job.fenced:
            self._unconnected.remove(process)
            self._connect_again(worker)

    def unseen_exit(self, process: str) -> ev.ProcessExited:
        """Return the report of a death that no agent saw. For a known death, it changes nothing."""
        worker = self._job.workers.get(process)
        position = Position() if worker is None else worker.page.position(counters=True)
        return ev.ProcessExited(
            process=process,
            exit_status=None,
            evidence="ended while its agent was away",
            position=msgspec.structs.replace(position, private_versions=(-1, -1)),
            noticed_ns=1,
        )
