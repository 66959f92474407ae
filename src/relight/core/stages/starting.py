"""STARTING: all ranks are started, run the script up to its first step, and must hold the same state there."""

from collections.abc import Sequence

from relight.core.job.job import Job, Stage
from relight.core.job.reserve import Reserve
from relight.core.membership.members import Process
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Assign, Begin, Command, Kill, Notice
from relight.core.recovery.coverage import coverage, describe
from relight.core.recovery.shards import Shards, content_mismatch

MAX_NAMED = 64  # ranks in one line for people
MAX_STARTUP_RESTARTS = 3


class Starting:
    """From the first agent to Begin."""

    def __init__(self, job: Job, reserve: Reserve) -> None:
        self._job, self._reserve = job, reserve
        self.entered: dict[str, ev.TrainingEntered] = {}  # by process
        self._restarts = 0

    def spawn_initial(self, now: float, why: str) -> list[Command]:
        """Start a process for each rank."""
        job = self._job
        places = job.hosts.initial(job.settings.world_size, job.settings.nodes)
        return [self._reserve.spawn(rank, place, now, why=why) for rank, place in enumerate(places)]

    def on_started(self, event: ev.ProcessStarted) -> list[Command]:
        """A process runs: it gets its rank."""
        process = self._job.members.processes.get(event.process)
        if process is None or process.started:
            return []
        process.started, process.pid = True, event.pid
        if process.rank is None:
            return []
        generation = self._job.generation
        return [Assign(process=process.name, rank=process.rank, generation=generation, why="initial rank")]

    def on_entered(self, event: ev.TrainingEntered, now: float) -> list[Command]:
        """A rank reached its first step; with the last one, training begins."""
        job = self._job
        if job.stage is not Stage.STARTING or not job.is_member(event.process):
            return []
        self.entered[event.process] = event
        if len(self.entered) < job.settings.world_size:
            return []
        reports = sorted(self.entered.values(), key=lambda e: e.rank)
        job.shards = Shards([report.shard for report in reports])
        problem = _startup_mismatch(reports, job.shards)
        if problem:
            return job.end(problem, now)
        job.stage, job.deadline = Stage.TRAINING, None
        job.until, job.began_at = reports[0].until, reports[0].version
        job.buddy_every, job.checkpoint_every = reports[0].buddy_every, reports[0].checkpoint_every
        for process in job.members.by_rank().values():
            process.may_hold_state = process.proven = True
        self._reserve.note_start(now - min(p.spawned_at for p in job.members.by_rank().values()))
        self.entered.clear()
        digest = job.shards.digest([report.state_digest for report in reports])
        job.job_stats.began(now, reports[0], digest)
        held = "replicas of the same state" if job.shards.divided else "the same state"
        return [
            *self._cover(reports),
            *(self._reserve.top_up(now) if job.settings.spare_nodes else []),  # spares are not waited for any longer
            Begin(
                generation=job.generation,
                buddies=job.buddies(),
                writers=job.writers(),
                why=f"all {job.settings.world_size} ranks hold {held} ({digest})",
            ),
            Notice(why=self._describe_start(), level="info"),
        ]

    def _cover(self, reports: Sequence[ev.TrainingEntered]) -> list[Command]:
        """Say which losses a divided state survives, before the first step."""
        job = self._job
        if not job.shards.divided:
            return []
        job.coverage = coverage(
            job.shards.groups(),
            [process.agent for process in job.members.by_rank().values()],
            {r.shard: r.state_bytes for r in reports},
            job.buddies(),
            job.buddy_every,
            job.checkpoint_every,
        )
        return [Notice(why=line, level="info") for line in describe(job.coverage)]

    def _describe_start(self) -> str:
        began_at, until = self._job.began_at, self._job.until
        if began_at >= until:
            return f"nothing left to do: the checkpoint is at step {began_at}, and the script wants {until}"
        return f"training; {self._describe_pids()}"

    def _describe_pids(self) -> str:
        """List process ids, for people with py-spy, gdb or kill."""
        held = list(self._job.members.by_rank().items())
        named = ", ".join(f"rank {rank} is pid {process.pid}" for rank, process in held[:MAX_NAMED])
        return f"{named}, and {len(held) - MAX_NAMED} more (see the journal)" if len(held) > MAX_NAMED else named

    # --- starts that fail ---------------------------------------------------------------------------------------
    def on_startup_timeout(self, now: float) -> list[Command]:
        """End the job: some rank has not reached its first step, or some node has not joined."""
        job = self._job
        if not job.members.processes:
            there = ", ".join(job.hosts.nodes) or "none"
            return job.end(
                f"{len(job.hosts.nodes)} of {job.settings.nodes} nodes joined within "
                f"{job.settings.startup_timeout_seconds:g} s ({there}); start `relight run` on the others too, or "
                "raise --startup-timeout-seconds. A spare does not take the place of a node",
                now,
            )
        late = sorted(rank for rank, p in job.members.by_rank().items() if p.name not in self.entered)
        return job.end(
            f"rank {', '.join(map(str, late))} did not reach its first step within "
            f"{job.settings.startup_timeout_seconds:g} s; raise --startup-timeout-seconds if the script needs "
            "longer",
            now,
        )

    def on_exit(self, process: Process, event: ev.ProcessExited, now: float) -> list[Command]:
        """A rank's process ended before its first step: an error of the script, or another start."""
        job = self._job
        raised = job.tracebacks.get(process.name)
        if raised is not None:
            return job.end(f"rank {process.rank} failed before its first step: {raised.summary}", now, raised)
        if event.exit_status == 0:
            return job.end(
                f"rank {process.rank} ended before its first step: the script must call relight.init() and take its "
                "steps from training.steps(); see `relight run --help` for an example",
                now,
            )
        if (event.exit_status or 0) > 0:
            return job.end(f"rank {process.rank} {event.evidence} before its first step", now)
        job.members.fail(process)
        return self.restart(f"rank {process.rank} {event.evidence}", now)

    def restart(self, failure: str, now: float) -> list[Command]:
        """Start all ranks anew: before the first step there is nothing to preserve."""
        job = self._job
        self._restarts += 1
        if self._restarts > MAX_STARTUP_RESTARTS:
            return job.end(f"{failure}; {MAX_STARTUP_RESTARTS} starts have failed", now)
        out: list[Command] = [Notice(why=f"{failure} before the first step; starting all ranks again", level="warning")]
        for process in job.members.by_rank().values():
            job.members.fail(process)
            out.append(Kill(process=process.name, why="starting all ranks again"))
        job.members.predecessors.clear()
        self.entered.clear()
        job.generation += 1
        job.deadline = now + job.settings.startup_timeout_seconds
        return out + self.spawn_initial(now, "initial rank, again")

    def repeat(self, now: float) -> list[Command]:
        """Give the orders again after a restart of the controller."""
        job = self._job
        if not len(job.hosts):
            return []
        job.deadline = now + job.settings.startup_timeout_seconds
        return [
            Assign(process=process.name, rank=rank, generation=job.generation, why="again: initial rank")
            for rank, process in job.members.by_rank().items()
            if process.started
        ]


def _startup_mismatch(reports: list[ev.TrainingEntered], shards: Shards) -> str:
    """Return the reason why the initial ranks cannot train together, or an empty string."""
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
