"""One update of every engine, decided: which bucket is written when, who loads it, who is dropped. Pure.

Feed it facts (`written`, `loaded`, `lost_...`), obey its orders. Time is an argument. The order of things comes from
the schedule's dependencies, with one freedom: an engine that has reloaded a bucket goes on to the next as soon as
that is written, whether or not the others are so far (two buffers allow one bucket's lead). So nobody waits for the
slowest at every bucket. What else is decided here is what a failure does to it:

- a source that is lost while it writes: another one that holds the weights writes that bucket;
- an engine that is lost: it is dropped, the others go on;
- a bucket whose digest does not match at some engine: that engine loads it again; if it is wrong again, a source
  writes it again once nobody else reads that buffer; after that the engine is dropped;
- no source left that holds a bucket which is still to be written, or no engine left: the update is abandoned, and
  every engine keeps the version it has.

An engine takes the new version only at `Commit`, which is ordered when every remaining engine holds every bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from relight.transfer.plan.schedule import Kind, Schedule

MAX_LOADS = 3  # of one bucket by one engine: as it was written, once more, and after it was written again


@dataclass(frozen=True)
class Write:
    """`source` shall put the bucket into the buffer and say `written`."""

    source: str
    bucket: int
    buffer: int


@dataclass(frozen=True)
class Load:
    """`engine` shall take the bucket out of the buffer, verify it, and say `loaded` or `damaged`."""

    engine: str
    bucket: int
    buffer: int
    digest: int


@dataclass(frozen=True)
class Commit:
    """`engine` holds everything: it shall take the new version, and say `committed`."""

    engine: str


@dataclass(frozen=True)
class Drop:
    """`member` (a source or an engine) has no part in this update any more."""

    member: str
    why: str


@dataclass(frozen=True)
class Abandon:
    """Nobody takes the new version."""

    why: str


@dataclass(frozen=True)
class Finished:
    """`engines` have the new version; what was dropped is in `Update.dropped`."""

    engines: tuple[str, ...]


Order = Write | Load | Commit | Drop | Abandon | Finished


@dataclass
class _Broadcast:
    source: str = ""
    digest: int | None = None
    deadline: float = 0.0


@dataclass
class _Reload:
    pending: dict[str, float] = field(default_factory=dict)  # engine -> deadline
    loads: dict[str, int] = field(default_factory=dict)  # engine -> how often it was told to
    waiting: set[str] = field(default_factory=set)  # engines that need it written again, or come while it is
    over: bool = False


class Update:
    """See the module's docstring. Over when `over`."""

    def __init__(
        self,
        schedule: Schedule,
        sources: Sequence[str],
        engines: Sequence[str],
        stall_timeout_seconds: float,
        *,
        confirmed: bool = True,
        commit_timeout_seconds: float | None = None,
        source_timeout_seconds: float | None = None,
        writers: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """`sources` by device. `engines` have agreed to take the weights.

        `writers`: for each bucket the sources that can write it, the one who should first. None: each of them can
        write every one, and they take turns.

        An engine may take `commit_timeout_seconds` (the other time-out, if None) to finish the requests that it is
        answering with the old version; nobody waits for it meanwhile. A source may take `source_timeout_seconds` (the
        other time-out, if None) for a bucket.

        Unless `confirmed`, no engine takes the new version before `confirm`.
        """
        self.over = False
        self.dropped: dict[str, str] = {}
        self.held_buckets = 0  # from the first one on, every remaining engine holds so many
        self._schedule = schedule
        self._sources = list(sources)
        self._engines = sorted(engines)
        self._writers = None if writers is None else [tuple(names) for names in writers]
        self._stall = stall_timeout_seconds
        self._commit_timeout = stall_timeout_seconds if commit_timeout_seconds is None else commit_timeout_seconds
        self._source_timeout = stall_timeout_seconds if source_timeout_seconds is None else source_timeout_seconds
        self._confirmed = confirmed
        self._left = len(schedule.operations)
        self._missing = [len(operation.after) for operation in schedule.operations]  # dependencies that are not over
        self._dependents: list[list[int]] = [[] for _ in schedule.operations]
        for operation in schedule.operations:
            for before in operation.after:
                self._dependents[before].append(operation.index)
        self._broadcasts: dict[int, _Broadcast] = {}  # by bucket
        self._reloads: dict[int, _Reload] = {}  # of buckets that are written
        self._next = dict.fromkeys(self._engines, 0)  # the bucket that each engine takes next, or is taking
        self._committing: dict[str, float] | None = None  # engine -> deadline, once commits are ordered
        self._committed: list[str] = []
        self._buffers = {o.bucket: o.buffer for o in schedule.operations if o.kind is Kind.BROADCAST}
        self._indices = {(o.kind, o.bucket): o.index for o in schedule.operations}

    # --- facts --------------------------------------------------------------------------------------------------
    def start(self, now: float) -> list[Order]:
        """The first orders."""
        if not self._engines or not self._sources:
            return self._abandon("there is no engine" if not self._engines else "there is no source")
        lacking = self._lacking()
        if lacking is not None:
            return self._abandon(f"no source holds bucket {lacking}")
        ready = [operation.index for operation in self._schedule.operations if not operation.after]
        return self._begin(ready, now)

    def written(self, source: str, bucket: int, digest: int, now: float) -> list[Order]:
        """The bucket lies in its buffer. Ignored from a source that was dropped meanwhile."""
        broadcast = self._broadcasts.get(bucket)
        if self.over or broadcast is None or broadcast.source != source or broadcast.deadline == 0.0:
            return []
        broadcast.deadline = 0.0
        if broadcast.digest is not None and broadcast.digest != digest:
            # Two sources hold different weights: nobody can tell which are right.
            return self._abandon(f"bucket {bucket} of {source} is not what it was before: the sources differ")
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
        """What the engine took out of the buffer does not have the digest of what was put in."""
        reload = self._reloads.get(bucket)
        if self.over or reload is None or engine not in reload.pending:
            return []
        if reload.loads[engine] >= MAX_LOADS:
            why = f"bucket {bucket} arrived damaged {MAX_LOADS} times"
            return self._drop_engine(engine, why, now)
        if reload.loads[engine] < MAX_LOADS - 1:
            return [self._load(engine, bucket, now)]
        del reload.pending[engine]
        reload.waiting.add(engine)
        return self._reloaded(bucket, now)

    @property
    def moved(self) -> bool:
        """Whether every remaining engine holds every bucket: nothing is read from a source any more."""
        return not self._left

    def confirm(self, now: float) -> list[Order]:
        """The new version will last: engines may take it once they hold it."""
        self._confirmed = True
        return [] if self.over or self._left else self._commit(now)

    def committed(self, engine: str, now: float) -> list[Order]:
        """The engine answers with the new version."""
        del now
        if self.over or self._committing is None or self._committing.pop(engine, None) is None:
            return []
        self._committed.append(engine)
        return self._finish()

    def lost(self, member: str, why: str, now: float) -> list[Order]:
        """A source or an engine is gone; their names are distinct."""
        return self.lost_source(member, why, now) or self.lost_engine(member, why, now)

    def lost_source(self, source: str, why: str, now: float) -> list[Order]:
        """The source is gone or does not answer."""
        if self.over or source not in self._sources:
            return []
        self._sources.remove(source)
        self.dropped[source] = why
        orders: list[Order] = [Drop(source, why)]
        lacking = self._lacking() if self._committing is None else None
        if lacking is not None:
            what = f"no other source holds bucket {lacking}" if self._sources else "no source is left"
            return orders + self._abandon(f"{what} ({source}: {why})")
        for bucket, broadcast in sorted(self._broadcasts.items()):
            if self.over:  # the last engine needed a bucket written again that nobody else holds
                break
            if broadcast.source != source or not broadcast.deadline:
                continue
            if self._able(bucket) and self._is_needed(bucket):
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

    # --- time ---------------------------------------------------------------------------------------------------
    def next_deadline(self) -> float | None:
        """When `expire` must be called at the latest."""
        deadlines = [broadcast.deadline for broadcast in self._broadcasts.values() if broadcast.deadline]
        for reload in self._reloads.values():
            deadlines += reload.pending.values()
        deadlines += (self._committing or {}).values()
        return None if self.over or not deadlines else min(deadlines)

    def expire(self, now: float) -> list[Order]:
        """Drop whoever has not answered in time: nobody else waits longer for it."""
        orders: list[Order] = []
        patience = self._stall if self._committing is None else self._commit_timeout
        why = f"no answer for {patience:g} s"
        silent = {b.source for b in self._broadcasts.values() if b.deadline and b.deadline <= now}
        for source in sorted(silent):  # named first: the next writer of its buckets has only begun
            orders += self.lost_source(source, f"no answer for {self._source_timeout:g} s", now)
        late = {e for r in self._reloads.values() for e, deadline in r.pending.items() if deadline <= now}
        late |= {engine for engine, deadline in (self._committing or {}).items() if deadline <= now}
        for engine in sorted(late):
            orders += self.lost_engine(engine, why, now)
        return orders

    # --- decisions ----------------------------------------------------------------------------------------------
    def _complete(self, kind: Kind, bucket: int, now: float) -> list[Order]:
        """The operation is over: begin those that waited for it and for nothing else."""
        self._left -= 1
        self.held_buckets += kind is Kind.RELOAD  # in the buckets' order: an engine reloads one at a time
        ready = []
        for index in self._dependents[self._indices[kind, bucket]]:
            self._missing[index] -= 1
            if not self._missing[index]:
                ready.append(index)
        return self._begin(ready, now)

    def _begin(self, ready: Sequence[int], now: float) -> list[Order]:
        orders: list[Order] = []
        for index in ready:
            operation = self._schedule.operations[index]
            if operation.kind is Kind.BROADCAST:
                self._broadcasts[operation.bucket] = _Broadcast()
                orders.append(self._write(operation.bucket, now))
            elif operation.kind is Kind.H2D:
                raise ValueError("an update between processes of one host copies nothing into H2D buffers")
        return orders if self._left else orders + self._commit(now)

    def _commit(self, now: float) -> list[Order]:
        if not self._confirmed or self._committing is not None:
            return []
        self._committing = dict.fromkeys(self._engines, now + self._commit_timeout)
        return [Commit(engine) for engine in self._engines]

    def _write(self, bucket: int, now: float) -> Write:
        able = self._able(bucket)
        source = able[bucket % len(able)] if self._writers is None else able[0]
        broadcast = self._broadcasts[bucket]
        broadcast.source, broadcast.deadline = source, now + self._source_timeout
        return Write(source, bucket, self._buffers[bucket])

    def _load(self, engine: str, bucket: int, now: float) -> Load:
        reload = self._reloads[bucket]
        reload.pending[engine] = now + self._stall
        reload.loads[engine] = reload.loads.get(engine, 0) + 1
        digest = self._broadcasts[bucket].digest
        assert digest is not None
        return Load(engine, bucket, self._buffers[bucket], digest)

    def _go_on(self, engine: str, now: float) -> list[Order]:
        """The engine has taken a bucket: what it does next."""
        bucket = self._next[engine]
        reload = self._reloads.get(bucket)
        if reload is None:
            return []
        if self._broadcasts[bucket].deadline:  # it is being written again, for those who were here before
            reload.waiting.add(engine)
            return []
        return [self._load(engine, bucket, now)]

    def _is_needed(self, bucket: int) -> bool:
        """Whether an engine has yet to take it."""
        return any(next_ <= bucket for next_ in self._next.values())

    def _reloaded(self, bucket: int, now: float) -> list[Order]:
        """One engine less reads the bucket."""
        reload = self._reloads[bucket]
        # Also if it is being written again for nobody: until that is over, its buffer is not free.
        if reload.over or reload.pending or self._broadcasts[bucket].deadline:
            return []
        if reload.waiting and not self._able(bucket):
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

    def _able(self, bucket: int) -> Sequence[str]:
        """The sources that are left and can write it."""
        if self._writers is None:
            return self._sources
        return [source for source in self._writers[bucket] if source in self._sources]

    def _lacking(self) -> int | None:
        """A bucket that was never written, and that nobody can write; one that was has a digest."""
        for bucket in range(self._schedule.buckets):
            broadcast = self._broadcasts.get(bucket)
            if (broadcast is None or broadcast.digest is None) and not self._able(bucket):
                return bucket
        return None

    def _finish(self) -> list[Order]:
        if self._committing:
            return []
        self.over = True
        return [Finished(tuple(sorted(self._committed)))]

    def _abandon(self, why: str) -> list[Order]:
        self.over = True
        return [Abandon(why)]
