"""Messages between the processes of a job and its controller: their delays, repetitions and frames."""

from typing import TYPE_CHECKING, Any

from relight.core.protocol import events as ev
from relight.core.protocol.gathering import Gathering, subject
from relight.sim.model.worker import SimulatedWorker
from relight.sim.world import node
from relight.sim.world.hosts import FOR_EVER

if TYPE_CHECKING:
    from relight.sim.world.timed import SimulatedJob
    from relight.sim.world.world import Action

Report = tuple[SimulatedWorker, ev.Event]


class Channels:
    """Messages of one process keep their order, unless the schedule says otherwise."""

    def __init__(self, job: "SimulatedJob", hold_seconds: float) -> None:
        self._job = job
        self._hold_seconds = hold_seconds  # how long an agent lets reports of its ranks wait for each other
        self._arrivals: dict[tuple[str, str], float] = {}  # of the newest message each: the next one comes later
        self._gatherings: dict[str, Gathering[Report]] = {}  # of each host
        self._frame_latency: float | None = None  # of the frame that is being sent

    # --- from an agent --------------------------------------------------------------------------------------------
    def gather(self, worker: SimulatedWorker, event: ev.Event) -> None:
        """Send a report with those of the other ranks of its host, as core/protocol/gathering.py decides."""
        job = self._job
        host = job.host_of[worker.name]
        gathering = self._gatherings.setdefault(host, Gathering())
        about = subject(event)
        if about is None or not gathering.joins(about):
            self.send_gathered(host)
        if about is None:
            job.send_at_once(worker, event)
            return
        here = job.hosts.workers(job.hosts.called(host))
        ranks = [w.name for w in here if w.rank >= 0 and w.name not in job.agents.gone]
        if gathering.add(worker.name, about, (worker, event), ranks):
            self.send_gathered(host)
        elif len(gathering) == 1:
            job.after(self._hold_seconds, ("gathered", host))

    def send_gathered(self, host: str) -> None:
        """Send gathered reports in one frame: they arrive together."""
        together = self.take_gathered(host)
        if together and self._job.hosts.called(host).alive:
            self._frame_latency = self._latency()
            for worker, event in together:
                self._job.send_at_once(worker, event)
            self._frame_latency = None

    def take_gathered(self, host: str) -> list[Report]:
        """Take what an agent has gathered."""
        return list(self._gatherings[host].take()) if host in self._gatherings else []

    # --- on their way ---------------------------------------------------------------------------------------------
    def _latency(self) -> float:
        job = self._job
        if self._frame_latency is not None:
            return self._frame_latency
        return job.between((0.02, 1.0) if job.chance() < job.schedule.slow_messages else (0.0002, 0.004))

    def plan(self, action: "Action") -> None:
        """Plan the arrival of the message that was put last into a queue."""
        job, (direction, process) = self._job, action
        schedule = job.schedule
        queue: Any = (job.up if direction == "up" else job.down)[process]
        if not isinstance(queue[-1], node.NodeOrder):  # these go to nodes, which get each once
            if schedule.repeated_messages and job.chance() < schedule.repeated_messages:
                self._send_again(direction, process, queue[-1])
            late = schedule.late_messages and not isinstance(queue[-1], ev.WorkerFailed)
            if late and job.chance() < schedule.late_messages:
                self._send_again(direction, process, queue.pop())
                return
        arrives = max(self._arrivals.get((direction, process), 0.0), job.now + self._latency())
        self._arrivals[direction, process] = arrives
        job.after(arrives - job.now, action)

    def _send_again(self, direction: str, process: str, message: Any) -> None:
        self._job.after(self._job.between((0.0, 3.0)), ("again", direction, process, message))

    def pass_again(self, direction: str, process: str, message: Any) -> None:
        """Let a message arrive out of its order."""
        job = self._job
        if process in job.fenced or self._holds_back(direction, process, ("again", direction, process, message)):
            return
        if direction == "up":
            job.feed(message)
        else:
            node.deliver(job, process, message)

    def pass_up(self, process: str) -> None:
        """Bring the next message of a process to the controller."""
        if process not in self._job.fenced and not self._holds_back("up", process, ("up", process)):
            node.pass_up(self._job, process)

    def pass_down(self, process: str) -> None:
        """Bring the next order for a process to its node."""
        if not self._holds_back("down", process, ("down", process)):
            node.pass_down(self._job, process)

    def _holds_back(self, direction: str, process: str, action: "Action") -> bool:
        """Whether nothing passes now; then it comes once the silence is over."""
        job = self._job
        until = job.hosts.of(process).silent_until[direction]
        if direction == "up":
            until = max(until, job.controller_life.asleep_until)
        if job.now >= until:
            return False
        if until < FOR_EVER:
            job.after(until - job.now + job.shortly(), action)
        return True

    def forget(self, process: str) -> None:
        """Drop all messages from and to a process of a host that is given up."""
        for queues in (self._job.up, self._job.down):
            if process in queues:
                queues[process].clear()
