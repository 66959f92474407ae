"""`Update` in a simulated world: random schedules of trouble, bugs that the search must find, and single cases."""

from collections.abc import Sequence

import pytest

from relight.transfer.plan.schedule import Form, Kind, make_schedule
from relight.transfer.plan.update.orders import Abandon, Commit, Drop, Finished, Load, Order, Write
from relight.transfer.plan.update.update import Timeouts, Update
from tests.transfer.simulated_update import STALL, MakeUpdate, ViolationError, World

SEEDS = 3000


def search(make: MakeUpdate, seeds: Sequence[int]) -> tuple[int, BaseException] | None:
    """The first seed that shows something wrong, and what."""
    for seed in seeds:
        try:
            World(seed, make).run()
        except (ViolationError, LookupError, AttributeError, AssertionError) as error:
            return seed, error
    return None


def test_whatever_happens_the_invariants_hold() -> None:
    found = search(Update, range(SEEDS))
    assert found is None, f"seed {found[0]}: {found[1]}"


@pytest.mark.all
def test_whatever_happens_the_invariants_hold_in_many_worlds() -> None:
    found = search(Update, range(SEEDS, 60_000))
    assert found is None, f"seed {found[0]}: {found[1]}"


def test_the_worlds_are_of_every_kind() -> None:
    """The search is worth nothing if nothing happens in it."""
    worlds = [World(seed).run() for seed in range(500)]
    ends = [type(world.ended) for world in worlds]
    assert ends.count(Finished) > 100
    assert ends.count(Abandon) > 30
    assert sum(any("damaged" in why for why in world.update.dropped.values()) for world in worlds) > 20
    assert sum(any("expire" in line for line in world.story) for world in worlds) > 50
    assert sum(bool(world.update.dropped) and isinstance(world.ended, Finished) for world in worlds) > 50
    rewrites = [world for world in worlds if any(count > 1 for count in world.writes.values())]
    assert len(rewrites) > 30


# --- planted bugs -------------------------------------------------------------------------------------------------
class ForgetsWhoWasBehind(Update):
    """An engine is dropped that had not come to a bucket yet, and the bucket's wait for it goes unnoticed."""

    def _drop_engine(self, engine: str, why: str, now: float) -> list[Order]:
        ahead = {b: r for b, r in self._reloads.items() if engine not in r.pending and engine not in r.waiting}
        for bucket in ahead:
            del self._reloads[bucket]
        orders = super()._drop_engine(engine, why, now)
        self._reloads.update(ahead)
        return orders


class LeavesTheSlowBehind(Update):
    """A bucket is over once those who came to it have it; its buffer is written while others have yet to come."""

    def _is_needed(self, bucket: int) -> bool:
        return False


class ReadsWhatIsWrittenAgain(Update):
    """An engine comes to a bucket that is just being written again for another one."""

    def _go_on(self, engine: str, now: float) -> list[Order]:
        bucket = self._next[engine]
        return [self._load(engine, bucket, now)] if bucket in self._reloads else []


class GoesOnBesideARewrite(Update):
    """No engine waits for the bucket any more, but its buffer is still being written. This was a bug here."""

    def _reloaded(self, bucket: int, now: float) -> list[Order]:
        reload, broadcast = self._reloads[bucket], self._broadcasts[bucket]
        if broadcast.deadline and not reload.waiting and not reload.pending:
            broadcast.deadline = 0.0
        return super()._reloaded(bucket, now)


class BlamesTheNextWriter(Update):
    """Two buckets of a silent source expire together: the second is by then another source's. This was a bug here."""

    def expire(self, now: float) -> list[Order]:
        orders: list[Order] = []
        for broadcast in [b for b in self._broadcasts.values() if b.deadline and b.deadline <= now]:
            orders += self.lost_source(broadcast.source, "no answer", now)
        return orders + super().expire(now)


class GivesUpWithTheLastSource(Update):
    """Everything has been written, but a bucket was to be written again for one engine. This was a bug here."""

    def _lacking(self) -> int | None:
        again = [bucket for bucket, broadcast in self._broadcasts.items() if broadcast.deadline]
        lacking = super()._lacking()
        return again[0] if lacking is None and again and not self._sources.names else lacking


class AsksAnySource(Update):
    """A source of divided weights is ordered to write what it does not hold."""

    def start(self, now: float) -> list[Order]:
        self._sources.writers = None
        return super().start(now)


class WaitsForAHolder(Update):
    """No member that is left holds a bucket that is still to be written, and that goes unnoticed."""

    def _lacking(self) -> int | None:
        return None if self._sources.names else super()._lacking()


class RewritesUnderReaders(Update):
    """A bucket is written again while others still read it."""

    def damaged(self, engine: str, bucket: int, now: float) -> list[Order]:
        orders = super().damaged(engine, bucket, now)
        reload = self._reloads.get(bucket)
        if reload is not None and engine in reload.waiting and reload.pending and self._sources.names:
            orders = [*orders, self._write(bucket, now)]
        return orders


class CommitsEarly(Update):
    """The last reload is not waited for."""

    def start(self, now: float) -> list[Order]:
        self._dependencies.left -= 1
        return super().start(now)


class TakesDamagedBuckets(Update):
    """A bucket that arrived damaged counts as loaded."""

    def damaged(self, engine: str, bucket: int, now: float) -> list[Order]:
        return super().loaded(engine, bucket, now)


class LosesTheBucketOfALostSource(Update):
    """No other source is ordered to write it."""

    def lost_source(self, source: str, why: str, now: float) -> list[Order]:
        orders = super().lost_source(source, why, now)
        for broadcast in self._broadcasts.values():
            if broadcast.deadline == now + STALL and broadcast.digest is None:
                broadcast.deadline = 0.0
        return [order for order in orders if not isinstance(order, Write)]


class WaitsForTheDead(Update):
    """A dropped engine's reload never ends."""

    def _drop_engine(self, engine: str, why: str, now: float) -> list[Order]:
        for reload in self._reloads.values():
            if reload.pending.pop(engine, None) is not None:
                reload.pending["stranger"] = now + 1000 * STALL
        return super()._drop_engine(engine, why, now)


class BelievesTheDropped(Update):
    """Each member that says `written` is believed, also one that was dropped and says it for another."""

    def written(self, source: str, bucket: int, digest: int, now: float) -> list[Order]:
        broadcast = self._broadcasts.get(bucket)
        return super().written(broadcast.source if broadcast is not None else source, bucket, digest, now)


class WaitsForCommitsForEver(Update):
    """A commit has no deadline."""

    def next_deadline(self) -> float | None:
        return None if self._committing is not None else super().next_deadline()


class AbandonsAfterCommit(Update):
    """The last source may go once everything is written; this one gives up even then."""

    def lost_source(self, source: str, why: str, now: float) -> list[Order]:
        orders = super().lost_source(source, why, now)
        return orders if self._sources.names or self.over else orders + self._abandon("no source is left")


class CommitsUnconfirmed(Update):
    """The version is given out before every rank is known to hold it."""

    def _commit(self, now: float) -> list[Order]:
        self._confirmed = True
        return super()._commit(now)


class OverwritesWhatIsRead(Update):
    """The broadcast into a buffer does not wait for the reload out of it."""

    def start(self, now: float) -> list[Order]:
        operations = self._schedule.operations
        for operation in operations:
            freed = {i for i in operation.after if operations[i].kind is Kind.RELOAD}
            if operation.kind is Kind.BROADCAST and freed:
                self._dependencies.missing[operation.index] -= len(freed)
                for index in freed:
                    self._dependencies.dependents[index].remove(operation.index)
        return super().start(now)


class DropsAtTheFirstDamage(Update):
    """Damage is an accident; an engine that met it once is not lost."""

    def damaged(self, engine: str, bucket: int, now: float) -> list[Order]:
        return self.lost_engine(engine, "damaged", now)


class CountsWhatIsWritten(Update):
    """A bucket in a buffer is not a bucket in the engines."""

    def _complete(self, kind: Kind, bucket: int, now: float) -> list[Order]:
        self.held_buckets += 1 if kind is Kind.BROADCAST else -1  # the reload is counted by Update itself
        return super()._complete(kind, bucket, now)


BUGS = [
    CountsWhatIsWritten,
    ForgetsWhoWasBehind,
    LeavesTheSlowBehind,
    ReadsWhatIsWrittenAgain,
    GoesOnBesideARewrite,
    GivesUpWithTheLastSource,
    AsksAnySource,
    WaitsForAHolder,
    RewritesUnderReaders,
    CommitsEarly,
    TakesDamagedBuckets,
    LosesTheBucketOfALostSource,
    WaitsForTheDead,
    BelievesTheDropped,
    WaitsForCommitsForEver,
    AbandonsAfterCommit,
    CommitsUnconfirmed,
    OverwritesWhatIsRead,
    DropsAtTheFirstDamage,
]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: type[Update]) -> None:
    found = search(bug, range(SEEDS))
    assert found is not None
    print(f"{bug.__name__}: seed {found[0]}: {found[1]}")


# --- single cases -------------------------------------------------------------------------------------------------
def update_of(sources: int = 1, engines: int = 1, buckets: int = 1) -> Update:
    schedule = make_schedule(Form.TWO_STAGE, devices=sources, buckets=buckets, from_host=True)
    return Update(schedule, [f"s{i}" for i in range(sources)], [f"e{i}" for i in range(engines)], Timeouts(STALL))


def test_the_course_of_an_update() -> None:
    update = update_of(engines=2, buckets=2)
    assert update.next_deadline() is None
    assert update.start(0.0) == [Write("s0", 0, 0)]
    assert update.next_deadline() == STALL
    begun = update.written("s0", 0, 77, 1.0)
    assert begun == [Write("s0", 1, 1), Load("e0", 0, 0, 77), Load("e1", 0, 0, 77)]
    assert update.loaded("e0", 0, 2.0) == []
    assert update.loaded("e0", 0, 2.0) == [], "said twice"
    assert update.written("s0", 1, 78, 2.0) == [Load("e0", 1, 1, 78)], "each engine reloads one bucket at a time"
    assert update.loaded("e1", 0, 2.0) == [Load("e1", 1, 1, 78)]
    assert update.loaded("e1", 1, 3.0) == []
    assert update.loaded("e0", 1, 3.0) == [Commit("e0"), Commit("e1")]
    assert update.committed("e1") == []
    assert update.committed("e0") == [Finished(("e0", "e1"))]
    assert update.over


def test_weights_of_no_bytes_are_only_committed() -> None:
    update = update_of(buckets=0)
    assert update.start(0.0) == [Commit("e0")]
    assert update.committed("e0") == [Finished(("e0",))]


def test_nobody_to_send_and_nobody_to_take() -> None:
    for update in (update_of(engines=0), update_of(engines=0, buckets=0)):
        assert update.start(0.0) == [Abandon("there is no engine")]
        assert update.over
    update = Update(make_schedule(Form.SERIAL, devices=1, buckets=1, from_host=True), [], ["e0"], Timeouts(STALL))
    assert update.start(0.0) == [Abandon("there is no source")]


def test_two_sources_that_hold_different_weights_end_the_update() -> None:
    update = update_of(sources=2, engines=2)
    update.start(0.0)
    update.written("s0", 0, 77, 0.0)
    update.loaded("e1", 0, 0.0)
    assert update.damaged("e0", 0, 0.0) == [Load("e0", 0, 0, 77)]
    assert update.damaged("e0", 0, 0.0) == [Write("s0", 0, 0)]
    assert update.lost_source("s0", "died", 0.0) == [Drop("s0", "died"), Write("s1", 0, 0)]
    (abandon,) = update.written("s1", 0, 78, 0.0)
    assert isinstance(abandon, Abandon)
    assert "the sources differ" in abandon.why


def two_writes_of_a_silent_source(update: Update) -> list[Order]:
    update.start(0.0)
    update.written("s0", 0, 77, 0.0)
    assert update.lost_source("s0", "died", 0.0) == [Drop("s0", "died")]
    update.damaged("e0", 0, 0.0)
    assert update.damaged("e0", 0, 0.0) == [Write("s1", 0, 0)], "beside bucket 1, which it was told to write before"
    return update.expire(STALL)


def test_who_takes_over_two_buckets_is_not_blamed_for_the_second() -> None:
    """Too rare for the search: both writes of one source expire together."""
    orders = two_writes_of_a_silent_source(update_of(sources=3, buckets=3))
    assert orders == [Drop("s1", f"no answer for {STALL:g} s"), Write("s2", 0, 0), Write("s2", 1, 1)]
    schedule = make_schedule(Form.TWO_STAGE, devices=3, buckets=3, from_host=True)
    orders = two_writes_of_a_silent_source(BlamesTheNextWriter(schedule, ["s0", "s1", "s2"], ["e0"], Timeouts(STALL)))
    assert any(isinstance(order, Drop) and order.member == "s2" for order in orders)


def test_damage_once_twice_and_always() -> None:
    update = update_of(engines=2)
    update.start(0.0)
    update.written("s0", 0, 77, 0.0)
    assert update.damaged("e0", 0, 0.0) == [Load("e0", 0, 0, 77)], "once: it may have been this engine's own memory"
    assert update.damaged("e0", 0, 0.0) == [], "not under the eyes of those who still read it"
    assert update.loaded("e1", 0, 0.0) == [Write("s0", 0, 0)]
    assert update.written("s0", 0, 77, 0.0) == [Load("e0", 0, 0, 77)]
    assert update.damaged("e0", 0, 0.0) == [Drop("e0", "bucket 0 arrived damaged 3 times"), Commit("e1")]


def test_schedules_of_devices_are_not_run_here() -> None:
    with pytest.raises(ValueError, match="copies nothing into H2D buffers"):
        Update(make_schedule(Form.TWO_STAGE, devices=1, buckets=1), ["s"], ["e"], Timeouts(STALL))
