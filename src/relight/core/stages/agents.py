"""What is heard of a host: its agent joins, joins again, or is lost."""

import msgspec

from relight.core import events as ev
from relight.core.commands import Command, Notice
from relight.core.stages.finishing import Finishing
from relight.core.stages.repeating import Repeating
from relight.core.stages.starting import Starting
from relight.core.stages.state import Stage
from relight.core.stages.stopping import Stopping


class Agents(Starting, Stopping, Finishing, Repeating):
    """In any stage."""

    def _on_agent_joined(self, event: ev.AgentJoined, now: float) -> list[Command]:
        if event.agent in self.hosts:  # the same agent again, after a restart: its workers live on
            self.hosts.add(event.agent, event.slots, event.life)
            self._forget_pages(event.agent)
            return self._repeat_orders(now)
        if not len(self.hosts) and not self.members.processes:
            self.job_stats.started(now)
            self._deadline = now + self.settings.startup_timeout_seconds
        self.hosts.add(event.agent, event.slots, event.life)
        nodes = self.settings.nodes
        if self.members.processes:  # a late one: room for what is missing
            notice = Notice(why=f"{event.agent} joined; {len(self.hosts)} hosts", level="info")
            settled = self.stage in (Stage.TRAINING, Stage.STARTING) and not self._to_resume
            more = self._top_up_standbys(now) if settled else []
            return [notice, *more, *(self._fill_vacancies(now) if self.stage is Stage.STOPPING else [])]
        if len(self.hosts) < nodes:
            return [Notice(why=f"{event.agent} joined; waiting for {nodes - len(self.hosts)} more", level="info")]
        return self._spawn_initial(now, "initial rank") + self._top_up_standbys(now)

    def _forget_pages(self, agent: str) -> None:
        """The pages of its dead processes went with an agent; those of the living are in their own hands too."""
        for process in self.members.processes.values():
            if process.agent == agent and not process.alive:
                process.final_position = msgspec.structs.replace(process.final_position, private_versions=(-1, -1))

    def _on_agent_lost(self, event: ev.AgentLost, now: float) -> list[Command]:
        """A host is gone, or cut off for so long: all that ran there has failed at once, and is answered at once.

        Should any of it live on, it is fenced: its generation is closed, and its agent is told to kill it if it comes
        back.
        """
        if event.agent not in self.hosts:
            return []
        self.hosts.remove(event.agent)
        if not len(self.hosts):
            return self._end(
                f"the agent of the only node is gone ({event.evidence}), and with it every replica of the state", now
            )
        if not self.members.processes:
            return [Notice(why=f"{event.agent} left before all hosts had joined", level="warning")]
        lost = [p for p in self.members.processes.values() if p.agent == event.agent and p.alive]
        held = [p for p in lost if p.rank is not None and not p.failed]
        for process in lost:
            self.members.end(process)
            if process.rank is None:
                self.members.forget(process)
        self._forget_pages(event.agent)
        if self.stage is Stage.STARTING or (self.stage is Stage.FINISHING and held):
            when = "before the first step" if self.stage is Stage.STARTING else "before its scripts had ended"
            return self._end(f"{event.agent} was lost {when}: {event.evidence}", now)
        notice = Notice(why=f"{event.agent} is lost with {len(lost)} processes: {event.evidence}", level="warning")
        if self.stage is Stage.FINISHING:
            return [notice, *self._end_if_all_ended(now)]
        for process in held:
            self.job_stats.failure(
                process,
                "host lost",
                event.evidence,
                None,
                0,
                self.generation,
                now,
                self._newest_step,
                waited_seconds=event.silent_seconds,
            )
        if held:
            return [notice, *self._fail(held, self._newest_step, None, now)]
        return [notice, *self._top_up_standbys(now), *self._advance(now)]
