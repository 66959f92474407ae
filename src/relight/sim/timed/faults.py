"""Faults of a timed job: those of its schedule strike when their moment comes."""

from typing import TYPE_CHECKING

from relight.core.protocol.fault import Action as Fault
from relight.core.protocol.position import IN_STEP, Phase
from relight.sim.model.schedule import NetworkFault, ProcessFault
from relight.sim.model.worker.recovery import break_connections
from relight.sim.model.worker.worker import SimulatedWorker
from relight.sim.timed.hosts import Host

if TYPE_CHECKING:
    from relight.sim.timed.job import SimulatedJob

_QUIET_POINTS = frozenset(
    "START ENTERED IDLE DONE RELEASED EXITING RAISED STAYS FAILED".split()
)  # a loop goes unnoticed there
# Where a rank's state is not compared with that of others any more, or is not yet what the job trains.
_UNCOMPARED_POINTS = frozenset("START LOADING ENTERED DONE RELEASED EXITING RAISED".split())


class Faults:
    """Faults of the schedule that have not struck yet."""

    def __init__(self, job: "SimulatedJob") -> None:
        self._job = job
        self.struck = 0
        self._points: dict[str, int] = {}  # how often a process came to each point
        self._of_processes = list(job.schedule.faults)
        self._of_network = list(job.schedule.network)

    def strike_due(self, happened: int) -> None:
        """Strike by the number of events."""
        if self._of_processes:
            for fault in [f for f in self._of_processes if not f.point and f.nth <= happened]:
                living = [w for _, w in sorted(self._job.workers.items()) if w.alive]
                if living:
                    self._strike(fault, living[fault.pick % len(living)])
        if self._of_network:
            for trouble in [f for f in self._of_network if f.nth <= happened]:
                self._trouble(trouble)

    def step(self, process: str, ticket: int) -> None:
        """Let a main thread move on, struck by the faults of the point that it leaves."""
        job = self._job
        worker = job.workers[process]
        if worker.alive and ticket == worker.ticket and not (worker.frozen or worker.hung):
            count = self._points[worker.point] = self._points.get(worker.point, 0) + 1
            if self._of_processes:
                for fault in [f for f in self._of_processes if f.point == worker.point and f.nth == count]:
                    self._strike(fault, worker)
            if worker.machine.started == job.schedule.bug_step and worker.point == "FORWARD" and not worker.rank:
                self._meet_the_bug(worker)
        worker.wake(ticket)

    # --- of processes ---------------------------------------------------------------------------------------------
    def _strike(self, fault: ProcessFault, worker: SimulatedWorker) -> None:
        job = self._job
        self._of_processes.remove(fault)
        if not worker.alive or worker.frozen or worker.hung:
            return
        action = _possible(fault.action, worker)
        self._mark(action, worker, f"{action} {worker.name} (rank {worker.rank}) in {worker.point}")
        self.struck += 1
        match action:
            case Fault.FREEZE:
                worker.frozen = True
                job.watcher.watch()
                if fault.thaw_seconds:
                    job.after(fault.thaw_seconds, ("thaw", worker.name))
            case Fault.LOOP:
                worker.hung = True
                worker.frozen = fault.holds_lock
                job.watcher.watch()
            case Fault.RAISE:
                worker.raise_in_script(f"ValueError: number {self.struck}")
            case Fault.EXIT:
                worker.die(100 + self.struck)
            case Fault.CUT:
                break_connections(worker)
            case Fault.FLIP_PARAMETER:
                worker.state = worker.state._replace(content=hash((11, worker.state.content, self.struck)))
                job.checker.wrong.flip(worker.state.content)
                job.watcher.watch()  # should reports of the ranks be lost with their agent, it is their wait that shows
            case _:
                worker.die(-9)

    def _mark(self, action: Fault, worker: SimulatedWorker, text: str) -> None:
        self._job.note("FAULT", text)
        self._job.checker.struck(action, worker)
        worker.struck = True

    def _meet_the_bug(self, worker: SimulatedWorker) -> None:
        if worker.alive and not (worker.frozen or worker.hung):
            self._mark(Fault.RAISE, worker, f"a bug of the script in {worker.name} (rank {worker.rank})")
            worker.raise_in_script("ValueError: the same again")

    # --- between processes ----------------------------------------------------------------------------------------
    def _trouble(self, trouble: NetworkFault) -> None:
        job = self._job
        self._of_network.remove(trouble)
        if job.end is not None:
            return
        job.note("FAULT", f"{trouble.kind} {trouble.seconds:g} s up={trouble.up} down={trouble.down}")
        job.checker.disturbed.add(trouble.kind)
        self.struck += 1
        until = job.now + trouble.seconds
        match trouble.kind:
            case "silence":
                be_silent(job.hosts.numbered(trouble.host), until, up=trouble.up, down=trouble.down)
            case "asleep":
                job.controller_life.sleep(until)
            case "blackhole":
                for worker in job.workers.values():
                    if worker.alive and worker.group_generation:
                        job.links.lose_data(worker.group_generation)
                        worker.struck = True  # on some ranks a collective is over, and on others not: these get blamed
                job.watcher.watch()
            case "agent":
                job.agent_life.die(job.hosts.numbered(trouble.host), until)
            case "controller":
                job.controller_life.doom(trouble)
            case _:
                job.hosts.strike(trouble)


def be_silent(host: Host, until: float, *, up: bool, down: bool) -> None:
    """Let nothing pass between a host and the controller for a while."""
    for direction, yes in (("up", up), ("down", down)):
        if yes:
            host.silent_until[direction] = max(host.silent_until[direction], until)


def _possible(action: Fault, worker: SimulatedWorker) -> Fault:
    """A script can raise only where it runs, and an endless loop is a hang only where others wait for its rank."""
    runs = worker.page.phase in IN_STEP or worker.page.phase in (Phase.OUTSIDE, Phase.STARTING)
    if action is Fault.RAISE and (not runs or worker.point in _QUIET_POINTS):
        return Fault.KILL
    if action is Fault.LOOP and worker.point in _QUIET_POINTS:
        return Fault.KILL
    if action is Fault.FLIP_PARAMETER and (worker.machine.blank or worker.point in _UNCOMPARED_POINTS):
        return Fault.KILL
    return action
