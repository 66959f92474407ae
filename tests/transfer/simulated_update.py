"""A world for `Update`: sources and engines that answer, late or never, damaged or not; and a judge of its orders.

The world runs on a clock of quarters of the stall timeout, so that things also happen at the same instant. Everything
follows from the seed.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from relight.transfer.plan.schedule import Form, Schedule, make_schedule
from relight.transfer.plan.update.orders import Abandon, Commit, Drop, Finished, Load, Order, Write
from relight.transfer.plan.update.update import Timeouts, Update

STALL = 4.0
_TICK = 1.0


class MakeUpdate(Protocol):
    """`Update`, or one with a bug."""

    def __call__(
        self,
        schedule: Schedule,
        sources: Sequence[str],
        engines: Sequence[str],
        timeouts: Timeouts,
        *,
        confirmed: bool,
        writers: Sequence[Sequence[str]] | None,
    ) -> Update: ...


class ViolationError(AssertionError):
    """An order, or its absence, breaks an invariant."""


@dataclass
class Member:
    """A source or an engine, and what will go wrong with it."""

    name: str
    trouble: str = ""  # "", dies, freezes, dawdles, damages
    at: float = 0.0  # when it dies or freezes
    damage: float = 0.0  # how likely it is that what it loads is damaged

    @property
    def is_healthy(self) -> bool:
        return not self.trouble

    def is_silent(self, now: float) -> bool:
        return self.trouble in ("dies", "freezes") and now >= self.at


@dataclass(frozen=True)
class Plan:
    """The update that a seed means."""

    sources: tuple[Member, ...]
    engines: tuple[Member, ...]
    schedule: Schedule
    damaged_writes: frozenset[int]  # buckets that are written wrong the first time
    writers: tuple[tuple[str, ...], ...] | None  # of each bucket, if not every source can write it


def plan_of(seed: int) -> Plan:
    chance = random.Random(seed)
    rough = chance.random() < 0.2  # many sources, most of them in trouble, and much to be written again
    buckets = chance.choice((4, 6) if rough else (0, 1, 2, 3, 4, 6))
    count = chance.choice((3, 4) if rough else (1, 1, 2, 3))
    sources = tuple(_member(chance, f"source{i}", buckets, 0.8 if rough else 0.5) for i in range(count))
    engines = tuple(_member(chance, f"engine{i}", buckets) for i in range(chance.randint(1, 4)))
    form = chance.choice((Form.SERIAL, Form.TWO_STAGE, Form.TWO_STAGE))
    schedule = make_schedule(form, devices=len(sources), buckets=buckets, from_host=True)
    risk = 0.7 if rough else chance.choice((0.0, 0.3))
    wrong = frozenset(bucket for bucket in range(buckets) if chance.random() < risk)
    return Plan(sources, engines, schedule, wrong, _writers(seed, [source.name for source in sources], buckets))


def _writers(seed: int, sources: Sequence[str], buckets: int) -> tuple[tuple[str, ...], ...] | None:
    chance = random.Random(f"writers {seed}")
    if chance.random() < 0.5:
        return None
    return tuple(tuple(chance.sample(sources, chance.randint(1, len(sources)))) for _ in range(buckets))


def _member(chance: random.Random, name: str, buckets: int, risk: float = 0.5) -> Member:
    troubles = ["dies", "freezes", "dawdles"] + (["damages"] * 2 if name.startswith("engine") else [])
    trouble = chance.choice(troubles) if chance.random() < risk else ""
    at = chance.randint(0, 6 + 6 * buckets) * _TICK
    is_damaging = trouble == "damages" or (trouble and name.startswith("engine") and chance.random() < 0.5)
    return Member(name, trouble, at, chance.choice((0.4, 1.0)) if is_damaging else 0.0)


@dataclass
class World:
    """One update from its start to its end; `run` raises ViolationError if anything is not as it must be."""

    seed: int
    make: MakeUpdate = Update
    now: float = 0.0
    story: list[str] = field(default_factory=list)
    ended: Abandon | Finished | None = None

    def __post_init__(self) -> None:
        self.plan = plan_of(self.seed)
        self.chance = random.Random(f"world {self.seed}")
        self.members = {member.name: member for member in (*self.plan.sources, *self.plan.engines)}
        sources, engines = [m.name for m in self.plan.sources], [m.name for m in self.plan.engines]
        self.confirmed = self.chance.random() < 0.7
        self.update = self.make(
            self.plan.schedule, sources, engines, Timeouts(STALL), confirmed=self.confirmed, writers=self.plan.writers
        )
        self.engines = {member.name for member in self.plan.engines}
        self.sources = {member.name for member in self.plan.sources}
        self.dropped: set[str] = set()
        self.asked: dict[Order, float] = {}  # unanswered orders of members that take part, and since when
        self.contents: dict[int, tuple[int, bool]] = {}  # buffer -> bucket, and whether it is intact
        self.verified: dict[str, set[int]] = {name: set() for name in self.engines}
        self.writes: dict[int, int] = {}
        self.held_buckets = 0  # as it was said last
        self.commits: set[str] = set()
        self.committed: set[str] = set()
        self.misled: set[str] = set()  # engines that met a buffer with something wrong in it
        self._events: list[tuple[float, int, Callable[[], Iterable[Order]], str]] = []
        self._count = 0

    # --- the clock ------------------------------------------------------------------------------------------------
    def run(self) -> "World":
        for member in self.members.values():
            if member.trouble == "dies":
                self._later(member.at - self.now, partial(self._lost, member.name), f"{member.name} dies")
        if not self.confirmed:
            self._later(self.chance.randint(1, 60) * _TICK, self._confirm, "the version is confirmed")
        self._obey(self.update.start(self.now))
        rounds = 2 + 2 * len(self.plan.schedule.operations)
        bound = 60 * _TICK + (rounds + 6 * self.plan.schedule.buckets + len(self.members)) * STALL
        while self.ended is None:
            self._check_patience()
            deadline = self.update.next_deadline()
            at = self._events[0][0] if self._events else None
            if deadline is None and (at is None or (not self.asked and self.confirmed)):
                raise ViolationError("it waits for no member, and forever")
            if deadline is not None and (
                at is None or deadline < at or (deadline == at and self.chance.random() < 0.5)
            ):
                # This process may be late itself.
                late = deadline + self.chance.randint(0, 3) * _TICK
                self.now = max(self.now, deadline, late if at is None else min(late, at))
                self.story.append(f"{self.now:5.1f} expire")
                self._obey(self.update.expire(self.now))
            else:
                self.now, _, happen, what = heapq.heappop(self._events)
                self.story.append(f"{self.now:5.1f} {what}")
                self._obey(happen())
            if self.now > bound:
                raise ViolationError(f"not over after {bound / STALL:g} times the stall timeout")
        self._check_end()
        return self

    def _later(self, delay: float, happen: Callable[[], Iterable[Order]], what: str) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, happen, what))

    def _check_patience(self) -> None:
        for order, since in self.asked.items():
            if self.now > since + STALL:
                raise ViolationError(f"{order} is unanswered for {self.now - since:g} s, and nothing happens")
        deadline = self.update.next_deadline()
        if deadline is not None and deadline > self.now + STALL:
            raise ViolationError("it waits for longer than the stall timeout")

    def _confirm(self) -> Iterable[Order]:
        self.confirmed = True
        return self.update.confirm(self.now)

    # --- what members do --------------------------------------------------------------------------------------------
    def _lost(self, name: str) -> Iterable[Order]:
        lost = self.update.lost_source if name in self.sources else self.update.lost_engine
        return lost(name, "it died", self.now)

    def _answer(self, name: str, order: Order, happen: Callable[[], Iterable[Order]], what: str) -> None:
        member = self.members[name]
        delay = self.chance.randint(0, 3) * _TICK
        if member.trouble == "dawdles" and self.chance.random() < 0.15:
            delay = self.chance.randint(5, 10) * _TICK

        def answer() -> Iterable[Order]:
            if member.is_silent(self.now):
                return ()
            self.asked.pop(order, None)
            return happen()

        self._later(delay, answer, what)

    def _write(self, order: Write) -> Iterable[Order]:
        if order.source in self.dropped:  # it was thought dead, and now writes into whatever lies there
            self.contents[order.buffer] = (self.contents.get(order.buffer, (-1, False))[0], False)
        else:
            count = self.writes[order.bucket] = self.writes.get(order.bucket, 0) + 1
            self.contents[order.buffer] = (order.bucket, count > 1 or order.bucket not in self.plan.damaged_writes)
        return self.update.written(order.source, order.bucket, order.bucket + 1000, self.now)

    def _load(self, order: Load) -> Iterable[Order]:
        bucket, intact = self.contents.get(order.buffer, (-1, False))
        if not intact:
            self.misled.add(order.engine)
        if bucket != order.bucket or self.chance.random() < self.members[order.engine].damage or not intact:
            return self.update.damaged(order.engine, order.bucket, self.now)
        if order.engine not in self.dropped:
            self.verified[order.engine].add(order.bucket)
        return self.update.loaded(order.engine, order.bucket, self.now)

    def _commit(self, order: Commit) -> Iterable[Order]:
        if order.engine not in self.dropped:
            self.committed.add(order.engine)
        return self.update.committed(order.engine)

    # --- the judge --------------------------------------------------------------------------------------------------
    def _obey(self, orders: Iterable[Order]) -> None:
        for order in orders:
            self.story.append(f"{self.now:5.1f}   {order}")
            if self.ended is not None:
                raise ViolationError(f"{order} after the end")
            match order:
                case Write():
                    self._check_write(order)
                    self._ask(order.source, order, partial(self._write, order))
                case Load():
                    self._check_load(order)
                    self._ask(order.engine, order, partial(self._load, order))
                case Commit():
                    self._check_commit(order)
                    self._ask(order.engine, order, partial(self._commit, order))
                case Drop():
                    self._check_drop(order)
                case Abandon():
                    self._check_abandon(order)
                    self.ended = order
                case Finished():
                    if set(order.engines) != self.committed:
                        raise ViolationError(f"{order.engines} are said to have it, {self.committed} have")
                    if self.committed & self.update.dropped.keys():
                        raise ViolationError(f"{self.update.dropped} were dropped, {self.committed} have it")
                    self.ended = order
        if self.update.over != (self.ended is not None):
            raise ViolationError("it is over and does not say so, or says so and is not")
        self._check_progress()

    def _ask(self, name: str, order: Order, happen: Callable[[], Iterable[Order]]) -> None:
        if name in self.dropped:
            raise ViolationError(f"{order} to a member that was dropped")
        if order in self.asked:
            raise ViolationError(f"{order} a second time, before it was answered")
        self.asked[order] = self.now
        self._answer(name, order, happen, f"{name} answers {order}")

    def _using(self, buffer: int, kind: type[Load] | type[Write]) -> list[Order]:
        return [order for order in self.asked if isinstance(order, kind) and order.buffer == buffer]

    def _check_write(self, order: Write) -> None:
        if order.source not in self._able(order.bucket):
            raise ViolationError(f"{order}, of which it does not hold all")
        for busy in self._using(order.buffer, Load) + self._using(order.buffer, Write):
            raise ViolationError(f"{order}, but {busy} is not answered")
        held = self.contents.get(order.buffer, (order.bucket, True))[0]
        if held > order.bucket:
            raise ViolationError(f"{order} after bucket {held}")
        missing = {e for e in self.engines - self.dropped if held not in (-1, order.bucket, *self.verified[e])}
        if missing:
            raise ViolationError(f"{order}, but {sorted(missing)} have not loaded bucket {held}")

    def _check_load(self, order: Load) -> None:
        if self._using(order.buffer, Write):
            raise ViolationError(f"{order} out of a buffer that is being written")
        if self.contents[order.buffer][0] != order.bucket or order.digest != order.bucket + 1000:
            raise ViolationError(f"{order}, but the buffer holds bucket {self.contents[order.buffer][0]}")
        if order.bucket in self.verified[order.engine]:
            raise ViolationError(f"{order}, which it has")
        if any(isinstance(asked, Load) and asked.engine == order.engine for asked in self.asked):
            raise ViolationError(f"{order}, while it is loading another bucket")

    def _check_commit(self, order: Commit) -> None:
        if order.engine in self.commits:
            raise ViolationError(f"{order} a second time")
        if not self.confirmed:
            raise ViolationError(f"{order} of a version that may not last")
        self.commits.add(order.engine)
        for engine in self.engines - self.dropped:
            if len(self.verified[engine]) != self.plan.schedule.buckets:
                raise ViolationError(f"{order}, but {engine} has only {sorted(self.verified[engine])}")

    def _check_drop(self, order: Drop) -> None:
        if self.members[order.member].is_healthy and not self._is_misled(order):
            raise ViolationError(f"{order}, but it is healthy")
        if order.member in self.dropped:
            raise ViolationError(f"{order} a second time")
        self.dropped.add(order.member)
        for asked in list(self.asked):
            if order.member == (asked.source if isinstance(asked, Write) else asked.engine):  # type: ignore[union-attr]
                del self.asked[asked]

    def _is_misled(self, drop: Drop) -> bool:
        """Return whether it fell for want of an intact copy, and not for its own sake."""
        if drop.member not in self.misled:
            return False
        scribbled = any(m.trouble == "dawdles" and m.name in self.dropped for m in self.plan.sources)
        lacking = any(not self._able(bucket) - self.dropped for bucket in range(self.plan.schedule.buckets))
        return lacking or not self.sources - self.dropped or scribbled

    def _able(self, bucket: int) -> set[str]:
        return self.sources if self.plan.writers is None else set(self.plan.writers[bucket])

    def _check_abandon(self, order: Abandon) -> None:
        if self.commits:
            raise ViolationError(f"{order} after commits were ordered")
        unwritten = set(range(self.plan.schedule.buckets)) - self.writes.keys()
        lacking = any(not self._able(bucket) - self.dropped for bucket in unwritten)
        if self.sources - self.dropped and self.engines - self.dropped and not lacking:
            raise ViolationError(f"{order}, though a member is left")
        if self.engines - self.dropped and len(self.writes) == self.plan.schedule.buckets:
            raise ViolationError(f"{order}, though everything was written")

    def _check_progress(self) -> None:
        held = self.update.held_buckets
        if held < self.held_buckets:
            raise ViolationError(f"it says that {held} buckets are held, after {self.held_buckets}")
        for engine in sorted(self.engines - self.dropped):
            if not self.verified[engine].issuperset(range(held)):
                raise ViolationError(f"it says that {held} buckets are held, {engine} has {self.verified[engine]}")
        if isinstance(self.ended, Finished) and held != self.plan.schedule.buckets:
            raise ViolationError(f"it is finished, and says that {held} buckets are held")
        self.held_buckets = held

    def _check_end(self) -> None:
        healthy = {m.name for m in self.plan.engines if m.is_healthy}
        lasting = {m.name for m in self.plan.sources if m.is_healthy}
        can_last = lasting and all(lasting & self._able(bucket) for bucket in range(self.plan.schedule.buckets))
        if can_last and not healthy - self.misled <= self.committed:
            raise ViolationError(f"{sorted(healthy - self.committed)} did not get it")
        if healthy - self.dropped - self.committed and isinstance(self.ended, Finished):
            raise ViolationError(f"{sorted(healthy - self.dropped - self.committed)} were forgotten")
        late = [
            *self.update.written(self.plan.sources[0].name, 0, 1000, self.now),
            *self.update.loaded(self.plan.engines[0].name, 0, self.now),
            *self.update.damaged(self.plan.engines[0].name, 0, self.now),
            *self.update.committed(self.plan.engines[0].name),
            *self.update.lost_source(self.plan.sources[0].name, "", self.now),
            *self.update.lost_engine(self.plan.engines[0].name, "", self.now),
            *self.update.expire(self.now + 10 * STALL),
        ]
        if late or self.update.next_deadline() is not None:
            raise ViolationError(f"orders after the end: {late}")
