"""STARTING: all ranks are started, run the script up to its first step, and must hold the same state there."""

from collections.abc import Sequence

from relight.core import events as ev
from relight.core.commands import Assign, Audience, Begin, Command, Kill, Notice
from relight.core.coverage import coverage, describe
from relight.core.members import Process
from relight.core.shards import Shards, content_mismatch
from relight.core.stages.reserve import Reserve
from relight.core.stages.state import Stage

MAX_NAMED = 64  # ranks in one line for people
MAX_STARTUP_RESTARTS = 3


class Starting(Reserve):
    """From the first agent to Begin."""

    def _spawn_initial(self, now: float, why: str) -> list[Command]:
        places = self.hosts.initial(self.settings.world_size, self.settings.nodes)
        return [self._spawn(rank, place, now, why=why) for rank, place in enumerate(places)]

    def _on_started(self, event: ev.ProcessStarted) -> list[Command]:
        process = self.members.processes.get(event.process)
        if process is None or process.started:
            return []
        process.started, process.pid = True, event.pid
        if process.rank is None:
            return []
        return [Assign(process=process.name, rank=process.rank, generation=self.generation, why="initial rank")]

    def _on_entered(self, event: ev.TrainingEntered, now: float) -> list[Command]:
        if self.stage is not Stage.STARTING or not self._is_member(event.process):
            return []
        self._entered[event.process] = event
        if len(self._entered) < self.settings.world_size:
            return []
        reports = sorted(self._entered.values(), key=lambda e: e.rank)
        self.shards = Shards([report.shard for report in reports])
        problem = _startup_mismatch(reports, self.shards)
        if problem:
            return self._end(problem, now)
        self.stage, self._deadline = Stage.TRAINING, None
        self.until, self.began_at = reports[0].until, reports[0].version
        self.buddy_every, self.checkpoint_every = reports[0].buddy_every, reports[0].checkpoint_every
        for process in self.members.by_rank().values():
            process.may_hold_state = process.proven = True
        self._slowest_start_seconds = now - min(p.spawned_at for p in self.members.by_rank().values())
        self._entered.clear()
        digest = self.shards.digest([report.state_digest for report in reports])
        self.job_stats.began(now, reports[0], digest)
        what = "replicas of the same state" if self.shards.divided else "the same state"
        return [
            *self._cover(reports),
            Begin(
                audience=Audience.MEMBERS,
                generation=self.generation,
                buddies=self._buddies(),
                writers=self._writers(),
                why=f"all {self.settings.world_size} ranks hold {what} ({digest})",
            ),
            Notice(why=self._describe_start(), level="info"),
        ]

    def _cover(self, reports: Sequence[ev.TrainingEntered]) -> list[Command]:
        """Say what a divided state survives, before the first step."""
        if not self.shards.divided:
            return []
        hosts = [process.agent for process in self.members.by_rank().values()]
        self.coverage = coverage(
            self.shards.groups(),
            hosts,
            {r.shard: r.state_bytes for r in reports},
            self._buddies(),
            self.buddy_every,
            self.checkpoint_every,
        )
        return [Notice(why=line, level="info") for line in describe(self.coverage)]

    def _describe_start(self) -> str:
        if self.began_at >= self.until:
            return f"nothing left to do: the checkpoint is at step {self.began_at}, and the script wants {self.until}"
        return f"training; {self._describe_pids()}"

    def _describe_pids(self) -> str:
        """For people with py-spy, gdb or kill."""
        held = list(self.members.by_rank().items())
        named = ", ".join(f"rank {rank} is pid {process.pid}" for rank, process in held[:MAX_NAMED])
        return f"{named}, and {len(held) - MAX_NAMED} more (see the journal)" if len(held) > MAX_NAMED else named

    def _on_startup_timeout(self, now: float) -> list[Command]:
        late = sorted(rank for rank, p in self.members.by_rank().items() if p.name not in self._entered)
        return self._end(
            f"rank {', '.join(map(str, late))} did not reach its first step within "
            f"{self.settings.startup_timeout_seconds:g} s; raise --startup-timeout-seconds if the script needs longer",
            now,
        )

    def _on_exit_before_training(self, process: Process, event: ev.ProcessExited, now: float) -> list[Command]:
        raised = self._tracebacks.get(process.name)
        if raised is not None:
            return self._end(f"rank {process.rank} failed before its first step: {raised.summary}", now, raised)
        if event.exit_status == 0:
            return self._end(
                f"rank {process.rank} ended before its first step: the script must call relight.init() and take its "
                "steps from training.steps(); see `relight run --help` for an example",
                now,
            )
        if (event.exit_status or 0) > 0:
            return self._end(f"rank {process.rank} {event.evidence} before its first step", now)
        self.members.fail(process)
        return self._restart_startup(f"rank {process.rank} {event.evidence}", now)

    def _restart_startup(self, failure: str, now: float) -> list[Command]:
        """Before the first step there is nothing to preserve: start all ranks anew."""
        self._startup_restarts += 1
        if self._startup_restarts > MAX_STARTUP_RESTARTS:
            return self._end(f"{failure}; {MAX_STARTUP_RESTARTS} starts have failed", now)
        out: list[Command] = [Notice(why=f"{failure} before the first step; starting all ranks again", level="warning")]
        for process in self.members.by_rank().values():
            self.members.fail(process)
            out.append(Kill(process=process.name, why="starting all ranks again"))
        self.members.predecessors.clear()
        self._entered.clear()
        self.generation += 1
        self._deadline = now + self.settings.startup_timeout_seconds
        return out + self._spawn_initial(now, "initial rank, again")


def _startup_mismatch(reports: list[ev.TrainingEntered], shards: Shards) -> str:
    """Why the initial ranks cannot train together, or an empty string."""
    first = reports[0]
    builders: dict[str, ev.TrainingEntered] = {}  # the first holder of each part of the state
    for other in reports:
        peer = builders.setdefault(shards.key(other.rank), other)
        if other.layout_digest != peer.layout_digest:
            return (
                f"rank {other.rank} has other parameters or optimizer settings than rank {peer.rank} (names, shapes "
                "or dtypes differ); every rank must build the same model, or those of the same stage of a pipeline: "
                "relight.Training(pipeline=...)"
            )
        if other.until != first.until:
            return f"rank {other.rank} wants {other.until} steps, rank {first.rank} wants {first.until}; use one number"
        if other.buddy_every != first.buddy_every:
            return (
                f"rank {other.rank} makes a snapshot every {other.buddy_every} steps, rank {first.rank} every "
                f"{first.buddy_every}; call training.buddy(every=...) alike on every rank"
            )
    different = content_mismatch(shards, [f"{report.version} {report.state_digest}" for report in reports])
    if different:
        first, other = (reports[rank] for rank in different)
        part = f" (both hold part {first.shard})" if shards.divided else ""
        return (
            f"the state of rank {other.rank} ({other.state_digest}) differs from that of rank {first.rank} "
            f"({first.state_digest}){part}: wrap the model in DDP, or seed every rank alike before building it"
        )
    return ""
