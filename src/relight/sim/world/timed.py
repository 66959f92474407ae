"""A simulated job in virtual time. Deterministic: a `Schedule` decides everything, under any PYTHONHASHSEED."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from relight.core import events as ev
from relight.core.commands import Command, EndJob, Spawn
from relight.core.controller import Controller, ControllerSettings
from relight.core.detector import Detector, DetectorSettings
from relight.core.fault import Action as Fault
from relight.core.gathering import HOLD_SECONDS, Gathering, subject
from relight.core.position import IN_STEP, Phase, Position
from relight.core.replay import Record, replay
from relight.core.sampling import Sample
from relight.sim.model.contents import Violation
from relight.sim.model.network import Copying, Group
from relight.sim.model.points import PAUSES
from relight.sim.model.schedule import SAMPLE_SECONDS, NetworkFault, ProcessFault, Schedule
from relight.sim.model.shapes import pattern_of
from relight.sim.model.worker import SimulatedWorker
from relight.sim.world.hosts import FOR_EVER, Host, Hosts
from relight.sim.world.world import Action, NodeOrder, World

MAX_EVENTS = 20_000
SPARSE_SAMPLE_SECONDS = 2.0  # later on, where only long waits are left: the detector counts no longer gap
_SPARSE_AFTER = 40
# How long a main thread stays at a point, least and most, in seconds.
_STAY = {
    "OUTSIDE": (0.0001, 0.02),
    "FORWARD": (0.001, 0.05),
    "OPTIMIZER": (0.001, 0.03),
    "FIRST_WRITE": (0.001, 0.03),
    "LAST_WRITE": (0.001, 0.03),
    "EXTRA_WRITE": (0.001, 0.03),
    "LOADING": (2.0, 5.0),
    "WARMUP": (0.01, 0.1),
    "RAISED": (0.001, 0.1),
    "RELEASED": (0.001, 0.05),
}
_SHORT = (0.0001, 0.003)
_WAKE = (0.00005, 0.003)  # from what a main thread waits for until it moves
_DELAYS = {
    "settle": (0.0001, 0.02),  # until a member finds its collective complete, or its connection reset
    "connect": (0.005, 0.03),
    "arrive": (0.005, 0.2),
    "dead": (0.0005, 0.01),
    "background": (0.001, 0.2),
}
_AGAIN_SECONDS = 5.0  # until something beside a main thread is tried again
DETECTOR = DetectorSettings(
    hang_timeout_seconds=10.0,
    outside_hang_timeout_seconds=600.0,
    startup_timeout_seconds=600.0,
    frozen_timeout_seconds=1.0,
)
# What an agent says until it is confirmed; deadlines, suspicions and shutdowns are the controller's own.
_REPORTED = (
    *(ev.ProcessStarted, ev.ProcessDying, ev.ProcessExited, ev.TrainingEntered, ev.StandbyReady, ev.Stopped),
    *(
        ev.Restored,
        ev.RestoreFailed,
        ev.StateDiffers,
        ev.StepResumed,
        ev.WorkerFailed,
        ev.CollectiveFailed,
        ev.TrainingDone,
    ),
    *(ev.WorkerReleased, ev.AgentJoined),
)
_QUIET_POINTS = (
    "START",
    "ENTERED",
    "IDLE",
    "DONE",
    "RELEASED",
    "EXITING",
    "RAISED",
    "STAYS",
    "FAILED",
)  # nobody notices a loop
# Where a rank's state is not compared with that of others any more, or is not yet what the job trains.
_UNCOMPARED_POINTS = ("START", "LOADING", "ENTERED", "DONE", "RELEASED", "EXITING", "RAISED")


class JournalEntry(msgspec.Struct, frozen=True):
    """What the controller was told (None: that its deadline has passed), and what it ordered."""

    now: float
    event: ev.Event | None
    commands: tuple[Command, ...]


@dataclass(frozen=True)
class Parts:
    """What a job is built from; mutations.py puts in others."""

    controller: Callable[[ControllerSettings], Controller] = Controller
    worker: type[SimulatedWorker] = SimulatedWorker
    detector: type[Detector] = Detector
    hold_seconds: float = HOLD_SECONDS


PRODUCTION = Parts()


class SimulatedJob(World):
    """Run it once. Raises Violation, with the schedule and the trace, if an invariant breaks."""

    def __init__(self, schedule: Schedule, parts: Parts = PRODUCTION) -> None:
        self.settings = ControllerSettings(
            world_size=schedule.world_size, nodes=schedule.nodes, standbys=schedule.standbys
        )
        pattern = pattern_of(schedule.shapes, relearns=schedule.relearns)
        super().__init__(self.settings, schedule.until, parts.controller, parts.worker, pattern)
        self.schedule = schedule
        self.several_hosts = schedule.nodes > 1
        self.derivable = self.checker.derivable = schedule.derivable
        self.parts = self.checker.parts = schedule.parts
        self.buddy_every, self.checkpoint_every = schedule.buddy_every, schedule.checkpoint_every
        self.verify_every = self.checker.verify_every = schedule.verify_every
        self.checker.fenced = self.fenced
        self.hosts = Hosts(self, schedule.nodes, schedule.world_size // schedule.nodes)
        self.journal: list[JournalEntry] = []
        self.trace: list[tuple[float, str, object]] = []
        self.struck = 0
        self._random = random.Random(f"delays {schedule.seed}").random
        self._due: list[tuple[float, int, Action]] = []
        self._planned = 0
        self._happened = 0
        self._channel: dict[tuple[str, str], float] = {}  # when its newest message arrives: the next one comes later
        self._points: dict[str, int] = {}
        self._faults = list(schedule.faults)
        self._network = list(schedule.network)
        self._asleep_until = 0.0
        self._dies: NetworkFault | None = None  # the controller does, with the next thing that it is told
        self._away = False  # there is no controller
        self._unheard: list[ev.Event] = []  # what agents keep for it meanwhile
        self._unwitnessed: set[str] = set()  # processes that ended, and then their agent before it could say so
        self._unseen: set[str] = set()  # processes whose unseen end the controller that found out did not survive
        self._blackholes: set[int] = set()  # groups whose data vanishes
        self._held_up: dict[tuple[int, int], bool] = {}  # whether a rank's connections wait for a frozen peer
        self._parts = parts
        self._detector = self._make_detector()
        self._samples = 0
        self._gatherings: dict[str, Gathering[tuple[SimulatedWorker, ev.Event]]] = {}  # of each host
        self._unconnected: set[str] = set()  # frozen processes that have not met the successor of their agent
        self._gone: set[str] = set()  # processes of which their node knows that they end
        self._one_frame: float | None = None  # the latency of all that goes in it

    # --- the run ------------------------------------------------------------------------------------------------
    def run(self) -> EndJob:
        """To the end of the job."""
        try:
            for host in self.hosts:
                if self.several_hosts:
                    self.after(2.0 * self._random(), ("host", "joins", host.name))
                else:
                    self.hosts.joins(host.name)
            if self.schedule.watched:
                self._watch()
            while self.end is None:
                self._advance()
        except Violation as violation:
            raise Violation(f"{violation}\n{self.explain()}") from None
        return self.end

    def explain(self, lines: int = 400) -> str:
        """The schedule, and what happened."""
        trace = [f"{now:9.4f}  {what:8}  {show(thing)}" for now, what, thing in self.trace]
        return "\n".join([f"schedule: {msgspec.json.encode(self.schedule).decode()}", *trace[-lines:]])

    def _advance(self) -> None:
        deadline = None if self._away else self.controller.next_deadline()
        if deadline is not None and deadline < self._asleep_until:
            deadline = self._asleep_until
        if self._due and (deadline is None or self._due[0][0] <= deadline):
            self.now, _, action = heapq.heappop(self._due)
            self.perform(action)
        elif deadline is not None:
            self.now = max(self.now, deadline)
            self.expire()
        else:
            raise Violation(f"L2: nothing will ever happen again, in stage {self.controller.stage}")
        self._happened += 1
        if self._happened > MAX_EVENTS:
            raise Violation(f"L2: no end after {MAX_EVENTS} events, in stage {self.controller.stage}")
        if self._faults:
            for fault in [f for f in self._faults if not f.point and f.nth <= self._happened]:
                self._strike_someone(fault)
        if self._network:
            for trouble in [f for f in self._network if f.nth <= self._happened]:
                self._trouble(trouble)

    # --- time and chance ----------------------------------------------------------------------------------------
    def _between(self, range_seconds: tuple[float, float]) -> float:
        return range_seconds[0] + (range_seconds[1] - range_seconds[0]) * self._random()

    def after(self, seconds: float, action: Action) -> None:
        """Let it happen in `seconds` from now; equal times in the order in which they were planned."""
        self._planned += 1
        heapq.heappush(self._due, (self.now + seconds, self._planned, action))

    def plan(self, action: Action) -> None:
        kind = action[0]
        if kind in ("up", "down"):
            self._send(kind, action)
        elif kind == "settle":
            # Some members notice a lost connection only once their own is cut; see decisions/0001.
            slow = not action[4] and self._random() < 0.3 and not self.group(action[1]).gone >> action[3] & 1
            self.after(25.0 if slow else self._between(_DELAYS["settle"]), action)
        elif kind == "background" and action[2] == "fetch again":
            self.after(_AGAIN_SECONDS, action)
        else:
            self.after(self._between(_DELAYS[kind]), action)

    def plan_step(self, worker: SimulatedWorker) -> None:
        point = worker.point
        seconds = self._between(_STAY.get(point, _SHORT) if point in PAUSES else _WAKE)
        if point == "LOADING" and worker.machine.is_standby and self.now > 1.0:
            seconds = self._between((4.0, 45.0))  # beside a training that needs the processors
        if worker.rank == self.schedule.slow_rank and point not in ("LOADING", "WARMUP"):
            seconds *= 30
        self.after(seconds, ("step", worker.name, worker.ticket))

    def plan_patience(self, worker: SimulatedWorker, seconds: float) -> None:
        self.after(seconds, ("patience", worker.name, worker.ticket))

    # --- channels -------------------------------------------------------------------------------------------------
    def send(self, worker: SimulatedWorker, event: ev.Event) -> None:
        """agent.py, `relay` and `_report`: what every rank says once waits for the others of its host."""
        if not self.schedule.gathers:
            super().send(worker, event)
            return
        host = self.host_of[worker.name]
        gathering = self._gatherings.setdefault(host, Gathering())
        about = subject(event)
        if about is None or not gathering.joins(about):
            self.send_gathered(host)
        if about is None:
            super().send(worker, event)
            return
        ranks = [
            w.name for w in self.hosts.workers(self.hosts.called(host)) if w.rank >= 0 and w.name not in self._gone
        ]
        if gathering.add(worker.name, about, (worker, event), ranks):
            self.send_gathered(host)
        elif len(gathering) == 1:
            self.after(self._parts.hold_seconds, ("gathered", host))

    def send_gathered(self, host: str) -> None:
        """In one frame: they arrive together."""
        together = self._gatherings[host].take()
        if together and self.hosts.called(host).alive:
            self._one_frame = self._latency()
            for worker, event in together:
                super().send(worker, event)
            self._one_frame = None

    def _latency(self) -> float:
        if self._one_frame is not None:
            return self._one_frame
        if self._random() < self.schedule.slow_messages:
            return self._between((0.02, 1.0))
        return self._between((0.0002, 0.004))

    def _send(self, direction: str, action: Action) -> None:
        """Messages of one process keep their order, unless the schedule says otherwise."""
        process: str = action[1]
        schedule = self.schedule
        queue: Any = (self.up if direction == "up" else self.down)[process]
        if not isinstance(queue[-1], NodeOrder):  # what nodes do themselves, they are told once
            if schedule.repeated_messages and self._random() < schedule.repeated_messages:
                self._say_again(direction, process, queue[-1])
            late = schedule.late_messages and not isinstance(queue[-1], ev.WorkerFailed)
            if late and self._random() < schedule.late_messages:
                self._say_again(direction, process, queue.pop())
                return
        arrives = max(self._channel.get((direction, process), 0.0), self.now + self._latency())
        self._channel[direction, process] = arrives
        self.after(arrives - self.now, action)

    def _say_again(self, direction: str, process: str, message: Any) -> None:
        self.after(self._between((0.0, 3.0)), ("again", direction, process, message))

    def again(self, direction: str, process: str, message: Any) -> None:
        """A message comes out of its order."""
        if process in self.fenced or self._holds_back(direction, process, ("again", direction, process, message)):
            return
        if direction == "up":
            self.feed(message)
        else:
            self.deliver(process, message)

    def _holds_back(self, direction: str, process: str, action: Action) -> bool:
        """Whether nothing passes now; then it comes once the silence is over."""
        until = self.hosts.of(process).silent_until[direction]
        if direction == "up":
            until = max(until, self._asleep_until)
        if self.now >= until:
            return False
        if until >= FOR_EVER:
            return True
        self.after(until - self.now + self._between(_SHORT), action)
        return True

    def _up(self, process: str) -> None:
        if process not in self.fenced and not self._holds_back("up", process, ("up", process)):
            super()._up(process)

    def _down(self, process: str) -> None:
        if not self._holds_back("down", process, ("down", process)):
            super()._down(process)

    def forget_orders(self, process: str) -> None:
        """Of a host that is given up, nothing is sent any more, and nothing is believed."""
        for queues in (self.up, self.down):
            if process in queues:
                queues[process].clear()

    def lose_data(self, generation: int) -> None:
        """What the ranks of this group send to each other vanishes; no connection ends."""
        self._blackholes.add(generation)
        self._watch()

    @property
    def deaf_until(self) -> float:
        """Until when the controller listens to nobody."""
        return max(self._asleep_until, self.now + 1.0 if self._away else 0.0)

    # --- what the world leaves to chance --------------------------------------------------------------------------
    def feed(self, event: ev.Event) -> None:
        if self._away:
            if _is_unseen(event):
                self._unseen.add(event.process)  # type: ignore[union-attr]
            elif isinstance(event, _REPORTED):
                self._unheard.append(event)
        else:
            super().feed(event)

    def obey(self, event: ev.Event | None, commands: Sequence[Command]) -> None:
        """What it is told is in the journal before it is carried out; it may die in between."""
        self.journal.append(JournalEntry(self.now, event, tuple(commands)))
        dies, self._dies = self._dies, None
        super().obey(event, commands if dies is None else commands[: dies.sent])
        if dies is not None and self.end is None:
            self._lose_controller(dies)

    def note(self, what: str, thing: object) -> None:
        self.trace.append((self.now, what, thing))

    def _step(self, process: str, ticket: int) -> None:
        worker = self.workers[process]
        if worker.alive and ticket == worker.ticket and not (worker.frozen or worker.hung):
            count = self._points[worker.point] = self._points.get(worker.point, 0) + 1
            if self._faults:
                for fault in [f for f in self._faults if f.point == worker.point and f.nth == count]:
                    self._strike(fault, worker)
            if worker.machine.started == self.schedule.bug_step and worker.point == "FORWARD" and not worker.rank:
                self._meet_the_bug(worker)
        worker.wake(ticket)

    def lose(self, group: Group, rank: int) -> None:
        group.lost |= 1 << rank
        for other in range(self.world_size):
            if other != rank and self._random() < 0.5:
                group.lost |= 1 << other

    def _settle(self, generation: int, number: int, rank: int, completes: bool) -> None:
        group = self.group(generation)
        if generation in self._blackholes and not group.gone >> rank & 1:
            return
        if self.several_hosts and not group.gone >> rank & 1:
            apart = self._apart_from_group(generation, rank)
            if apart:
                self._later(apart, ("settle", generation, number, rank, completes))
                return
        super()._settle(generation, number, rank, completes)

    def _apart_from_group(self, generation: int, rank: int) -> float:
        """Until when data between this rank and others of its group does not pass."""
        mine = [w.name for w in self.workers.values() if w.rank == rank and generation in _generations(w)]
        others = [w.name for w in self.workers.values() if w.rank != rank and generation in _generations(w)]
        return max((self.hosts.apart_from_any(name, others) for name in mine), default=0.0)

    def _later(self, until: float, action: Action) -> None:
        if until < FOR_EVER:
            self.after(until - self.now + self._between(_SHORT), action)

    def _connect(self, generation: int, rank: int) -> None:
        meeting = self.meetings[generation]
        if self.several_hosts:
            apart = self._apart_from_group(generation, rank)
            if apart:
                self._later(apart, ("connect", generation, rank))
                return
        if meeting.absent and self._random() < 0.5:
            return  # the others wait for a connection that never comes
        frozen = [w for w in self.workers.values() if w.rank in meeting.present and w.alive and w.frozen]
        if frozen and (generation, rank) not in self._held_up:  # a frozen peer's kernel still answers some
            self._held_up[generation, rank] = self._random() < 0.5
        if any(w.rank == rank for w in frozen) or (frozen and self._held_up[generation, rank]):
            self.after(2.0, ("connect", generation, rank))
            return
        super()._connect(generation, rank)

    def _arrive(self, process: str) -> None:
        target = self.workers[process]
        copying = target.copying
        if copying is not None and (target.frozen or self.workers[copying.source].frozen):
            if target.alive and not copying.over:
                self.after(0.5, ("arrive", process))
            return
        if copying is not None and self.hosts.apart_until(process, copying.source):
            self._later(self.hosts.apart_until(process, copying.source), ("arrive", process))
            return
        super()._arrive(process)

    def _proceed(self, target: SimulatedWorker, copying: Copying) -> None:
        if not self.hosts.apart_until(target.name, copying.source):  # else it hears nothing of the source
            super()._proceed(target, copying)

    def _background(self, process: str, what: str, version: int, generation: int) -> None:
        worker = self.workers[process]
        if worker.alive and worker.frozen:
            self.after(_AGAIN_SECONDS, ("background", process, what, version, generation))
            return
        super()._background(process, what, version, generation)

    def reaches(self, worker: SimulatedWorker, other: SimulatedWorker) -> bool:
        return not self.hosts.apart_until(worker.name, other.name)

    def ended(self, worker: SimulatedWorker, status: int) -> None:
        if self._random() < self.schedule.seen_dying:
            self.note("exit", f"{worker.name} (rank {worker.rank}) {status}")
            seen = self._between(_DELAYS["dead"])
            self.after(seen, ("dying", worker.name))
            self.after(seen + 0.5 * self._random(), ("dead", worker.name, status))
        else:
            super().ended(worker, status)

    def dying(self, process: str) -> None:
        """Its node sees that its main thread is gone, before its memory is freed."""
        if process in self._unwitnessed:
            return
        self._gone.add(process)
        worker = self.workers[process]
        position = worker.page.position(counters=True)
        self.send(worker, ev.ProcessDying(process=process, position=position, noticed_ns=1))

    # --- faults of processes --------------------------------------------------------------------------------------
    def _strike_someone(self, fault: ProcessFault) -> None:
        living = [self.workers[name] for name in sorted(self.workers) if self.workers[name].alive]
        if living:
            self._strike(fault, living[fault.pick % len(living)])

    def _strike(self, fault: ProcessFault, worker: SimulatedWorker) -> None:
        self._faults.remove(fault)
        if not worker.alive or worker.frozen or worker.hung:
            return
        action = _possible(fault.action, worker)
        self.note("FAULT", f"{action} {worker.name} (rank {worker.rank}) in {worker.point}")
        self.checker.struck(action, worker)
        worker.struck = True
        self.struck += 1
        match action:
            case Fault.FREEZE:
                worker.frozen = True
                self._watch()
                if fault.thaw_seconds:
                    self.after(fault.thaw_seconds, ("thaw", worker.name))
            case Fault.LOOP:
                worker.hung = True
                worker.frozen = fault.holds_lock
                self._watch()
            case Fault.RAISE:
                worker.raise_in_script(f"ValueError: number {self.struck}")
            case Fault.EXIT:
                worker.die(100 + self.struck)
            case Fault.CUT:
                worker.break_connections()
            case Fault.FLIP_PARAMETER:
                worker.state = worker.state._replace(content=hash((11, worker.state.content, self.struck)))
                self.checker.spoilt.add(worker.state.content)
                self._watch()  # should what the ranks say of it be lost with their agent, it is their wait that shows
            case _:
                worker.die(-9)

    def _meet_the_bug(self, worker: SimulatedWorker) -> None:
        if worker.alive and not (worker.frozen or worker.hung):
            self.note("FAULT", f"a bug of the script in {worker.name} (rank {worker.rank})")
            self.checker.struck(Fault.RAISE, worker)
            worker.struck = True
            worker.raise_in_script("ValueError: the same again")

    def _dead(self, process: str, status: int) -> None:
        self._gone.add(process)
        if process not in self._unwitnessed:
            super()._dead(process, status)

    def thaw(self, process: str) -> None:
        """SIGCONT."""
        worker = self.workers[process]
        if worker.hung:
            return
        worker.thaw()
        if worker.alive and process in self._unconnected and process not in self.fenced:
            self._unconnected.remove(process)
            self._connect_again(worker)

    # --- trouble between the processes ----------------------------------------------------------------------------
    def _trouble(self, trouble: NetworkFault) -> None:
        self._network.remove(trouble)
        if self.end is not None:
            return
        self.note("FAULT", f"{trouble.kind} {trouble.seconds:g} s up={trouble.up} down={trouble.down}")
        self.checker.disturbed.add(trouble.kind)
        self.struck += 1
        until = self.now + trouble.seconds
        match trouble.kind:
            case "silence":
                self._be_silent(self.hosts.numbered(trouble.host), until, up=trouble.up, down=trouble.down)
            case "asleep":
                self._asleep_until = max(self._asleep_until, until)
            case "blackhole":
                for worker in self.workers.values():
                    if worker.alive and worker.group_generation:
                        self._blackholes.add(worker.group_generation)
                        worker.struck = True  # on some ranks a collective is over, and on others not: these get blamed
                self._watch()
            case "agent":
                self._agent_dies(self.hosts.numbered(trouble.host), until)
            case "controller":
                self._dies = trouble
            case _:
                self.hosts.strike(trouble)

    def _be_silent(self, host: Host, until: float, *, up: bool, down: bool) -> None:
        for direction, yes in (("up", up), ("down", down)):
            if yes:
                host.silent_until[direction] = max(host.silent_until[direction], until)

    def _agent_dies(self, host: Host, until: float) -> None:
        """What it had not passed on is lost, in both directions; what comes later waits for its successor."""
        if not host.alive:
            return
        if host.name in self._gatherings:
            self._gatherings[host.name].take()
        for queues in (self.up, self.down):
            for process in sorted(queues):
                if self.host_of[process] == host.name and self._random() < 0.5:
                    queues[process].clear()
        for worker in self.hosts.workers(host):
            if worker.alive:
                continue
            worker.page.slots = [None, None]  # with the last mapping of its page
            self._unwitnessed.add(worker.name)  # its successor can only say that nobody saw how it ended
            queue = self.up.get(worker.name)
            if queue is not None:
                left = [m for m in queue if not isinstance(m, ev.ProcessExited | ev.ProcessDying)]
                queue.clear()
                queue.extend(left)
        self._be_silent(host, until, up=True, down=True)
        self.after(until - self.now, ("agent_back", host.name))

    def agent_back(self, host_name: str) -> None:
        """A successor adopts the processes; see agent/adoption.py and server/agents.py, `attach`."""
        host = self.hosts.called(host_name)
        if not host.known:
            return
        if self.several_hosts and host.alive and max(host.silent_until.values()) > self.now:
            self.after(max(host.silent_until.values()) - self.now, ("agent_back", host_name))
            return
        for name in sorted(self.spawned - self.fenced):
            if self.host_of[name] != host_name:
                continue
            worker = self.workers.get(name)
            coming = any(isinstance(message, Spawn) for message in self.down[name])
            if not coming and (worker is None or not worker.alive):
                self.feed(self._unseen_exit(name))
        self.feed(ev.AgentJoined(agent=host_name, slots=host.slots))
        for worker in self.hosts.workers(host):
            if worker.alive and worker.name not in self.fenced:
                self._connect_again(worker)

    def _connect_again(self, worker: SimulatedWorker) -> None:
        """To the agent's successor. One that is frozen does so when it is no more."""
        if worker.frozen:
            self._unconnected.add(worker.name)
            return
        self.send(worker, ev.ProcessStarted(process=worker.name, pid=1))
        if worker.last_report is not None:
            self.send(worker, worker.last_report)
        worker.say_again()

    def _unseen_exit(self, process: str) -> ev.ProcessExited:
        """For a death that was reported, this is one more report of it, and the core knows it already."""
        worker = self.workers.get(process)
        position = Position() if worker is None else worker.page.position(counters=True)
        return ev.ProcessExited(
            process=process,
            exit_status=None,
            evidence="ended while its agent was away",
            position=msgspec.structs.replace(position, private_versions=(-1, -1)),
            noticed_ns=1,
        )

    def _lose_controller(self, death: NetworkFault) -> None:
        """Orders of it that are on their way may be lost with it, the newest first."""
        self.note("FAULT", f"the controller is dead, {death.sent} orders sent")
        self._away = True
        for process in sorted(self.down):
            queue = self.down[process]
            while queue and self._random() < 0.5:
                queue.pop()
        said = [e.event for e in self.journal if isinstance(e.event, _REPORTED) and not _is_unseen(e.event)]
        self._unheard += said[max(0, len(said) - death.repeated) :]
        self.after(death.seconds, ("controller_back",))

    def controller_back(self) -> None:
        """server.py, `_take_over`: its successor replays the journal, and is told that it was restarted."""
        records = [Record(entry.now, entry.event) for entry in self.journal]
        self.controller = replay(self.settings, records, self._parts.controller)
        self._detector = self._make_detector()
        self._away = False
        if self.controller.ended is not None:
            self.end = self.controller.ended
            self.checker.final(self.end, self.controller.report())
            return
        self.feed(ev.ControllerRestarted())
        if self._away:
            return
        self._unheard += [self._unseen_exit(name) for name in self._never_started()]
        while self._unheard and not self._away:
            event = self._unheard.pop(0)
            if self._can_still_say(event):
                self.feed(event)

    def _can_still_say(self, event: ev.Event) -> bool:
        """What was said before may be said again, but not from a host that was given up in between."""
        if isinstance(event, ev.AgentJoined):
            return self.hosts.called(event.agent).known
        return getattr(event, "process", "") not in self.fenced

    def _never_started(self) -> list[str]:
        """Processes that the controller believes in, and that no node has or will have: agents.py, `attach`."""
        believed = [p.name for p in self.controller.members.processes.values() if p.alive]
        coming = {name for name, queue in self.down.items() if any(isinstance(message, Spawn) for message in queue)}
        ended = (
            {name for name in self._unseen if name in self.workers and not self.workers[name].alive}
            if self._unseen
            else set()
        )
        self._unseen.clear()
        return [
            n for n in believed if (n not in self.workers or n in ended) and n not in coming and n not in self.fenced
        ]

    # --- the detector ---------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        if not self._samples:
            self.sample()

    def sample(self) -> None:
        """The node looks at its processes, and the production detector judges what it saw."""
        if self.end is not None:
            return
        self._samples += 1
        pace = self.schedule.sample_seconds
        heard = [host.name for host in self.hosts]
        if pace > SAMPLE_SECONDS:  # each host at a moment of its own
            self.after(pace / len(heard), ("sample",))
            heard = [heard[self._samples % len(heard)]]
        else:
            self.after(pace if self._samples < _SPARSE_AFTER else SPARSE_SAMPLE_SECONDS, ("sample",))
        heard = [name for name in heard if self._is_heard(self.hosts.called(name))]
        if self._away or self.now < self._asleep_until or not heard:
            return
        now_ns = int(self.now * 1e9)
        samples = [
            Sample(
                process=worker.name,
                position=worker.page.position(counters=True),
                state="T" if worker.frozen and not worker.hung else "R" if worker.hung else "S",
                run_delay_ns=0,
                rss_bytes=0,
                sampled_ns=now_ns,
            )
            for worker in self.workers.values()
            if worker.alive and self.host_of[worker.name] in heard and worker.name not in self.fenced
        ]
        for event in self._detector.observe(samples, self.controller.rank_processes(), self.now):
            self.feed(event)

    def _is_heard(self, host: Host) -> bool:
        return host.known and self.now >= host.silent_until["up"]

    def _make_detector(self) -> Detector:
        detector = self._parts.detector(DETECTOR)
        if self.schedule.sample_seconds > SAMPLE_SECONDS:
            detector.expect(self.schedule.sample_seconds)
        return detector

    def perform(self, action: Action) -> None:
        own = _PERFORM.get(action[0])
        if own is not None:
            own(self, *action[1:])
        else:
            super().perform(action)


_PERFORM: dict[str, Callable[..., None]] = {
    "step": SimulatedJob._step,
    "up": SimulatedJob._up,
    "down": SimulatedJob._down,
    "settle": SimulatedJob._settle,
    "connect": SimulatedJob._connect,
    "arrive": SimulatedJob._arrive,
    "again": SimulatedJob.again,
    "dying": SimulatedJob.dying,
    "dead": SimulatedJob._dead,
    "gathered": SimulatedJob.send_gathered,
    "thaw": SimulatedJob.thaw,
    "agent_back": SimulatedJob.agent_back,
    "controller_back": SimulatedJob.controller_back,
    "host": lambda job, what, name: getattr(job.hosts, what)(name),
    "sample": SimulatedJob.sample,
}


def _possible(action: Fault, worker: SimulatedWorker) -> Fault:
    """The script can raise only where it runs, and an endless loop is a hang only where somebody waits."""
    runs = worker.page.phase in IN_STEP or worker.page.phase in (Phase.OUTSIDE, Phase.STARTING)
    if action is Fault.RAISE and (not runs or worker.point in _QUIET_POINTS):
        return Fault.KILL
    if action is Fault.LOOP and worker.point in _QUIET_POINTS:
        return Fault.KILL
    if action is Fault.FLIP_PARAMETER and (worker.machine.blank or worker.point in _UNCOMPARED_POINTS):
        return Fault.KILL
    return action


def _is_unseen(event: ev.Event | None) -> bool:
    """Not an agent's report: a controller finds it out, when an agent comes back without that process."""
    return isinstance(event, ev.ProcessExited) and event.exit_status is None


def _generations(worker: SimulatedWorker) -> tuple[int, int]:
    return worker.group_generation, worker.meeting_generation


def run_schedule(schedule: Schedule, parts: Parts = PRODUCTION) -> SimulatedJob:
    """Run a schedule to its end; returns the job for a closer look. Raises Violation."""
    job = SimulatedJob(schedule, parts)
    job.run()
    return job


def show(thing: object) -> str:
    """An event or an order on one line, without what only machines read."""
    if not isinstance(thing, msgspec.Struct):
        return str(thing)
    hidden = ("progress", "position", "sources", "stop_seconds", "restore_address", "noticed_ns", "traceback")
    fields = {name: getattr(thing, name) for name in thing.__struct_fields__ if name not in hidden}
    return f"{type(thing).__name__} " + " ".join(f"{name}={value}" for name, value in fields.items())
