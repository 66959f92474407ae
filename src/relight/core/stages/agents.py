"""Events about a host, in any stage: its agent joins, joins again, or is lost."""

import msgspec

from relight.core.job.draining import Draining
from relight.core.job.failing import Failing
from relight.core.job.job import Job, Stage
from relight.core.job.reserve import Reserve
from relight.core.job.shutdown import Shutdown
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, Notice, RefuseDrain, ReleaseHost
from relight.core.stages.finishing import Finishing
from relight.core.stages.repeating import Repeating
from relight.core.stages.restoring import Restoring
from relight.core.stages.starting import Starting
from relight.core.stages.stopping import Stopping


class Agents:
    """Hosts that come and go."""

    def __init__(
        self,
        job: Job,
        reserve: Reserve,
        starting: Starting,
        failing: Failing,
        stopping: Stopping,
        restoring: Restoring,
        finishing: Finishing,
        repeating: Repeating,
        shutdown: Shutdown,
        draining: Draining,
    ) -> None:
        self._job, self._reserve, self._starting, self._failing = job, reserve, starting, failing
        self._stopping, self._restoring = stopping, restoring
        self._finishing, self._repeating = finishing, repeating
        self._shutdown, self._draining = shutdown, draining

    def on_joined(self, event: ev.AgentJoined, now: float) -> list[Command]:
        """A host joins; the last node that was waited for starts the ranks. A known one hears its orders again."""
        job, nodes = self._job, self._job.settings.nodes
        if event.agent in job.hosts:  # the same agent again, after a restart: its workers live on
            job.hosts.add(event.agent, event.slots, event.life, spare=event.spare, machine=event.machine)
            self._forget_pages(event.agent)
            return self._repeating.to_agent(now)
        if job.hosts.was_released(event.agent, event.life):
            flaw = job.hosts.flaw(event.machine or event.agent)
            return [ReleaseHost(agent=event.agent, why="again: it was given back", faulty=bool(flaw))]
        if job.orders.is_closed(event.agent):
            return [ReleaseHost(agent=event.agent, why="the order that it was started for is cancelled")]
        if refused := self._refuse(event):
            return refused
        if not len(job.hosts) and not job.members.processes:
            job.job_stats.started(now)
            job.deadline = now + job.settings.startup_timeout_seconds
        job.hosts.add(event.agent, event.slots, event.life, spare=event.spare, machine=event.machine)
        if job.members.processes:  # a late one: room for what is missing
            notice = self._welcome(event.agent)
            more = self._reserve.top_up(now) if self._restoring.is_settled else []
            more += self._draining.advance(now)
            return [notice, *more, *(self._reserve.fill_vacancies(now) if job.stage is Stage.STOPPING else [])]
        if missing := nodes - len(job.hosts.nodes):
            role = " as a spare" if event.spare else ""
            return [Notice(why=f"{event.agent} joined{role}; waiting for {missing} more", level="info")]
        return self._starting.spawn_initial(now, "initial rank") + self._reserve.top_up(now)

    def _refuse(self, event: ev.AgentJoined) -> list[Command]:
        """Give a host back that comes on a machine to be avoided, if the cluster may make it again on another one.

        Only while no rank needs a place, and a few times: otherwise it is used where no other host has room.
        """
        job, agent, machine = self._job, event.agent, event.machine or event.agent
        why = job.hosts.flaw(machine)
        settings = job.settings
        is_made_again = settings.fault_status > 0 and agent not in (settings.staying_host, *job.orders.open)
        if not (why and is_made_again and job.stage is Stage.TRAINING and job.hosts.may_send_back(machine)):
            return []
        left = job.hosts.send_back(agent, event.life, machine)
        then = f"{left} more times" if left > 1 else "once more" if left else "no more: if it comes again, it stays"
        text = f"{agent} came on {machine}, which {why}, and is given back so that it is made elsewhere ({then})"
        job.job_stats.notice(text)  # for the report
        advice = f"keep it away from there: in Kubernetes, `kubectl cordon {machine}`"
        return [ReleaseHost(agent=agent, why=text, faulty=True), Notice(why=f"{text}; {advice}", level="warning")]

    def _welcome(self, agent: str) -> Notice:
        """Say that a host joined, and if it is one to be avoided."""
        job = self._job
        text = f"{agent} joined; {len(job.hosts)} hosts"
        why = job.hosts.why_avoided(agent)
        if not why:
            return Notice(why=text, level="info")
        machine = job.hosts.machine(agent)
        named = agent if machine == agent else f"{agent} ({machine})"
        warning = f"{named} {why}, and is used only where no other host has room"
        job.job_stats.notice(warning)  # for the report
        return Notice(why=f"{text}. {warning}", level="warning")

    def _forget_pages(self, agent: str) -> None:
        """Forget the pages of dead processes: they were lost with the agent. Live processes keep their own."""
        for process in self._job.members.processes.values():
            if process.agent == agent and not process.alive:
                process.final_position = msgspec.structs.replace(process.final_position, private_versions=(-1, -1))

    def on_draining(self, event: ev.HostDraining, now: float) -> list[Command]:
        """A host is to be left. If its ranks cannot move, and it leaves in any case, a checkpoint comes first."""
        job, agent = self._job, event.agent
        if agent in job.hosts.draining:
            return []
        why_not = self._draining.why_not(agent)
        if not why_not:
            return self._draining.begin(agent, event.reason, now)
        if event.leaves and agent in job.hosts and job.checkpoint_every:
            reason = f"{event.reason} on {agent}, which cannot be drained since {why_not}"
            return self._shutdown.on_shutdown(ev.ShutdownRequested(reason=reason, after_step=True), now)
        text = f"{agent} cannot be drained: {why_not}"
        return [RefuseDrain(agent=agent, why=text), Notice(why=text, level="warning")]

    def on_faulty(self, event: ev.HostFaulty, now: float) -> list[Command]:
        """The hardware of a host has reported a fault: it is avoided, and left as soon as others have room."""
        job, agent = self._job, event.agent
        if agent not in job.hosts or not job.hosts.note_fault(agent, event.reason):
            return []
        machine = job.hosts.machine(agent)
        named = agent if machine == agent else f"{agent} ({machine})"
        warning = f"{named} reported a fault, and is not used again where another host has room: {event.reason}"
        job.job_stats.notice(warning)  # for the report
        return [Notice(why=warning, level="warning"), *self._draining.advance(now)]

    def on_lost(self, event: ev.AgentLost, now: float) -> list[Command]:
        """A host is gone, or cut off for too long: all its processes have failed at once.

        Processes that live on there are fenced: their generation is closed, and their agent is ordered to kill them
        if it comes back.
        """
        job = self._job
        if event.agent not in job.hosts:
            return []
        machine = job.hosts.machine(event.agent)
        job.hosts.remove(event.agent)
        if not len(job.hosts):
            return job.end(
                f"the agent of the only node is gone ({event.evidence}), and with it every replica of the state", now
            )
        if not job.members.processes:
            return [Notice(why=f"{event.agent} left before all hosts had joined", level="warning")]
        job.hosts.note_loss(machine)
        lost = [p for p in job.members.processes.values() if p.agent == event.agent and p.alive]
        held = [p for p in lost if p.rank is not None and not p.failed]
        for process in lost:
            job.members.end(process)
            if process.rank is None:
                job.members.forget(process)
        self._forget_pages(event.agent)
        if job.stage in (Stage.STARTING, Stage.FINISHING) and held:
            when = "before the first step" if job.stage is Stage.STARTING else "before its scripts had ended"
            return job.end(f"{event.agent} was lost {when}: {event.evidence}", now)
        notice = Notice(why=f"{event.agent} is lost with {len(lost)} processes: {event.evidence}", level="warning")
        if job.stage is Stage.STARTING:
            return [notice, *self._reserve.top_up(now)]
        if job.stage is Stage.FINISHING:
            return [notice, *self._finishing.end_if_all_ended(now)]
        step = self._failing.newest_step
        for process in held:
            job.job_stats.failures.add(
                process,
                "host lost",
                event.evidence,
                None,
                0,
                job.generation,
                now,
                step,
                waited_seconds=event.silent_seconds,
            )
        if held:
            return [notice, *self._failing.fail(held, step, None, now)]
        return [notice, *self._reserve.top_up(now), *self._stopping.advance(now)]
