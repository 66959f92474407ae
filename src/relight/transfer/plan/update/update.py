"""One update of every engine, decided: which source writes a bucket, which engine loads it, which member is dropped.

Pure: feed it facts (`written`, `loaded`, `lost_...`), and obey its orders. Time is an argument. The order comes from
the schedule's dependencies, with one freedom: an engine that has reloaded a bucket takes the next as soon as that is
written, even if other engines are behind (two buffers allow a lead of one bucket). So no engine waits for the slowest
at every bucket. Failures are decided here too:

- a source that is lost while it writes: another one that holds the weights writes that bucket;
- an engine that is lost: it is dropped, the others go on;
- a bucket whose digest does not match at some engine: that engine loads it again; if it is wrong again, a source
  writes it again once no other engine reads that buffer; after that the engine is dropped;
- no source left that holds a bucket which is still to be written, or no engine left: the update is abandoned, and
  every engine keeps the version it has.

An engine takes the new version only at `Commit`, which is ordered when every remaining engine holds every bucket.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from relight.transfer.plan.schedule import Kind, Operation, Schedule
from relight.transfer.plan.update.orders import Abandon, Commit, Drop, Finished, Load, Order, Write

MAX_LOADS = 3  # of one bucket by one engine: as it was written, once more, and after it was written again


@dataclass
class _Broadcast:
    source: str = ""
    digest: int | None = None
    deadline: float = 0.0


@dataclass
class _Reload:
    pending: dict[str, float] = field(default_factory=dict)  # engine -> deadline
    loads: dict[str, int] = field(default_factory=dict)  # engine -> how often it was ordered to
    waiting: set[str] = field(default_factory=set)  # engines that need it written again, or come while it is
    over: bool = False


@dataclass(frozen=True)
class Timeouts:
    """Seconds until a member that does not answer is dropped."""

    stall_seconds: float
    commit_seconds: float | None = None  # for an engine to finish the requests that it answers with the old version
    source_seconds: float | None = None  # for a source to write a bucket

    @property
    def for_commits(self) -> float:
        """`commit_seconds`, or else `stall_seconds`."""
        return self.stall_seconds if self.commit_seconds is None else self.commit_seconds

    @property
    def for_sources(self) -> float:
        """`source_seconds`, or else `stall_seconds`."""
        return self.stall_seconds if self.source_seconds is None else self.source_seconds


class _Dependencies:
    """The operations of a schedule that have yet to end, and those that each waits for."""

    def __init__(self, schedule: Schedule) -> None:
        self.left = len(schedule.operations)
        self._schedule = schedule
        self.missing = [len(operation.after) for operation in schedule.operations]  # dependencies that have not ended
        self.dependents: list[list[int]] = [[] for _ in schedule.operations]
        for operation in schedule.operations:
            for before in operation.after:
                self.dependents[before].append(operation.index)
        self._indices = {(o.kind, o.bucket): o.index for o in schedule.operations}
        self.buffers = {o.bucket: o.buffer for o in schedule.operations if o.kind is Kind.BROADCAST}
        if any(operation.kind is Kind.H2D for operation in schedule.operations):
            raise ValueError("an update between processes of one host copies nothing into H2D buffers")

    def first(self) -> list[Operation]:
        """Return the operations that wait for no other."""
        return [operation for operation in self._schedule.operations if not operation.after]

    def complete(self, kind: Kind, bucket: int) -> list[Operation]:
        """Note that an operation has ended; return those that waited for it and for nothing else."""
        self.left -= 1
        ready = []
        for index in self.dependents[self._indices[kind, bucket]]:
            self.missing[index] -= 1
            if not self.missing[index]:
                ready.append(self._schedule.operations[index])
        return ready


class _Sources:
    """The sources that are left, and which of them can write each bucket."""

    def __init__(self, names: Sequence[str], writers: Sequence[Sequence[str]] | None) -> None:
        self.names = list(names)
        self.writers = None if writers is None else [tuple(able) for able in writers]

    def able(self, bucket: int) -> Sequence[str]:
        """Return the sources that can write the bucket."""
        if self.writers is None:
            return self.names
        return [source for source in self.writers[bucket] if source in self.names]

    def first_lacking(self, buckets: Iterable[int]) -> int | None:
        """Return the first of these buckets that no source can write; None: each can be written."""
        return next((bucket for bucket in buckets if not self.able(bucket)), None)

    def choose(self, bucket: int) -> str:
        """Return the source that should write the bucket."""
        able = self.able(bucket)
        return able[bucket % len(able)] if self.writers is None else able[0]


class Update:
    """Decides one update; see the module's docstring. It has ended when `over` is true."""

    def __init__(
        self,
        schedule: Schedule,
        sources: Sequence[str],
        engines: Sequence[str],
        timeouts: Timeouts,
        *,
        confirmed: bool = True,
        writers: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """`sources` by device. `engines` have agreed to take the weights.

        `writers`: for each bucket the sources that can write it, the preferred one first. None: each source can write
        every bucket, and they take turns.

        Unless `confirmed`, no engine takes the new version before `confirm`.
        """
        self.over = False
        self.dropped: dict[str, str] = {}
        self.held_buckets = 0  # from the first one on, every remaining engine holds so many
        self._schedule = schedule
        self._sources = _Sources(sources, writers)
        self._engines = sorted(engines)
        self._timeouts = timeouts
        self._confirmed = confirmed
        self._dependencies = _Dependencies(schedule)
        self._broadcasts: dict[int, _Broadcast] = {}  # by bucket
        self._reloads: dict[int, _Reload] = {}  # of buckets that are written
        self._next = dict.fromkeys(self._engines, 0)  # the bucket that each engine takes next, or is taking
        self._committing: dict[str, float] | None = None  # engine -> deadline, once commits are ordered
        self._committed: list[str] = []

    # --- facts --------------------------------------------------------------------------------------------------
    def start(self, now: float) -> list[Order]:
        """Return the first orders."""
        if not self._engines or not self._sources.names:
            return self._abandon("there is no engine" if not self._engines else "there is no source")
        lacking = self._lacking()
        if lacking is not None:
            return self._abandon(f"no source holds bucket {lacking}")
        return self._begin(self._dependencies.first(), now)

    def written(self, source: str, bucket: int, digest: int, now: float) -> list[Order]:
        """The bucket lies in its buffer. Ignored from a source that was dropped meanwhile."""
        broadcast = self._broadcasts.get(bucket)
        if self.over or broadcast is None or broadcast.source != source or broadcast.deadline == 0.0:
            return []
        broadcast.deadline = 0.0
        if broadcast.digest is not None and broadcast.digest != digest:
            return self._abandon(f"bucket {bucket} of {source} has changed, or the sources differ")
        broadcast.digest = digest
        reload = self._reloads.get(bucket)
        if reload is not None:  # written again, for those that could not load it
            engines, reload.waiting = sorted(reload.waiting), set()
            if engines:
                return [self._load(engine, bucket, now) for engine in engines]
            return self._reloaded(bucket, now)  # they were dropped meanwhile
        self._reloads[bucket] = _Reload()
        orders = self._complete(Kind.BROADCAST, bucket, now)
        return orders + [self._load(engine, bucket, now) for engine in self._engines if self._next[engine] == bucket]

    def loaded(self, engine: str, bucket: int, now: float) -> list[Order]:
        """The engine has the bucket, verified."""
        reload = self._reloads.get(bucket)
        if self.over or reload is None or reload.pending.pop(engine, None) is None:
            return []
        self._next[engine] = bucket + 1
        return self._reloaded(bucket, now) + self._go_on(engine, now)

    def damaged(self, engine: str, bucket: int, now: float) -> list[Order]:
        """The bytes that the engine took out of the buffer do not have the digest of those that were put in."""
        reload = self._reloads.get(bucket)
        if self.over or reload is None or engine not in reload.pending:
            return []
        if reload.loads[engine] >= MAX_LOADS:
            return self._drop_engine(engine, f"bucket {bucket} arrived damaged {MAX_LOADS} times", now)
        if reload.loads[engine] < MAX_LOADS - 1:
            return [self._load(engine, bucket, now)]
        del reload.pending[engine]
        reload.waiting.add(engine)
        return self._reloaded(bucket, now)

    @property
    def moved(self) -> bool:
        """True if every remaining engine holds every bucket: nothing is read from a source any more."""
        return not self._dependencies.left

    def confirm(self, now: float) -> list[Order]:
        """The new version will last: engines may take it once they hold it."""
        self._confirmed = True
        return [] if self.over or not self.moved else self._commit(now)

    def committed(self, engine: str) -> list[Order]:
        """The engine answers with the new version."""
        if self.over or self._committing is None or self._committing.pop(engine, None) is None:
            return []
        self._committed.append(engine)
        return self._finish()

    def lost(self, member: str, why: str, now: float) -> list[Order]:
        """A source or an engine is gone; their names are distinct."""
        return self.lost_source(member, why, now) or self.lost_engine(member, why, now)

    def lost_source(self, source: str, why: str, now: float) -> list[Order]:
        """The source is gone or does not answer."""
        if self.over or source not in self._sources.names:
            return []
        self._sources.names.remove(source)
        self.dropped[source] = why
        orders: list[Order] = [Drop(source, why)]
        lacking = self._lacking() if self._committing is None else None
        if lacking is not None:
            what = f"no other source holds bucket {lacking}" if self._sources.names else "no source is left"
            return orders + self._abandon(f"{what} ({source}: {why})")
        for bucket, broadcast in sorted(self._broadcasts.items()):
            if self.over:  # the last engine needed a bucket written again that no other source holds
                break
            if broadcast.source != source or not broadcast.deadline:
                continue
            if self._sources.able(bucket) and self._is_needed(bucket):
                orders.append(self._write(bucket, now))
            else:  # it was written again, for engines that are gone or must go
                broadcast.deadline = 0.0
                orders += self._reloaded(bucket, now)
        return orders

    def lost_engine(self, engine: str, why: str, now: float) -> list[Order]:
        """The engine is gone, does not answer, or refuses. One that has the version has it: it is not dropped."""
        if self.over or engine not in self._engines or engine in self._committed:
            return []
        return self._drop_engine(engine, why, now)

    def next_deadline(self) -> float | None:
        """Return when `expire` must be called at the latest; None: no answer is awaited."""
        deadlines = [broadcast.deadline for broadcast in self._broadcasts.values() if broadcast.deadline]
        deadlines += [deadline for _, deadline in _deadlines(self._reloads.values(), self._committing or {})]
        return None if self.over else min(deadlines, default=None)

    def expire(self, now: float) -> list[Order]:
        """Drop the members that have not answered in time."""
        orders: list[Order] = []
        patience = self._timeouts.stall_seconds if self._committing is None else self._timeouts.for_commits
        silent = {b.source for b in self._broadcasts.values() if b.deadline and b.deadline <= now}
        for source in sorted(silent):  # named first: the next writer of its buckets has only begun
            orders += self.lost_source(source, f"no answer for {self._timeouts.for_sources:g} s", now)
        awaited = _deadlines(self._reloads.values(), self._committing or {})
        for engine in sorted({engine for engine, deadline in awaited if deadline <= now}):
            orders += self.lost_engine(engine, f"no answer for {patience:g} s", now)
        return orders

    # --- decisions ----------------------------------------------------------------------------------------------
    def _complete(self, kind: Kind, bucket: int, now: float) -> list[Order]:
        """An operation has ended: begin those that waited for it and for nothing else."""
        self.held_buckets += kind is Kind.RELOAD  # in the buckets' order: an engine reloads one at a time
        return self._begin(self._dependencies.complete(kind, bucket), now)

    def _begin(self, operations: Sequence[Operation], now: float) -> list[Order]:
        orders: list[Order] = []
        for operation in operations:
            if operation.kind is Kind.BROADCAST:
                self._broadcasts[operation.bucket] = _Broadcast()
                orders.append(self._write(operation.bucket, now))
        return orders if self._dependencies.left else orders + self._commit(now)

    def _commit(self, now: float) -> list[Order]:
        if not self._confirmed or self._committing is not None:
            return []
        self._committing = dict.fromkeys(self._engines, now + self._timeouts.for_commits)
        return [Commit(engine) for engine in self._engines]

    def _write(self, bucket: int, now: float) -> Write:
        source = self._sources.choose(bucket)
        broadcast = self._broadcasts[bucket]
        broadcast.source, broadcast.deadline = source, now + self._timeouts.for_sources
        return Write(source, bucket, self._dependencies.buffers[bucket])

    def _load(self, engine: str, bucket: int, now: float) -> Load:
        reload = self._reloads[bucket]
        reload.pending[engine] = now + self._timeouts.stall_seconds
        reload.loads[engine] = reload.loads.get(engine, 0) + 1
        digest = self._broadcasts[bucket].digest
        assert digest is not None
        return Load(engine, bucket, self._dependencies.buffers[bucket], digest)

    def _go_on(self, engine: str, now: float) -> list[Order]:
        """Return the orders for an engine that has taken a bucket."""
        bucket = self._next[engine]
        reload = self._reloads.get(bucket)
        if reload is None:
            return []
        if self._broadcasts[bucket].deadline:  # it is being written again, for engines that were here before
            reload.waiting.add(engine)
            return []
        return [self._load(engine, bucket, now)]

    def _is_needed(self, bucket: int) -> bool:
        """Return whether an engine has yet to take the bucket."""
        return any(next_ <= bucket for next_ in self._next.values())

    def _reloaded(self, bucket: int, now: float) -> list[Order]:
        """One engine less reads the bucket."""
        reload = self._reloads[bucket]
        # Also if it is being written again for no engine: until that has ended, its buffer is not free.
        if reload.over or reload.pending or self._broadcasts[bucket].deadline:
            return []
        if reload.waiting and not self._sources.able(bucket):
            engine = min(reload.waiting)
            return self._drop_engine(engine, f"bucket {bucket} arrived damaged, and no source is left", now)
        if reload.waiting:
            return [self._write(bucket, now)]
        if self._is_needed(bucket):  # by engines that are not so far
            return []
        reload.over = True
        return self._complete(Kind.RELOAD, bucket, now)

    def _drop_engine(self, engine: str, why: str, now: float) -> list[Order]:
        self._engines.remove(engine)
        del self._next[engine]
        self.dropped[engine] = why
        orders: list[Order] = [Drop(engine, why)]
        if self._committing is not None:
            self._committing.pop(engine, None)
            return orders + self._finish()
        if not self._engines:
            return orders + self._abandon(f"no engine is left ({engine}: {why})")
        for bucket, reload in sorted(self._reloads.items()):
            reload.pending.pop(engine, None)
            reload.waiting.discard(engine)
            if not self.over:
                orders += self._reloaded(bucket, now)
        return orders

    def _lacking(self) -> int | None:
        """Return a bucket that was never written and that no source can write; None: there is none."""
        written = {bucket for bucket, broadcast in self._broadcasts.items() if broadcast.digest is not None}
        return self._sources.first_lacking(bucket for bucket in range(self._schedule.buckets) if bucket not in written)

    def _finish(self) -> list[Order]:
        if self._committing:
            return []
        self.over = True
        return [Finished(tuple(sorted(self._committed)))]

    def _abandon(self, why: str) -> list[Order]:
        self.over = True
        return [Abandon(why)]


def _deadlines(reloads: Iterable[_Reload], committing: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the engines whose answer is awaited, each with its deadline; an engine may be named twice."""
    return [deadline for reload in reloads for deadline in reload.pending.items()] + list(committing.items())
