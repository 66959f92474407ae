"""Messages between the processes of a job and its controller: their delays, repetitions and frames."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from relight.agent.decisions.host import ORDERS
from relight.core.protocol import events as ev
from relight.sim.timed.hosts import FOR_EVER
from relight.sim.world import node

if TYPE_CHECKING:
    from relight.sim.timed.job import SimulatedJob
    from relight.sim.world.world import Action


class Channels:
    """Messages of one process keep their order, unless the schedule says otherwise."""

    def __init__(self, job: "SimulatedJob") -> None:
        self._job = job
        self._arrivals: dict[tuple[str, str], float] = {}  # of the newest message each: the next one comes later
        self._frame_latency: float | None = None  # of the frame that is being sent

    def plan_together(self, events: Sequence[Any]) -> None:
        """Send reports of several processes in one frame: they arrive together."""
        self._frame_latency = self._latency()
        for event in events:
            self._job.post(event.process, event)
        self._frame_latency = None

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
        if not isinstance(queue[-1], ORDERS):  # these go to agents, which get each once
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
            job.agent_of(process).obey(job, process, message)

    def pass_up(self, process: str) -> None:
        """Bring the next message of a process to the controller."""
        if process not in self._job.fenced and not self._holds_back("up", process, ("up", process)):
            node.pass_up(self._job, process)

    def pass_down(self, process: str) -> None:
        """Bring the next order for a process to its agent."""
        if not self._holds_back("down", process, ("down", process)):
            node.pass_down(self._job, process)

    def _holds_back(self, direction: str, process: str, action: "Action") -> bool:
        """Return whether nothing passes now; then it comes once the silence is over."""
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
