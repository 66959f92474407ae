"""A model of one worker process: what relight.training does, without torch.

It follows training.py, barrier.py, recovery.py and runtime.py line by line as far as the protocol goes: a main
thread (a generator that waits at named points), a link thread (`receive`), a restore server, and a page.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from relight.core import events as ev
from relight.core.commands import Assign, Begin, Release, Restore, Resume, Stop, WorkerCommand
from relight.core.position import Phase, Position
from tests.core.simulated_clock import Clock, Violation
from tests.core.simulated_group import (
    CONNECT_TIMEOUT_SECONDS,
    STORE_TIMEOUT_SECONDS,
    Forming,
    Group,
    Operation,
    Rendezvous,
)

VERDICT_SECONDS = 30.0
FETCH_SECONDS = 120.0
T = TypeVar("T")


def digest(*parts: object) -> str:
    """A short hash that is the same in every process."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


class State(NamedTuple):
    """Replicated state. `content` stands for parameters and moments; `applied` lists the steps, in order."""

    version: int
    lineage: str
    content: str
    applied: tuple[int, ...]

    def updated(self, step: int, gradient: str) -> "State":
        """After the optimizer applied the reduced gradient of `step`."""
        lineage = digest("lineage", self.lineage, step)
        return State(self.version + 1, lineage, digest("content", self.content, gradient), (*self.applied, step))


FIRST_STATE = State(0, digest("birth"), digest("weights"), ())


def first_private(rank: int) -> str:
    return digest("private", rank)


def next_private(private: str, step: int) -> str:
    """Buffers, streams and data position change in every step, on each rank in its own way."""
    return digest("private", private, step)


def contribution(state: State, private: str, rank: int) -> str:
    """A rank's gradient: it depends on everything that a recovery could get wrong."""
    return digest("gradient", state.content, state.version, private, rank)


def reduce(contributions: dict[int, str]) -> str:
    return digest("sum", [contributions[rank] for rank in sorted(contributions)])


class Interrupted(Exception):
    """relight.errors.StepInterrupted."""


class Superseded(Exception):
    """A newer Stop arrived."""


class RestoreError(Exception):
    """relight.errors.RestoreError."""


class ScriptError(Exception):
    """An exception that leaves the script."""


@dataclass
class Wait:
    """Where the main thread stands, and until when: for some time, or for something (at most for some time)."""

    point: str
    seconds: float
    until: Callable[[], bool] | None = None


Main = Generator[Wait, None, T]


@dataclass
class Page:
    """The position page and the two slots of private state. `words` and `slots` are separate, as in the real one."""

    generation: int = 0
    rank: int = -1
    step: int = 0
    phase: Phase = Phase.STARTING
    version: int = 0
    prepared: int = -1
    torn: bool = False
    words: list[int] = field(default_factory=lambda: [-1, -1])
    slots: list[tuple[int, str] | None] = field(default_factory=lambda: [None, None])

    def position(self) -> Position:
        return Position(
            generation=self.generation,
            rank=self.rank,
            step=self.step,
            phase=self.phase,
            version=self.version,
            prepared=self.prepared,
            torn=self.torn,
            private_versions=(self.words[0], self.words[1]),
        )

    def read_private(self, version: int) -> str | None:
        slot = self.slots[version % 2]
        return slot[1] if slot is not None and slot[0] == version else None


class Transfer:
    """A copy on its way from a source's restore server to a target. The source serves on threads of its own."""

    def __init__(self, target: "Worker", source: "Worker", restore: Restore) -> None:
        self.target = target
        self.source = source
        self.generation = restore.generation
        self.version = restore.target
        self.state: State | None = None
        self.failed = ""
        self._sending = False

    @property
    def over(self) -> bool:
        return self.state is not None or bool(self.failed)

    def proceed(self) -> None:
        """Begin to send once the source offers the version that was asked for."""
        source = self.source
        if self.over or self._sending:
            return
        if not source.alive:
            self.fail("the source ended")
        elif source.newest > self.generation:
            self.fail("generation is closed")
        elif source.offer is not None and source.offer[:2] == (self.generation, self.version):
            self._sending = True
            source.clock.after(source.clock.between(0.005, 0.2), partial(self._arrive, source.offer[2]))

    def fail(self, why: str) -> None:
        if not self.over:
            self.failed = why
            self.target.poke()

    def _arrive(self, state: State) -> None:
        if self.over:
            return
        if self.source.frozen or self.target.frozen:
            self.source.clock.after(0.5, partial(self._arrive, state))
            return
        self.state = state
        self.target.poke()


class World(Protocol):
    """What a worker needs of the simulated job around it."""

    clock: Clock
    world_size: int
    until: int

    def send(self, worker: "Worker", event: ev.WorkerEvent) -> None: ...
    def find(self, name: str) -> "Worker | None": ...
    def first_group(self, generation: int) -> Group: ...
    def rendezvous(self, generation: int) -> Rendezvous | None: ...
    def at_point(self, worker: "Worker", point: str) -> None: ...
    def ended(self, worker: "Worker", status: int) -> None: ...
    def entered_step(self, worker: "Worker") -> None: ...
    def committed(self, worker: "Worker") -> None: ...
    def overwrites(self, worker: "Worker") -> None: ...


class Worker:
    """One process, from its start to its end."""

    # Variants that the real worker must not have; see test_planted_bugs.py.
    claims_private: ClassVar[bool] = True
    finishes_writes: ClassVar[bool] = True

    def __init__(self, world: World, name: str, rank: int | None) -> None:
        self.world = world
        self.clock = world.clock
        self.name = name
        self.rank = -1 if rank is None else rank
        self.is_standby = rank is None
        self.alive = True
        self.frozen = False
        self.hung = False
        self.struck = False  # some fault has struck this process
        self.page = Page()
        # what the main thread owns
        self.blank = self.is_standby
        self.state = FIRST_STATE
        self.private = ""
        self.generation = 0
        self.standing_in = 0  # the generation for which it has reported where it stands; 0: it moves
        self._started = -1  # newest step that was started
        self._next_private = ""
        self._gradient = ""
        self._restore: Restore | None = None
        self._first_after_recovery = False
        self._group: Group | None = None
        # what the link thread owns
        self.newest = 0
        self.closed = False
        self.last_report: ev.WorkerEvent | None = None
        self._orders: dict[type, Any] = {}
        self._unread: deque[WorkerCommand] = deque()
        self._meeting: Rendezvous | None = None
        self._transfer: Transfer | None = None
        # the restore server
        self.offer: tuple[int, int, State] | None = None
        self.requests: list[Transfer] = []
        # the engine
        self._main: Main[None] = self._run()
        self._wait = Wait("START", 0.0)
        self._ticket = 0
        self._awake = False
        self._resume_on_thaw = False

    # --- engine: the main thread runs from wait to wait ---------------------------------------------------------
    def begin(self) -> None:
        self._step_main()

    @property
    def point(self) -> str:
        return self._wait.point

    @property
    def healthy(self) -> bool:
        """Alive, and nothing was ever done to it."""
        return self.alive and not self.struck

    def poke(self) -> None:
        """Something changed: if the main thread waits for it, it wakes up, some time later."""
        if self.alive and not self._awake and self._wait.until is not None and self._wait.until():
            self._awake = True
            self.clock.after(self.clock.between(0.00005, 0.003), partial(self._resume, self._ticket))

    def _resume(self, ticket: int) -> None:
        if self._stands(ticket):
            return
        self.world.at_point(self, self._wait.point)
        if not self._stands(ticket):
            self._step_main()

    def _stands(self, ticket: int) -> bool:
        """Dead, stopped by a fault (perhaps just now), or moved on already."""
        if not self.alive or ticket != self._ticket:
            return True
        self._resume_on_thaw = self.frozen or self.hung
        return self._resume_on_thaw

    def _step_main(self) -> None:
        self._ticket += 1
        self._awake = False
        try:
            wait = self._wait = next(self._main)
        except StopIteration:
            self.die(0)
            return
        except ScriptError as error:
            self.raise_in_script(str(error))
            return
        if not self.alive:
            return
        if wait.seconds:
            self.clock.after(wait.seconds, partial(self._resume, self._ticket))
        self.poke()

    def _pause(self, point: str, low: float = 0.0001, high: float = 0.003) -> Wait:
        return Wait(point, self.clock.between(low, high))

    # --- what a fault does --------------------------------------------------------------------------------------
    def die(self, status: int) -> None:
        if not self.alive:
            return
        self.alive = False
        self._main.close()
        self._break_connections()
        if self._meeting is not None:
            self._meeting.leave(self.rank)
        for transfer in self.requests:
            transfer.fail("the source ended in the middle of the transfer")
        self.world.ended(self, status)

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        if not self.alive or not self.frozen:
            return
        self.frozen = False
        while self._unread and self.alive:
            self.receive(self._unread.popleft())
        if self._resume_on_thaw:
            self._resume_on_thaw = False
            self.clock.after(0.0001, partial(self._resume, self._ticket))

    def raise_in_script(self, summary: str) -> None:
        """bootstrap.py: report, then leave."""
        self._main.close()
        self._wait = Wait("RAISED", 0.0)
        self._ticket += 1
        self.world.send(
            self,
            ev.WorkerFailed(
                process=self.name,
                rank=self.rank,
                kind="exception",
                step=self.page.step,
                phase=self.page.phase.name,
                summary=summary,
                traceback=f"Traceback ...\n{summary}",
                noticed_ns=1,
            ),
        )
        self.clock.after(self.clock.between(0.001, 0.1), partial(self.die, 1))

    def cut(self) -> None:
        """Lose all connections, and live."""
        self._break_connections()

    # --- link thread --------------------------------------------------------------------------------------------
    def receive(self, message: WorkerCommand) -> None:
        if self.frozen:
            self._unread.append(message)
            return
        if isinstance(message, Stop):
            if message.generation <= self.newest:
                return
            self.newest = message.generation
            self._close()
        elif isinstance(message, Assign):
            self.newest = max(self.newest, message.generation)
            self._orders[Assign] = message
        else:
            self._orders[type(message)] = message
        self.poke()

    def _close(self) -> None:
        self.closed = True
        self._break_connections()
        if self._meeting is not None:
            self._meeting.leave(self.rank)
        if self._transfer is not None:
            self._transfer.fail("cancelled")
        if self.offer is not None and self.offer[0] < self.newest:
            self.offer = None
        for transfer in self.requests:
            if transfer.generation < self.newest:
                transfer.fail("generation is closed")

    def _break_connections(self) -> None:
        if self._group is not None:
            self._group.leave(self.rank)

    def _report(self, event: ev.WorkerEvent) -> None:
        self.last_report = event
        self.world.send(self, event)

    # --- the script and the loop --------------------------------------------------------------------------------
    def _run(self) -> Main[None]:
        if self.is_standby:
            yield from self._stand_by()
        else:
            yield from self._enter_training()
        while True:
            yield from self._offer_steps()
            if (yield from self._finish()):
                break
        yield self._pause("RELEASED", 0.001, 0.05)
        self.world.send(self, ev.WorkerReleased(process=self.name))
        yield self._pause("RELEASED")

    def _enter_training(self) -> Main[None]:
        yield from self._order(Assign, None, "START")
        assign: Assign = self._orders[Assign]
        self._take_assignment(assign)
        self._group = self.world.first_group(assign.generation)
        yield self._pause("START", 2.0, 5.0)
        self.private = first_private(self.rank)
        self._keep_private(0, self.private)
        self._report(
            ev.TrainingEntered(
                process=self.name,
                rank=self.rank,
                version=0,
                layout_digest="layout",
                state_digest=self.state.content,
                until=self.world.until,
            )
        )
        yield from self._order(Begin, None, "START")

    def _stand_by(self) -> Main[None]:
        low, high = (2.0, 8.0) if self.clock.now < 1.0 else (4.0, 45.0)
        yield self._pause("START", low, high)
        yield self._pause("WARMUP", 0.01, 0.1)
        self.page.phase = Phase.STANDBY
        self._report(ev.StandbyReady(process=self.name, layout_digest="layout"))
        yield from self._order(Assign, None, "IDLE")
        self._take_assignment(self._orders[Assign])
        yield self._pause("PROMOTED")
        self.closed = True
        yield from self._recover()

    def _take_assignment(self, assign: Assign) -> None:
        self.rank = self.page.rank = assign.rank
        self.generation = self.page.generation = assign.generation

    def _offer_steps(self) -> Main[None]:
        while self.state.version < self.world.until:
            if self.closed:
                yield from self._recover()
                continue
            self._show_position()
            yield self._pause("OUTSIDE", 0.0001, 0.02)
            try:
                yield from self._step()
            except Interrupted:
                yield from self._recover()

    def _show_position(self) -> None:
        self.page.step = self.page.version = self.state.version
        self.page.phase = Phase.OUTSIDE

    def _step(self) -> Main[None]:
        page, step = self.page, self.state.version
        page.prepared = -1
        self._started = step
        page.phase = Phase.FORWARD
        self.world.entered_step(self)
        for _ in range(2):
            yield self._pause("FORWARD", 0.001, 0.05)
            if self.closed:
                raise Interrupted
        page.phase = Phase.BACKWARD
        self._gradient = yield from self._reduce_gradient(step)
        yield from self._before_write(step)
        yield from self._write(step)

    def _reduce_gradient(self, step: int) -> Main[str]:
        operation = yield from self._collective("GRADIENT", contribution(self.state, self.private, self.rank))
        if operation is None:
            yield from self._await_stop(step)
            raise Interrupted
        return reduce(operation.entered)

    def _collective(self, kind: str, contribution: str) -> Main[Operation | None]:
        """None if it broke."""
        if self.closed:
            return None
        assert self._group is not None
        what = (kind, self.state.version, self.state.content)
        operation = self._group.enter(self.rank, what, contribution, self.poke)
        yield Wait(kind, 0.0, lambda: self.rank in operation.outcome)
        return operation if operation.outcome[self.rank] else None

    def _await_stop(self, step: int) -> Main[None]:
        """Runtime.await_verdict: a collective broke; the Stop that explains it is on its way."""
        if self.closed:
            return
        self.world.send(
            self,
            ev.CollectiveFailed(
                process=self.name,
                rank=self.rank,
                generation=self.generation,
                step=step,
                summary="connection reset",
                noticed_ns=1,
            ),
        )
        yield Wait("VERDICT", VERDICT_SECONDS, lambda: self.closed)
        if not self.closed:
            raise ScriptError(f"rank {self.rank}: connection reset, and nobody said why")

    # --- barrier and write --------------------------------------------------------------------------------------
    def _before_write(self, step: int) -> Main[None]:
        if self.closed:
            raise Interrupted
        self._next_private = next_private(self.private, step)
        self._forget_private(step + 1)
        yield self._pause("PREPARE")
        self._keep_private(step + 1, self._next_private)
        self.page.prepared = step
        yield self._pause("READY")
        self.page.phase = Phase.BARRIER
        if (yield from self._collective("BARRIER", "prepared")) is None:
            yield from self._await_stop(step)
            self._restore = yield from self._stand_still(prepared=step)
            if self._restore.target != step + 1:
                raise Interrupted
            yield self._pause("FINISH")

    def _write(self, step: int) -> Main[None]:
        page = self.page
        page.torn = True
        page.phase = Phase.OPTIMIZER
        yield self._pause("OPTIMIZER", 0.001, 0.03)
        if self.closed and not self.finishes_writes and self._restore is None:
            yield from self._stand_still(torn=True)
            raise Violation("A12: a recovery went on with a state that is half written")
        updated = self.state.updated(step, self._gradient)
        yield self._pause("AFTER_WRITE")
        self.state, self.private = updated, self._next_private
        page.version, page.torn = updated.version, False
        page.phase = Phase.OUTSIDE
        self.world.committed(self)
        self._report_first_commit(step)
        yield self._pause("AFTER_STEP")
        if self._restore is not None or self.closed:
            yield from self._recover()

    def _report_first_commit(self, step: int) -> None:
        if not self._first_after_recovery:
            return
        self._first_after_recovery = False
        self.world.send(
            self,
            ev.StepResumed(
                process=self.name,
                rank=self.rank,
                generation=self.generation,
                step=step,
                resumed_ns=1,
                forward_ns=2,
                commit_ns=3,
            ),
        )

    def _forget_private(self, version: int) -> None:
        self.page.words[version % 2] = -1
        self.page.slots[version % 2] = None

    def _keep_private(self, version: int, private: str) -> None:
        self.page.slots[version % 2] = (version, private)
        self.page.words[version % 2] = version

    # --- a recovery ---------------------------------------------------------------------------------------------
    def _stand_still(self, *, prepared: int = -1, torn: bool = False) -> Main[Restore]:
        """Runtime.report_standing."""
        self.page.phase = Phase.PARKED
        while True:
            generation = self.newest
            yield self._pause("STOP")
            self.page.generation = generation
            self._report(
                ev.Stopped(
                    process=self.name,
                    rank=self.rank,
                    generation=generation,
                    step=self._started,
                    version=self.state.version,
                    lineage=self.state.lineage,
                    prepared=prepared,
                    torn=torn,
                    blank=self.blank,
                    stop_seconds=0.0,
                    restore_address=self.name,
                )
            )
            self.standing_in = generation
            try:
                yield from self._order(Restore, generation, "PARKED")
            except Superseded:
                continue
            finally:
                self.standing_in = 0
            restore: Restore = self._orders[Restore]
            return restore

    def _order(self, kind: type, generation: int | None, point: str) -> Main[None]:
        """Runtime.await_order: the order comes first, even if a newer Stop is here too."""

        def here() -> bool:
            order = self._orders.get(kind)
            return order is not None and (generation is None or order.generation == generation)

        yield Wait(point, 0.0, lambda: here() or (generation is not None and self.newest > generation))
        if not here():
            raise Superseded

    def _recover(self) -> Main[None]:
        """Recovery.run."""
        while True:
            restore, self._restore = self._restore, None
            if restore is None or self.newest > restore.generation:
                restore = yield from self._stand_still()
            self.page.phase = Phase.PARKED
            try:
                group = yield from self._obey(restore)
                yield from self._order(Resume, restore.generation, "RESTORED")
                yield self._pause("RESUME")
                self._open_generation(restore.generation, group)
            except Superseded:
                continue
            except RestoreError as error:
                yield from self._report_restore_failure(restore.generation, str(error))
                continue
            self._first_after_recovery = True
            self.is_standby = False
            self.page.prepared = -1
            self._show_position()
            return

    def _open_generation(self, generation: int, group: Group) -> None:
        if self.newest > generation:
            raise Superseded
        self._group = group
        self._meeting = self._transfer = None
        self.generation = generation
        self.closed = False

    def _report_restore_failure(self, generation: int, evidence: str) -> Main[None]:
        self.world.send(self, ev.RestoreFailed(process=self.name, generation=generation, evidence=evidence, culprit=""))
        yield Wait("FAILED", 0.0, lambda: self.newest > generation)

    def _obey(self, restore: Restore) -> Main[Group]:
        forming, deadline = self._begin_forming(restore.generation), self.clock.now + CONNECT_TIMEOUT_SECONDS
        if self.rank in restore.targets:
            yield from self._copy(restore)
        elif self.state.version != restore.target:
            raise RestoreError(f"rank {self.rank} is at version {self.state.version}, the target is {restore.target}")
        elif restore.targets:
            self._serve(restore)
        yield self._pause("ROLLBACK")
        group = yield from self._await_formed(forming, restore.generation, deadline)
        self._report(
            ev.Restored(
                process=self.name,
                rank=self.rank,
                generation=restore.generation,
                version=self.state.version,
                lineage=self.state.lineage,
                state_digest=self.state.content,
                layout_digest="layout",
                progress=ev.RestoreProgress(),
            )
        )
        return group

    def _begin_forming(self, generation: int) -> Forming:
        forming = Forming(self.rank, lambda: self.frozen, self.poke)
        meeting = self.world.rendezvous(generation) if self.newest <= generation else None
        self._meeting = meeting
        if meeting is not None:
            meeting.join(forming)
        return forming

    def _await_formed(self, forming: Forming, generation: int, deadline: float) -> Main[Group]:
        meeting = self._meeting
        while True:
            if self.newest > generation:
                raise Superseded
            if forming.group is not None:
                return forming.group
            if meeting is None:
                raise RestoreError("the rendezvous of that generation is closed")
            limit = deadline if meeting.complete else deadline - CONNECT_TIMEOUT_SECONDS + STORE_TIMEOUT_SECONDS
            if self.clock.now >= limit:
                raise RestoreError("the new process group could not be formed")
            seconds = max(limit - self.clock.now, 1e-6)
            yield Wait("REFORM", seconds, lambda: forming.group is not None or self.newest > generation)

    def _serve(self, restore: Restore) -> None:
        if self.newest <= restore.generation:
            self.offer = (restore.generation, restore.target, self.state)
            for transfer in self.requests:
                transfer.proceed()

    def _copy(self, restore: Restore) -> Main[None]:
        self.world.overwrites(self)
        self.page.torn = True
        transfer = yield from self._fetch(restore)
        if transfer.state is None:
            raise RestoreError(transfer.failed or "no answer from the source")
        yield self._pause("TAKE_OVER")
        private = self.page.read_private(restore.target)
        if private is None:
            raise RestoreError(f"the rank-private state of version {restore.target} is not beside this rank's page")
        self.state, self.private = transfer.state, private
        if self.claims_private:
            self.page.words[restore.target % 2] = restore.target
        self.blank = False
        self.page.torn = False
        self.page.version = self.state.version

    def _fetch(self, restore: Restore) -> Main[Transfer]:
        source = self.world.find(restore.sources[self.rank % len(restore.sources)].address)
        if source is None or self.newest > restore.generation:
            raise RestoreError("cancelled")
        transfer = self._transfer = Transfer(self, source, restore)
        source.requests.append(transfer)
        transfer.proceed()
        yield Wait("COPY", FETCH_SECONDS, lambda: transfer.over)
        transfer.fail("no answer from the source")
        return transfer

    # --- the end ------------------------------------------------------------------------------------------------
    def _finish(self) -> Main[bool]:
        if self.closed:
            yield from self._recover()
            if self.state.version < self.world.until:
                return False
        self.page.phase = Phase.DONE
        self._report(
            ev.TrainingDone(
                process=self.name,
                rank=self.rank,
                generation=self.generation,
                version=self.state.version,
                lineage=self.state.lineage,
                state_digest=self.state.content,
                cut_collectives=0,
            )
        )
        yield Wait("DONE", 0.0, lambda: Release in self._orders or self.closed)
        if Release in self._orders and not self.closed:
            return True
        yield from self._recover()
        return False
