"""The life of a timed job's controller: asleep for a while, dead, and replaced by a successor that replays the journal.

Modelled, not production: server.py, takeover.py, and `attach` of server/network/agents.py.
"""

from typing import TYPE_CHECKING

from relight.core.protocol import events as ev
from relight.core.protocol.commands import Spawn
from relight.core.protocol.record import Record
from relight.core.replay import replay
from relight.sim.model.schedule import NetworkFault

if TYPE_CHECKING:
    from relight.sim.timed.job import SimulatedJob

# What an agent repeats until it is confirmed; deadlines, suspicions and shutdowns are the controller's own.
_REPORTED = (
    *(ev.ProcessStarted, ev.ProcessDying, ev.ProcessExited, ev.TrainingEntered, ev.StandbyReady, ev.Stopped),
    *(ev.Restored, ev.RestoreFailed, ev.StateDiffers, ev.StepResumed, ev.WorkerFailed, ev.CollectiveFailed),
    *(ev.TrainingDone, ev.WorkerReleased, ev.AgentJoined, ev.BitsDoubted),
)


class ControllerLife:
    """The controller of a simulated job, while there is one that listens, and the events that wait for one."""

    def __init__(self, job: "SimulatedJob") -> None:
        self._job = job
        self.asleep_until = 0.0
        self.is_away = False  # there is no controller
        self._death: NetworkFault | None = None  # it dies with the next event
        self._unheard: list[ev.Event] = []  # what agents keep for it meanwhile
        self._unseen: set[str] = set()  # processes whose unseen end the controller that found out did not survive

    @property
    def deaf_until(self) -> float:
        """Until when no controller listens."""
        return max(self.asleep_until, self._job.now + 1.0 if self.is_away else 0.0)

    def sleep(self, until: float) -> None:
        """Stop its process for a while; its deadlines pass meanwhile."""
        self.asleep_until = max(self.asleep_until, until)

    def doom(self, death: NetworkFault) -> None:
        """Let it die with the next event."""
        self._death = death

    def take_death(self) -> NetworkFault | None:
        """The death that comes with the event in hand."""
        death, self._death = self._death, None
        return death

    def keep(self, event: ev.Event) -> None:
        """Keep an event that no controller hears."""
        if _is_unseen(event):
            self._unseen.add(event.process)  # type: ignore[union-attr]
        elif isinstance(event, _REPORTED):
            self._unheard.append(event)

    def die(self, death: NetworkFault) -> None:
        """Lose the controller. Its orders on their way may be lost with it, the newest first."""
        job = self._job
        job.note("FAULT", f"the controller is dead, {death.sent} orders sent")
        self.is_away = True
        for process in sorted(job.down):
            queue = job.down[process]
            while queue and job.chance() < 0.5:
                queue.pop()
        said = [e.event for e in job.journal if isinstance(e.event, _REPORTED) and not _is_unseen(e.event)]
        self._unheard += said[max(0, len(said) - death.repeated) :]
        job.after(death.seconds, ("controller_back",))

    def come_back(self) -> None:
        """Let a successor replay the journal, and hear the events that waited."""
        job = self._job
        records = [Record(entry.now, entry.event) for entry in job.journal]
        job.controller = replay(job.settings, records, job.make_controller)
        job.watcher.restart()
        self.is_away = False
        if job.controller.ended is not None:
            job.end = job.controller.ended
            job.checker.final(job.end, job.controller.report())
            return
        job.feed(ev.ControllerRestarted())
        if self.is_away:
            return
        self._unheard += [job.agent_life.unseen_exit(name) for name in self._never_started()]
        while self._unheard and not self.is_away:
            event = self._unheard.pop(0)
            if self._can_still_say(event):
                job.feed(event)

    def _can_still_say(self, event: ev.Event) -> bool:
        """Return whether an event may be reported again: not from a host that was given up in between."""
        if isinstance(event, ev.AgentJoined):
            return self._job.hosts.called(event.agent).known
        return getattr(event, "process", "") not in self._job.fenced

    def _never_started(self) -> list[str]:
        """Processes that the controller believes in, and that no node has or will have."""
        job = self._job
        believed = [p.name for p in job.controller.members.processes.values() if p.alive]
        coming = {name for name, queue in job.down.items() if any(isinstance(message, Spawn) for message in queue)}
        ended = {name for name in self._unseen if name in job.workers and not job.workers[name].alive}
        self._unseen.clear()
        known = (job.workers.keys() - ended) | coming | job.fenced
        return [name for name in believed if name not in known]


def _is_unseen(event: ev.Event | None) -> bool:
    """Return whether a controller found out the end of a process because an agent came back without it."""
    return isinstance(event, ev.ProcessExited) and event.exit_status is None
