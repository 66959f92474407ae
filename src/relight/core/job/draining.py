"""Hosts that are to be left in order: their ranks move to other hosts between two steps, and no step is repeated.

    HostDraining -> a warm standby on another host for each rank -> WindDown -> every rank has committed the same step
    -> a recovery without the host's ranks, which begins where it ends -> Resume -> ReleaseHost

A failure on the way is an ordinary recovery; the next generation begins to drain again. Should the host be lost before
its ranks have moved, it is lost like any other.
"""

from relight.core.job.job import Job, Stage
from relight.core.job.reserve import Reserve
from relight.core.membership.members import Process
from relight.core.protocol.commands import Command, Kill, Notice, ReleaseHost, WindDown
from relight.core.protocol.position import Phase, Position


class Draining:
    """From the request to the moment at which the host is given back."""

    def __init__(self, job: Job, reserve: Reserve) -> None:
        self._job, self._reserve = job, reserve
        self.ordered_in = 0  # the generation in which all ranks were ordered to pause after a step

    def why_not(self, agent: str) -> str:
        """Return why the ranks of this host cannot move to others, or an empty string."""
        job = self._job
        members, leave = job.members, {agent, *job.hosts.draining}
        if agent not in job.hosts:
            return f"the job has no host of this name; it has {', '.join(job.hosts.in_order())}"
        if job.stage in (Stage.STARTING, Stage.SAVING, Stage.FINISHING):
            return f"the job is {job.stage}, and ranks move only while it trains"
        leaving = [(rank, process) for rank, process in members.by_rank().items() if process.agent in leave]
        stay = [rank for rank, p in members.by_rank().items() if p.may_hold_state and p.agent not in leave]
        if leaving and job.shards.lacks(stay):
            return "a part of the state is on this host alone"
        others = sum(process.agent not in leave for process in members.standbys())
        free = job.hosts.free_slots(members.processes.values(), without=agent)
        if others + free < len(leaving):
            return f"other hosts have room for {others + free} ranks, and {len(leaving)} would have to move"
        return ""

    def begin(self, agent: str, reason: str, now: float) -> list[Command]:
        """Leave a host: its standbys end at once, its ranks once there is a warm standby elsewhere for each."""
        return self._mark(agent, reason) + self.advance(now)

    def _mark(self, agent: str, reason: str) -> list[Command]:
        job = self._job
        job.hosts.draining[agent] = reason
        out: list[Command] = [Notice(why=f"{agent} is drained: {reason}", level="info")]
        for standby in job.members.standbys():
            if standby.agent == agent:
                job.members.fail(standby)
                out.append(Kill(process=standby.name, why=f"its host is drained: {reason}"))
        return out

    def _leave_faulty(self) -> list[Command]:
        """Begin to leave the hosts whose hardware has reported a fault, if others have room for their ranks."""
        hosts, out = self._job.hosts, list[Command]()
        for agent, reason in sorted(hosts.faulty.items()):
            if agent not in hosts.draining and not self.why_not(agent):
                out += self._mark(agent, reason)
        return out

    def advance(self, now: float) -> list[Command]:
        """Do what can be done now: start standbys, order the pause, or give back hosts without ranks."""
        job = self._job
        if not (job.hosts.draining or job.hosts.faulty) or job.stage is not Stage.TRAINING:
            return []
        out = self._leave_faulty() + self._give_back()
        ranks = len(job.leaving)
        if not ranks:
            return out
        if len(job.members.ready_standbys()) < ranks:
            return out + self._reserve.top_up(now)
        return out if self.ordered_in == job.generation else out + self.order()

    def order(self) -> list[Command]:
        """Order the pause, once in each generation, and again after a restart."""
        job = self._job
        if not job.leaving or len(job.members.ready_standbys()) < len(job.leaving):
            return []
        self.ordered_in = job.generation
        why = "; ".join(f"{agent} is drained: {reason}" for agent, reason in sorted(job.hosts.draining.items()))
        return [WindDown(generation=job.generation, why=why)]

    def _give_back(self) -> list[Command]:
        """Release the hosts on which no process is left."""
        job, out = self._job, list[Command]()
        held = self._occupied()
        for agent, reason in sorted(job.hosts.draining.items()):
            if agent not in held:
                faulty = agent in job.hosts.faulty
                job.hosts.release(agent)
                out.append(ReleaseHost(agent=agent, why=f"all of its ranks have moved: {reason}", faulty=faulty))
                out.append(Notice(why=f"{agent} is given back: {reason}", level="info"))
        return out

    def _occupied(self) -> set[str]:
        """Return the hosts with processes. One that is being killed counts: a recovery waits for its end."""
        return {process.agent for process in self._job.members.processes.values() if process.alive}

    def take_leave(self, version: int, now: float) -> list[Process]:
        """Note the ranks that leave as failed, now that all ranks have committed the same step."""
        job = self._job
        leaving = job.leaving
        assert leaving  # without them the host was given back, or lost, which opens a generation
        for process in leaving:
            process.leaving = job.hosts.draining[process.agent]
            evidence = f"its host {process.agent} is drained: {process.leaving}"
            position = Position(rank=process.rank or 0, step=version, version=version, phase=Phase.OUTSIDE)
            job.job_stats.failures.add(process, "drained", evidence, position, 0, job.generation, now)
        return leaving
