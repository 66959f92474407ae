"""A whole job around the production controller: workers, one node, its channels. It knows no time and no chance.

What may happen next is an *action*, a plain tuple. Two drivers choose among them: timed.py gives each a time in a
virtual clock, drawn from a seed; exhaustive.py tries all of them, one after another, on copies.

    ("step", process, ticket)          its main thread moves on
    ("patience", process, ticket)      its wait has lasted for too long
    ("up", process)                    its next message reaches the controller
    ("down", process)                  the next order or request for it reaches its node
    ("settle", generation, number, rank, completes)
    ("connect", generation, rank)      it is through with forming the group
    ("arrive", process)                the source's state is here
    ("dead", process, status)          its node notices the death
    ("background", process, what, version, generation)  something beside its main thread goes on

Modelled, not production: the shells between core and workers (server.py, agent.py) in the form of two ordered queues
for each process, and of the few things that they do with an order.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from relight.core import events as ev
from relight.core.commands import (
    Assign,
    Begin,
    Command,
    EndJob,
    Kill,
    Notice,
    Release,
    Restore,
    Resume,
    Save,
    Spawn,
    Stop,
    WorkerCommand,
)
from relight.core.controller import Controller, ControllerSettings
from relight.sim.judge.checker import Checker
from relight.sim.model.contents import Violation, derived_private, part_key
from relight.sim.model.fallback_tiers import Disk, FallbackTiers, Saved
from relight.sim.model.network import Copying, Group, Rendezvous
from relight.sim.model.shapes import ONE_WRITE, Pattern
from relight.sim.model.worker import SimulatedWorker

Action = tuple[Any, ...]
NODE = "node-0"


class CopyPrivate(msgspec.Struct, frozen=True):
    """To a node: put the private state of that version, from beside this dead process's page, beside the new one's."""

    source: str
    version: int


class TakePrivate(msgspec.Struct, frozen=True):
    """To the node of a dead process: send its private state of that version to another node, for `target`."""

    target: str
    version: int


class PrivateState(msgspec.Struct, frozen=True):
    """It arrives there, by way of the controller."""

    version: int
    payload: int


NodeOrder = Spawn | Kill | CopyPrivate | TakePrivate | PrivateState  # what a node does itself


class World:
    """State and rules. `plan` is what a driver adds."""

    detailed_pages = True  # with the counters that the detector reads
    several_hosts = False
    derivable = False  # a rank's private state follows from its number and the step
    parts = 1  # that the state is divided into
    buddy_every = checkpoint_every = 0  # steps; 0: there are no such tiers
    verify_every = 0  # steps from one comparison of the ranks' states to the next; 0: they are not compared

    def __init__(
        self,
        settings: ControllerSettings,
        until: int,
        make_controller: Callable[[ControllerSettings], Controller] = Controller,
        worker_kind: type[SimulatedWorker] = SimulatedWorker,
        pattern: Pattern = ONE_WRITE,
    ) -> None:
        self.world_size = settings.world_size
        self.until = until
        self.now = 0.0
        self.controller = make_controller(settings)
        self.worker_kind = worker_kind
        self.pattern = pattern
        self.workers: dict[str, SimulatedWorker] = {}
        self.checker = Checker(settings.world_size, until, self.workers, pattern)
        self.spawned: set[str] = set()  # processes that were ordered to be started
        self.host_of: dict[str, str] = {}  # on which host
        self.fenced: set[str] = set()  # processes of a host that was given up: nobody listens to them any more
        self.up: dict[str, deque[ev.Event]] = {}
        self.down: dict[str, deque[Any]] = {}
        self.groups: dict[int, Group] = {}
        self.meetings: dict[int, Rendezvous] = {}
        self.store_generation = 0
        self.disk = Disk(settings.world_size)
        self.first_generation = 1  # of the newest group that was formed from the start, without a rendezvous
        self.end: EndJob | None = None

    # --- what a driver adds ---------------------------------------------------------------------------------------
    def plan(self, action: Action) -> None:
        """This may happen from now on."""
        raise NotImplementedError

    def note(self, what: str, thing: object) -> None:
        """For people who look at this run."""

    # --- the controller -------------------------------------------------------------------------------------------
    def feed(self, event: ev.Event) -> None:
        """The controller hears of something."""
        if self.end is None:
            self.note("event", event)
            self.obey(event, self.controller.handle(event, self.now))

    def expire(self) -> None:
        """The controller's deadline has passed."""
        if self.end is None:
            self.obey(None, self.controller.expire(self.now))

    def obey(self, event: ev.Event | None, commands: Sequence[Command]) -> None:  # noqa: ARG002 (drivers record it)
        """As the server does: audiences are looked up when the order goes out."""
        self.controller.check()
        for command in commands:
            self.note("command", command)
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        ranks = self.names_of_ranks()
        self.checker.commanded(command, ranks)
        match command:
            case Spawn():
                self.spawned.add(command.process)
                self.host_of[command.process] = command.agent
                self.tell(command.process, command)
            case Kill():
                self.tell(command.process, command)
            case Assign():
                self._open_store(command.generation)
                self.tell(command.process, command)
            case Begin() | Stop():
                self._open_store(command.generation)
                self._order(command)
            case Restore():
                for rank in command.targets:
                    self._hand_over_private_state(rank, command.target)
                self._order(command)
            case Resume() | Save() | Release():
                self._order(command)
            case EndJob():
                self.end = command
                self.checker.final(command, self.controller.report())
            case Notice():
                pass

    def _hand_over_private_state(self, rank: int, version: int) -> None:
        """agents.py, `copy_private`: from beside each dead holder's page, whose host may be another one, or gone."""
        target = self.controller.rank_processes()[rank]
        for source in self.controller.predecessors.get(rank, ()):
            if source in self.fenced:
                continue
            if self.host_of[source] == self.host_of[target]:
                self.tell(target, CopyPrivate(source, version))
            else:
                self.tell(source, TakePrivate(target, version))

    def _open_store(self, generation: int) -> None:
        self.store_generation = max(self.store_generation, generation)

    def _order(self, command: Begin | Stop | Restore | Resume | Save | Release) -> None:
        for name in self.controller.audience(command.audience):
            self.tell(name, command)

    def names_of_ranks(self) -> tuple[str, ...]:
        """Processes that hold a rank, in rank order."""
        return tuple(self.controller.rank_processes().values())

    def tell(self, process: str, message: Any) -> None:
        """To a process, or to its node about it; in order."""
        if process in self.fenced:
            return
        self.down.setdefault(process, deque()).append(message)
        self.plan(("down", process))

    # --- what happens ---------------------------------------------------------------------------------------------
    def perform(self, action: Action) -> None:
        """Let it happen."""
        _PERFORM[action[0]](self, *action[1:])

    def own(self, process: str) -> SimulatedWorker:
        """A worker that is about to change. A driver that shares workers between worlds makes a copy first."""
        return self.workers[process]

    def _step(self, process: str, ticket: int) -> None:
        self.own(process).wake(ticket)

    def _patience(self, process: str, ticket: int) -> None:
        self.own(process).lose_patience(ticket)

    def _up(self, process: str) -> None:
        queue = self.up[process]
        if queue:
            self.feed(queue.popleft())

    def _down(self, process: str) -> None:
        queue = self.down[process]
        if queue:
            self.deliver(process, queue.popleft())

    def deliver(self, process: str, message: NodeOrder | WorkerCommand) -> None:
        """A node hears what it is to do, or to pass on."""
        if isinstance(message, Spawn):
            if process not in self.workers:
                self._start(message)
            return
        if process not in self.workers:
            return
        worker = self.own(process)
        if isinstance(message, Kill):
            worker.die(-9)
        elif isinstance(message, CopyPrivate):
            source = self.workers.get(message.source)
            payload = source.page.read_private(message.version) if source is not None else None
            if payload is not None:
                worker.page.inherit(message.version, payload)
        elif isinstance(message, TakePrivate):
            payload = worker.page.read_private(message.version)
            if payload is not None:
                self.tell(message.target, PrivateState(message.version, payload))
        elif isinstance(message, PrivateState):
            worker.page.inherit(message.version, message.payload)
            worker.poke()
        else:
            worker.receive(message)

    def _start(self, spawn: Spawn) -> None:
        worker = self.workers[spawn.process] = self.worker_kind(self, spawn.process, spawn.rank)
        self.send(worker, ev.ProcessStarted(process=spawn.process, pid=1))
        worker.begin()

    def _settle(self, generation: int, number: int, rank: int, completes: bool) -> None:
        group = self.group(generation)
        operation = group.operations.get(number)
        if operation is not None and rank not in operation.outcome:
            operation.outcome[rank] = completes and group.can_complete(rank, operation)
            self._poke_rank(rank)

    def _connect(self, generation: int, rank: int) -> None:
        meeting = self.meetings[generation]
        if rank not in meeting.absent:
            meeting.connected.add(rank)
            self._poke_rank(rank)

    def _poke_rank(self, rank: int) -> None:
        for name, worker in list(self.workers.items()):
            if worker.rank == rank and worker.alive:
                self.own(name).poke()

    def _arrive(self, process: str) -> None:
        target = self.own(process)
        copying = target.copying
        if copying is None or not copying.sending or copying.over:
            return
        source = self.workers[copying.source]
        if source.frozen or target.frozen:
            self.plan(("arrive", process))
        elif copying.of >= 0:
            self._hand_over_snapshot(source, copying)
            target.poke()
        elif source.offer is not None:
            copying.state = source.offer[1]
            target.poke()

    def _hand_over_snapshot(self, source: SimulatedWorker, copying: Copying) -> None:
        assert source.lower is not None
        copying.saved = source.lower.kept_of(copying.of, copying.version)
        if copying.saved is None:
            copying.failed = "the snapshot is gone"
        else:
            copying.state = copying.saved.state

    def _dead(self, process: str, status: int) -> None:
        worker = self.workers[process]
        evidence = "was killed by SIGKILL" if status < 0 else f"exited with status {status}"
        self.send(
            worker,
            ev.ProcessExited(
                process=process,
                exit_status=status,
                evidence=evidence,
                position=worker.page.position(counters=self.detailed_pages),
                noticed_ns=1,
            ),
        )

    # --- what workers need (worker.World) -------------------------------------------------------------------------
    def plan_step(self, worker: SimulatedWorker) -> None:
        self.plan(("step", worker.name, worker.ticket))

    def plan_patience(self, worker: SimulatedWorker, seconds: float) -> None:  # noqa: ARG002 (of drivers with a clock)
        self.plan(("patience", worker.name, worker.ticket))

    def send(self, worker: SimulatedWorker, event: ev.Event) -> None:
        self.up.setdefault(worker.name, deque()).append(event)
        self.plan(("up", worker.name))

    def group(self, generation: int) -> Group:
        meeting = self.meetings.get(generation)
        if meeting is not None:
            return meeting.group
        if generation not in self.groups:
            self.groups[generation] = Group(generation, self.world_size)
        return self.groups[generation]

    def rendezvous(self, generation: int) -> Rendezvous | None:
        """None: the store has a newer generation, and answers with an error."""
        if generation in self.meetings:
            return self.meetings[generation]
        if generation != self.store_generation:
            return None
        meeting = self.meetings[generation] = Rendezvous(generation, self.world_size)
        return meeting

    def entered(self, group: Group, number: int) -> None:
        operation = group.operations[number]
        if len(operation.entered) == self.world_size or group.can_break():
            self._plan_outcomes(group)

    def left(self, group: Group, rank: int) -> None:
        if group.leave(rank):
            self.lose(group, rank)
            self._plan_outcomes(group)

    def lose(self, group: Group, rank: int) -> None:
        """Which ranks have lost data on its way to them, now that this one is gone: for a driver to say."""

    def _plan_outcomes(self, group: Group) -> None:
        for rank, number, operation in group.waiting():
            if group.can_complete(rank, operation):
                self.plan(("settle", group.generation, number, rank, True))
            elif group.can_break():
                self.plan(("settle", group.generation, number, rank, False))

    def joined(self, meeting: Rendezvous) -> None:
        if meeting.complete:
            for rank in sorted(meeting.present):
                self.plan(("connect", meeting.group.generation, rank))

    def choose_source(self, target: SimulatedWorker, restore: Restore) -> str:
        """Spreads targets over sources of their part, as `choose_sources` of transfer/restore/fabric.py."""
        held = [source for source in restore.sources if source.shard == part_key(target.rank, self.parts)]
        return held[target.rank % len(held)].address if held else ""

    def asked(self, target: SimulatedWorker) -> None:
        assert target.copying is not None
        self._proceed(target, target.copying)

    def offered(self, source: SimulatedWorker) -> None:
        """What this worker serves has changed."""
        for name, target in list(self.workers.items()):
            copying = target.copying
            if copying is not None and copying.source == source.name and not copying.over:
                self.asked(self.own(name))

    def _proceed(self, target: SimulatedWorker, copying: Copying) -> None:
        source = self.workers.get(copying.source)
        if source is None or not source.alive:
            copying.failed = "the source ended"
        elif source.machine.newest > copying.generation:
            copying.failed = "generation is closed"
        elif (
            copying.of >= 0 and not copying.sending and not source.frozen  # snapshots are served at any time
        ):
            copying.sending = True
            self.plan(("arrive", target.name))
        elif (
            not copying.sending
            and not source.frozen
            and source.offer is not None
            and source.offer[0] == copying.generation
        ):
            if source.offer[1].version != copying.version:
                raise Violation(f"I4: {source.name} serves {source.offer[1].version}, not {copying.version}")
            copying.sending = True
            self.plan(("arrive", target.name))
        target.poke()

    # --- below replicas (lower.py) --------------------------------------------------------------------------------
    def make_tiers(self, worker: SimulatedWorker) -> FallbackTiers | None:
        if not (self.buddy_every or self.checkpoint_every):
            return None
        return worker.tiers_kind(worker, self.buddy_every, self.checkpoint_every, self.disk)

    def plan_background(self, worker: SimulatedWorker, what: str, version: int) -> None:
        self.plan(("background", worker.name, what, version, worker.machine.generation))

    def _background(self, process: str, what: str, version: int, generation: int) -> None:
        worker = self.workers[process]
        if worker.alive and worker.lower is not None:
            worker.lower.go_on(what, version, generation)

    def find_kept(self, worker: SimulatedWorker, rank: int, version: int) -> Saved | None:
        """A snapshot in the memory of the process that holds that rank."""
        holder = self.workers.get(self.controller.rank_processes().get(rank, ""))
        if holder is None or not holder.alive or holder.frozen or not self.reaches(worker, holder):
            return None
        return holder.lower.kept_of(rank, version) if holder.lower is not None else None

    def reaches(self, worker: SimulatedWorker, other: SimulatedWorker) -> bool:  # noqa: ARG002 (drivers with hosts)
        """Whether data passes between them."""
        return True

    def saves(self, worker: SimulatedWorker, save: Save) -> None:
        """Checkpointing.save: a rank's own piece, and, of whoever completes it, those of the ranks that are gone."""
        if worker.holds_nothing or worker.lower is None:
            return
        pieces = {worker.rank: worker.private}
        if worker.rank == save.rank:
            for rank in save.absent:
                names = self.controller.predecessors.get(rank, ())
                left = [self.workers[name].page.read_private(save.target) for name in names if name in self.workers]
                known = [private for private in left if private is not None]
                if rank in save.derived:
                    pieces[rank] = derived_private(rank, save.target, self.pattern, known=self.derivable)
                elif known:  # else it waits for it in vain
                    pieces[rank] = known[-1]
        for rank, private in pieces.items():
            saved = Saved(rank, worker.state, private, worker.machine.history)
            self.checker.saves(saved, save)
            self.disk.write(saved, ("last", save.generation))
        if self.is_saved(save):
            self._poke_rank(save.rank)

    def is_saved(self, save: Save) -> bool:
        return save.target in self.disk.complete

    def shown(self) -> int:
        """The newest version that engines answer with."""
        return self.checker.shown

    def established(self, version: int) -> None:
        self.checker.established(version)

    def keeps(self, worker: SimulatedWorker, snapshots: Sequence[Saved]) -> None:
        self.checker.keeps(worker, snapshots)

    def reads(self, worker: SimulatedWorker, pieces: Mapping[int, Saved]) -> None:
        self.checker.reads(worker, pieces)

    def ended(self, worker: SimulatedWorker, status: int) -> None:
        self.note("exit", f"{worker.name} (rank {worker.rank}) {status}")
        self.plan(("dead", worker.name, status))

    def began_step(self, worker: SimulatedWorker) -> None:
        self.checker.began_step(worker)

    def follows(self, made: int, *of: int) -> None:
        if self.checker.spoilt:
            self.checker.follows(made, of)

    def committed(self, worker: SimulatedWorker) -> None:
        self.note("commit", f"{worker.name} (rank {worker.rank}) {worker.state.version}")
        self.checker.committed(worker)

    def overwrites(self, worker: SimulatedWorker) -> None:
        self.checker.overwrites(worker)

    def published(self, worker: SimulatedWorker, version: int, content: int) -> None:
        self.checker.published(worker, version, content)


_PERFORM: dict[str, Callable[..., None]] = {
    "step": World._step,
    "patience": World._patience,
    "up": World._up,
    "down": World._down,
    "settle": World._settle,
    "connect": World._connect,
    "arrive": World._arrive,
    "dead": World._dead,
    "background": World._background,
}
