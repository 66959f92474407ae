"""Members of a job: processes, the ranks they hold, and the standbys that wait. Bookkeeping only, no decisions."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from relight.core.protocol.position import Position


@dataclass
class Process:
    """One life of one process, from its Spawn to its exit."""

    name: str
    agent: str
    slot: int
    rank: int | None = None  # None: a standby, warm or still starting
    started: bool = False
    pid: int = 0
    alive: bool = True  # False once its exit is known
    gone: bool = False  # can run nothing any more; how it ended is not known yet
    failed: bool = False  # declared failed; no longer a member, perhaps not yet dead
    ready: bool = False  # a standby that is warm
    doomed: bool = False  # to be killed after the last step, when there is nothing any more that it could fail
    replacement: bool = False  # took its rank from a failed process, and is not restored yet
    proven: bool = False  # it held a rank when all had committed a step, or before the first failure
    fresh: bool = False  # started because no standby was left
    spawned_at: float = 0.0
    ready_at: float = 0.0
    asked_at: float = 0.0  # when it was ordered to pause, by Stop or with its rank
    failed_at_step: int = -1  # the step that its failure counts for; a replacement dies for the recovery's
    may_hold_state: bool = False  # it trained, or was ordered to restore; whether it did, only its report can say
    slow: bool = False  # which was said
    leaving: str = ""  # why it was asked to end after its step
    instead_of: str = ""  # a standby on a crowded host, which ends once this one is warm
    final_position: Position = field(default_factory=Position)

    @property
    def is_to_die(self) -> bool:
        """True if it was ordered to be killed, and is not known to have ended."""
        return (self.failed or self.doomed) and self.alive


class Members:
    """The processes of a job. Names are never reused; a rank has at most one live, unfailed process."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.predecessors: dict[int, tuple[str, ...]] = {}  # failed holders of a rank, newest last
        self._next_name = 0
        self._holders: dict[int, str] = {}  # rank -> name of its live, unfailed process
        self._left: set[int] = set()  # ranks that were held, and are not
        self._reserve: dict[str, None] = {}  # names of live, unfailed processes without a rank, oldest first
        self._names: dict[int, str] | None = None  # `_holders` in rank order, until it changes
        self._forgettable: set[str] = set()  # were dead already when it was last asked

    def add(self, agent: str, slot: int, rank: int | None, now: float, *, fresh: bool = False) -> Process:
        """Register a process that is about to be started."""
        process = Process(f"w{self._next_name}", agent, slot, rank, fresh=fresh, spawned_at=now)
        self._next_name += 1
        self.processes[process.name] = process
        if rank is None:
            self._reserve[process.name] = None
        else:
            self._hold(rank, process)
        return process

    def by_rank(self) -> dict[int, Process]:
        """Rank to process, live and unfailed ones only, in rank order."""
        return {rank: self.processes[name] for rank, name in self.names_by_rank().items()}

    def names_by_rank(self) -> Mapping[int, str]:
        """Their names. Asked at every sample of every agent, so it is kept. A value: another one when it changes."""
        if self._names is None:
            self._names = {rank: self._holders[rank] for rank in sorted(self._holders)}
        return self._names

    def is_complete(self, world_size: int) -> bool:
        """True if every rank is held. Asked at every report of every rank, so it must not look at all of them."""
        return len(self._holders) == world_size

    def vacant(self, world_size: int) -> tuple[int, ...]:
        """Ranks that no process holds. Asked at every report while there are any: it looks at those only."""
        if len(self._holders) + len(self._left) == world_size:
            return tuple(sorted(self._left))
        return tuple(sorted(set(range(world_size)) - set(self._holders)))  # not all have been given yet

    def ready_standbys(self) -> list[Process]:
        """Warm standbys, oldest first."""
        return [p for p in self.standbys() if p.ready]

    def standbys(self) -> list[Process]:
        """Live processes without a rank."""
        return [self.processes[name] for name in self._reserve]

    def dying(self) -> list[Process]:
        """Failed processes whose death is not known yet: their ranks are not safe to give away."""
        return [p for p in self.processes.values() if p.failed and p.alive and not p.gone]

    def take_rank(self, process: Process, rank: int, now: float) -> None:
        """A standby becomes the replacement for `rank`."""
        process.rank, process.ready, process.replacement = rank, False, True
        process.asked_at = now
        self._reserve.pop(process.name, None)
        self._hold(rank, process)

    def fail(self, process: Process) -> None:
        """Take a process out of the job. Its rank, if any, is vacant from now on."""
        process.failed = True
        self._leave(process)
        if process.rank is not None:
            before = self.predecessors.get(process.rank, ())
            self.predecessors[process.rank] = (*before, process.name)

    def end(self, process: Process) -> None:
        """Its exit is known."""
        process.alive = False
        self._leave(process)

    def forget(self, process: Process) -> None:
        """Drop a dead process that never held a rank: its private state is not needed."""
        del self.processes[process.name]

    def forget_dead(self) -> None:
        """Drop the processes that were dead at the last call.

        Not at once: a controller that is restarted soon orders agents again to drop the private state of these.
        """
        for name in self._forgettable:
            del self.processes[name]
        self._forgettable = {name for name, process in self.processes.items() if not process.alive}

    def _hold(self, rank: int, process: Process) -> None:
        self._holders[rank] = process.name
        self._left.discard(rank)
        self._names = None

    def _leave(self, process: Process) -> None:
        self._reserve.pop(process.name, None)
        if process.rank is not None and self._holders.get(process.rank) == process.name:
            del self._holders[process.rank]
            self._left.add(process.rank)
            self._names = None

    def private_versions(self, rank: int) -> frozenset[int]:
        """Versions for which some failed holder of `rank` left its private state with its agent."""
        names = self.predecessors.get(rank, ())
        return frozenset(v for name in names for v in self.processes[name].final_position.private_versions if v >= 0)
