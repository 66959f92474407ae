"""Judges the journal of a job, simulated or real: what can be said of it without having been there.

A journal has each event, followed by the orders that it led to. So it shows whether
decisions rested on the right reports, and whether anything of a closed generation had an effect. It does not show what
a worker did between two reports; in a simulation checker.py sees that, in a test on real processes the digests do.
"""

from collections.abc import Iterable
from typing import Protocol

from relight.core.protocol import commands as cmd
from relight.core.protocol import events as ev
from relight.core.protocol.position import Position
from relight.sim.judge.placement import Placement
from relight.sim.judge.supply import Supply

# What a worker says about one generation.
_DATED = ev.Stopped | ev.Restored | ev.RestoreFailed | ev.CollectiveFailed | ev.TrainingDone


class Line(Protocol):
    """A line of the journal, as server.journal reads it: an event, or an order, or neither."""

    @property
    def now(self) -> float: ...
    @property
    def event(self) -> ev.Event | None: ...
    @property
    def command(self) -> cmd.Command | None: ...


def check_journal(lines: Iterable[Line], world_size: int, *, ended: bool = True) -> tuple[str, ...]:
    """Describe each violation in one sentence that begins with the invariant's name; none if all is well.

    Args:
        lines: in their order.
        world_size: ranks in the job.
        ended: whether the job is over, so that a journal without its end is wrong.
    """
    judge, supply = _Judge(world_size), Supply()
    for line in lines:
        judge.take(line)
        if line.event is not None:
            supply.hear(line.event, line.now)
        if line.command is not None and (fault := supply.fault(line.command, line.now)):
            judge.say(fault)
    if ended:
        judge.finish()
    return tuple(judge.wrong)


class _Judge:
    """The facts of the lines that were read so far."""

    def __init__(self, world_size: int) -> None:
        self.wrong: list[str] = []
        self._world_size = world_size
        self._now = 0.0
        self._generation = 1
        self._holders: dict[int, list[str]] = {}  # of each rank, newest last
        self._agents: dict[str, str] = {}  # of each process
        self._placement = Placement()
        self._dead: set[str] = set()
        self._stopped: dict[str, ev.Stopped] = {}
        self._restored: dict[str, ev.Restored] = {}
        self._done: dict[str, ev.TrainingDone] = {}
        self._restore: cmd.Restore | None = None
        self._standing: cmd.Command | None = None  # the newest order to all ranks; it may be given again
        self._lineages: dict[int, str] = {}  # by version
        self._digests: dict[tuple[int, str], str] = {}  # by version and part of the state
        self._parts: dict[int, str] = {}  # the part that each rank holds
        self._finished = 0  # newest version that anyone is known to have finished
        self._fallen_to = -1  # the version that an unfinished recovery went back to, below replicas
        self._late: ev.Event | None = None  # what was said last was about a closed generation
        self._end: cmd.EndJob | None = None

    def take(self, line: Line) -> None:
        """Judge one more line."""
        self._now = line.now
        if line.command is not None:
            self._order(line.command)
        else:
            self._late = None
            if line.event is not None:
                self._hear(line.event)

    def finish(self) -> None:
        """There is no further line."""
        if self._end is None:
            self.say(f"L1: the journal ends in generation {self._generation}, and not with the end of the job")

    def say(self, sentence: str) -> None:
        """Note a violation."""
        self.wrong.append(f"{sentence} (at {self._now:.3f} s)")

    # --- events ---------------------------------------------------------------------------------------------------
    def _hear(self, event: ev.Event) -> None:
        if isinstance(event, _DATED) and event.generation < self._generation:
            self._late = event
            return
        self._placement.hear(event)
        match event:
            case ev.ProcessDying() | ev.ProcessExited():
                if event.process not in self._dead:  # else it was read before: nothing was finished there since
                    self._note_position(event.process, event.position)
                self._dead.add(event.process)
            case ev.AgentLost():  # with all of its processes: the generation is closed to them
                self._dead.update(process for process, agent in self._agents.items() if agent == event.agent)
            case ev.Stopped():
                self._stopped[event.process] = event
                if not event.blank and not event.torn:
                    self._note_version(event.rank, event.version, event.lineage)
            case ev.Restored():
                self._restored[event.process] = event
                self._note_version(event.rank, event.version, event.lineage)
            case ev.TrainingDone():
                self._done[event.process] = event
                self._note_version(event.rank, event.version, event.lineage)
            case ev.TrainingEntered():
                self._parts[event.rank] = event.shard
                self._note_version(event.rank, event.version, "")
                self._note_content(event.rank, event.version, event.state_digest)
            case ev.StepResumed():
                self._finished = max(self._finished, event.step + 1)

    def _note_position(self, process: str, position: Position) -> None:
        """A page is read after its process's death: what it says is finished, is."""
        if position.rank >= 0 and process in self._holders.get(position.rank, ()):
            self._finished = max(self._finished, position.version)

    def _note_version(self, rank: int, version: int, lineage: str) -> None:
        self._finished = max(self._finished, version)
        known = self._lineages.setdefault(version, lineage) if lineage else ""
        if known != lineage:
            self.say(f"I1: version {version} has the history {known} on one rank, {lineage} on rank {rank}")

    def _note_content(self, rank: int, version: int, digest: str) -> None:
        """Compare states that ranks train on or end with. Earlier, a rank with corrupted memory may report another."""
        known = self._digests.setdefault((version, self._parts.get(rank, "")), digest)
        if known != digest:
            self.say(f"I1: version {version} has the content {known} on one rank, {digest} on rank {rank}")

    # --- what it orders -------------------------------------------------------------------------------------------
    def _order(self, command: cmd.Command) -> None:
        if self._end is not None and not isinstance(command, cmd.Notice):
            self.say(f"I9: {type(command).__name__} after the end of the job")
        if self._late is not None and not isinstance(command, cmd.Notice | cmd.Spawn):
            self.say(f"I9: {type(self._late).__name__} of a closed generation led to {type(command).__name__}")
        if command == self._standing or command.why.startswith("again: "):  # by, or to, a process that was restarted
            if isinstance(command, cmd.Assign):  # the first may be missing: the controller died of the event before it
                self._give(command.rank, command.process)
            return
        if isinstance(command, cmd.Begin | cmd.Stop | cmd.Restore | cmd.Resume | cmd.Save | cmd.Release):
            self._standing = command
        match command:
            case cmd.Spawn():
                self._agents[command.process] = command.agent
                if fault := self._placement.fault(command):
                    self.say(fault)
                if command.rank is not None:
                    self._give(command.rank, command.process)
            case cmd.Assign():
                self._check_generation(command)
                self._give(command.rank, command.process)
            case cmd.Stop():
                self._open(command.generation)
            case cmd.Begin():
                self._generation = max(self._generation, command.generation)
            case cmd.Restore():
                self._check_generation(command)
                self._check_restore(command)
            case cmd.Resume():
                self._check_generation(command)
                self._check_resume(command)
            case cmd.Save():
                self._check_generation(command)
                self._check_save(command)
            case cmd.Release():
                self._check_release()
            case cmd.EndJob():
                self._end = command

    def _give(self, rank: int, process: str) -> None:
        holders = self._holders.setdefault(rank, [])
        if process not in holders:
            holders.append(process)

    def _check_generation(self, command: cmd.Assign | cmd.Restore | cmd.Resume | cmd.Save) -> None:
        if command.generation < self._generation:
            self.say(f"I9: {type(command).__name__} of generation {command.generation} in {self._generation}")

    def _open(self, generation: int) -> None:
        if generation <= self._generation:
            self.say(f"I10: generation {generation} is opened after {self._generation}")
        self._generation = generation
        self._stopped.clear()
        self._restored.clear()
        self._done.clear()
        self._restore = None

    def _members(self) -> dict[int, str]:
        return {rank: self._holders[rank][-1] for rank in range(self._world_size) if self._holders.get(rank)}

    def _check_restore(self, restore: cmd.Restore) -> None:
        self._restore = restore
        members = self._members()
        silent = [rank for rank in range(self._world_size) if members.get(rank, "") not in self._stopped]
        if silent:
            self.say(f"I9: it was decided in generation {restore.generation} without reports of ranks {silent}")
            return
        for rank, holders in sorted(self._holders.items()):
            alive = [process for process in holders[:-1] if process not in self._dead]
            if alive:
                self.say(f"I10: rank {rank} was given to {holders[-1]} while {alive[-1]} was not known to be dead")
        if restore.tier is not cmd.FallbackTier.REPLICA:
            self._check_fall(restore, {rank: self._stopped[process] for rank, process in members.items()})
            return
        if restore.target < self._finished:
            self.say(f"I7: back to version {restore.target}, though {self._finished} was finished")
        for rank, process in members.items():
            self._check_reachable(restore, rank, self._stopped[process])

    def _check_fall(self, restore: cmd.Restore, reports: dict[int, ev.Stopped]) -> None:
        """The exception to I7: below replicas finished versions are undone. Only if it must be, and no more of them."""
        intact = {rank for rank, report in reports.items() if not report.blank and not report.torn}
        before = self._fallen_to
        self._fallen_to = restore.target
        held = {self._parts.get(rank, "") for rank in intact}
        lost = held != set(self._parts.values()) or "private state" in restore.why
        if before < 0 and not lost and restore.distrust < 0:
            self.say(f"I7: fallback to the {restore.tier}, though every part of the state has an intact holder")
        if restore.tier is cmd.FallbackTier.BUDDY:
            self._check_snapshots(restore, reports, intact, before)
        elif any(restore.target not in report.checkpoints for report in reports.values()):
            self.say(f"I5: back to the checkpoint of version {restore.target}, which not every rank can see")
        if 0 <= restore.distrust <= restore.target:
            self.say(f"I13: back to version {restore.target}, though from {restore.distrust} on it may be corrupted")
        if restore.target < self._finished and not restore.undone:
            self.say(f"I7: versions {restore.target} to {self._finished} are undone without a notice")
        self._finished = restore.target
        if restore.distrust >= 0:  # later versions may have been wrong on all ranks
            self._digests = {key: digest for key, digest in self._digests.items() if key[0] <= restore.target}

    def _check_snapshots(
        self, restore: cmd.Restore, reports: dict[int, ev.Stopped], intact: set[int], before: int
    ) -> None:
        """`before`: newer ones were undone by an order that was not carried out; -1: there was none."""
        kept = {
            (rank, snapshot.rank, snapshot.version) for rank, report in reports.items() for snapshot in report.snapshots
        }
        offered = {source.of for source in restore.sources if (source.rank, source.of, restore.target) in kept}
        for rank, report in reports.items():
            own = (rank, rank, restore.target) in kept or (rank in intact and report.version == restore.target)
            parts = {self._parts.get(of, "") for of in offered}
            if not (own if rank not in restore.targets else rank in offered or self._parts.get(rank, "") in parts):
                self.say(f"I5: rank {rank} is to go back to {restore.target}, of which no snapshot of it is named")
        if whole := _whole_and_newer(restore, reports, kept, before):
            self.say(f"I7: back to {restore.target}, though there are snapshots of every rank of {max(whole)}")

    def _check_reachable(self, restore: cmd.Restore, rank: int, report: ev.Stopped) -> None:
        worthless = report.blank or report.torn
        if worthless is not (rank in restore.targets):
            what = "has nothing and" if worthless else "is intact and"
            self.say(f"I8: rank {rank} {what} {'does not copy' if worthless else 'is overwritten'}")
        elif not worthless and restore.target not in _reachable(report):
            self.say(f"I5: rank {rank} is to reach {restore.target} from {report.version}, prepared {report.prepared}")

    def _check_save(self, save: cmd.Save) -> None:
        """A last checkpoint is of a version that each part has an intact holder of, and undoes nothing."""
        reports = {rank: self._stopped[name] for rank, name in self._members().items() if name in self._stopped}
        for part, rank in save.writers:
            report = reports.get(rank)
            if report is None or report.blank or report.torn or save.target not in _reachable(report):
                self.say(f"I5: rank {rank} is to write version {save.target} of {part or 'the state'}, and has it not")
        parts = set(self._parts.values())
        if {part for part, _ in save.writers} != parts:
            self.say(f"I5: a checkpoint of version {save.target} is to be written without some part of the state")
        if save.target < self._finished:
            self.say(f"I7: a checkpoint of version {save.target} is the last, though {self._finished} was finished")

    def _check_resume(self, resume: cmd.Resume) -> None:
        reports = [self._restored.get(process) for process in self._members().values()]
        self._fallen_to = -1
        if self._restore is None or self._restore.generation != resume.generation:
            self.say(f"I9: generation {resume.generation} is resumed, and nothing was decided in it")
        elif None in reports or len(reports) < self._world_size:
            self.say(f"I5: generation {resume.generation} is resumed before every rank is restored")
        elif any(report is not None and report.version != self._restore.target for report in reports):
            self.say(f"I6: generation {resume.generation} is resumed with other versions than {self._restore.target}")
        self._note_contents(reports)

    def _check_release(self) -> None:
        reports = [self._done.get(process) for process in self._members().values()]
        if None in reports or len(reports) < self._world_size:
            self.say("I12: the job was ended well before every rank was done")
        self._note_contents(reports)

    def _note_contents(self, reports: Iterable[ev.Restored | ev.TrainingDone | None]) -> None:
        for report in reports:
            if report is not None:
                self._note_content(report.rank, report.version, report.state_digest)


def _whole_and_newer(
    restore: cmd.Restore, reports: dict[int, ev.Stopped], kept: set[tuple[int, int, int]], before: int
) -> list[int]:
    """Versions newer than the target of which every rank's snapshot is among `kept`, and which may be trusted."""
    newer = {version for _, _, version in kept if version > restore.target and (before < 0 or version <= before)}
    if restore.distrust >= 0:
        agreed = max(report.agreed for report in reports.values())
        newer = {version for version in newer if version < restore.distrust and version <= agreed}
    return [v for v in newer if {of for _, of, version in kept if version == v} == set(reports)]


def _reachable(report: ev.Stopped) -> tuple[int, ...]:
    return (report.version, report.version + 1) if report.prepared == report.version else (report.version,)
