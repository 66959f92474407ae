"""A simulated job in virtual time. Deterministic: a `Schedule` decides everything, under any PYTHONHASHSEED."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from relight.core.controller import Controller, ControllerSettings
from relight.core.detection.detector import Detector
from relight.core.protocol import events as ev
from relight.core.protocol.commands import CancelHost, Command, EndJob, OrderHost
from relight.core.protocol.gathering import HOLD_SECONDS
from relight.sim.model.contents import Violation
from relight.sim.model.network import Group
from relight.sim.model.schedule import Schedule
from relight.sim.model.shapes import pattern_of
from relight.sim.model.worker.points import PAUSES
from relight.sim.model.worker.worker import SimulatedWorker
from relight.sim.timed.agent_life import AgentLife
from relight.sim.timed.channels import Channels
from relight.sim.timed.controller_life import ControllerLife
from relight.sim.timed.faults import Faults
from relight.sim.timed.hosts import Hosts
from relight.sim.timed.links import Links
from relight.sim.timed.supplier import Supplier
from relight.sim.timed.watcher import Watcher
from relight.sim.world.agent import SimulatedAgent
from relight.sim.world.world import Action, World

MAX_EVENTS = 20_000
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
_WAKE = (0.00005, 0.003)  # from the end of a main thread's wait until it moves
_DELAYS = {
    "settle": (0.0001, 0.02),  # until a member finds its collective complete, or its connection reset
    "connect": (0.005, 0.03),
    "arrive": (0.005, 0.2),
    "dead": (0.0005, 0.01),
    "background": (0.001, 0.2),
}
_FETCH_AGAIN_SECONDS = 5.0
SUPPLY_TIMEOUT_SECONDS = 40.0
SUPPLY_IDLE_SECONDS = 10.0


class JournalEntry(msgspec.Struct, frozen=True):
    """An event of the controller (None: its deadline has passed), and its orders."""

    now: float
    event: ev.Event | None
    commands: tuple[Command, ...]


@dataclass(frozen=True)
class Parts:
    """Kinds of the parts of a job; mutations.py puts in others."""

    controller: Callable[[ControllerSettings], Controller] = Controller
    worker: type[SimulatedWorker] = SimulatedWorker
    detector: type[Detector] = Detector
    hold_seconds: float = HOLD_SECONDS


PRODUCTION = Parts()


def _settings_of(schedule: Schedule) -> ControllerSettings:
    """Return the settings of the job in a schedule."""
    return ControllerSettings(
        world_size=schedule.world_size,
        nodes=schedule.nodes,
        spare_nodes=schedule.spares,
        standbys=schedule.standbys,
        supplier="simulated" if schedule.supplies else "",
        supply_spares=schedule.supply_spares if schedule.supply_spares >= 0 else None,
        supply_timeout_seconds=SUPPLY_TIMEOUT_SECONDS,
        supply_idle_seconds=SUPPLY_IDLE_SECONDS,
        fault_status=75 if schedule.remade else 0,
        staying_host="node-0",
    )


class SimulatedJob(World):
    """Run it once. Raises Violation, with the schedule and the trace, if an invariant breaks."""

    def __init__(self, schedule: Schedule, parts: Parts = PRODUCTION) -> None:
        self.settings = _settings_of(schedule)
        pattern = pattern_of(schedule.shapes, relearns=schedule.relearns, learns=schedule.learns)
        super().__init__(self.settings, schedule.until, parts.controller, parts.worker, pattern)
        self.leaves = schedule.leaves
        self.checker.until = schedule.leaves or schedule.until
        self.make_controller = parts.controller
        self.schedule = schedule
        self.several_hosts = schedule.nodes + schedule.spares > 1 or schedule.supplies
        self.derivable = self.checker.derivable = schedule.derivable
        self.parts = self.checker.parts = schedule.parts
        self.buddy_every, self.checkpoint_every = schedule.buddy_every, schedule.checkpoint_every
        self.verify_every = self.checker.verify_every = schedule.verify_every
        self.checker.fenced = self.fenced
        self.checker.host_of = self.host_of
        self.journal: list[JournalEntry] = []
        self.trace: list[tuple[float, str, object]] = []
        self.chance = random.Random(f"delays {schedule.seed}").random
        self._due: list[tuple[float, int, Action]] = []
        self._deadline: float | None = None  # of the controller, after so many lines of its journal
        self._deadline_after = -1
        self._planned = 0
        self._happened = 0
        self.hosts = Hosts(self, schedule.nodes, schedule.world_size // schedule.nodes, schedule.spares)
        self.channels = Channels(self)
        self._hold_seconds = parts.hold_seconds if schedule.gathers else 0.0
        self.links = Links(self)
        self.agent_life = AgentLife(self)
        self.supplier = Supplier(self)
        self.faults = Faults(self)
        self.controller_life = ControllerLife(self)
        self.watcher = Watcher(self, parts.detector)
        self._performers: dict[str, Callable[..., None]] = {
            "step": self.faults.step,
            "up": self.channels.pass_up,
            "down": self.channels.pass_down,
            "again": self.channels.pass_again,
            "held": self._expire_hold,
            "settle": self.links.settle,
            "connect": self.links.connect,
            "arrive": self.links.arrive,
            "dying": self.agent_life.report_dying,
            "dead": self.agent_life.report_exit,
            "thaw": self.agent_life.thaw,
            "agent_back": self.agent_life.come_back,
            "controller_back": self.controller_life.come_back,
            "host": self.hosts.perform,
            "supplier": self.supplier.perform,
            "sample": self.watcher.sample,
        }

    # --- the run ------------------------------------------------------------------------------------------------
    def run(self) -> EndJob:
        """Run to the end of the job."""
        try:
            for host in self.hosts:
                if self.several_hosts:
                    self.after(2.0 * self.chance(), ("host", "joins", host.name))
                else:
                    self.hosts.joins(host.name)
            if self.schedule.watched:
                self.watcher.watch()
            while self.end is None:
                self._advance()
        except Violation as violation:
            raise Violation(f"{violation}\n{self.explain()}") from None
        return self.end

    def explain(self) -> str:
        """Show the schedule, and the end of the trace."""
        trace = [f"{now:9.4f}  {what:8}  {show(thing)}" for now, what, thing in self.trace]
        return "\n".join([f"schedule: {msgspec.json.encode(self.schedule).decode()}", *trace[-400:]])

    def _advance(self) -> None:
        life = self.controller_life
        if self._deadline_after != len(self.journal):  # else the controller has not changed
            self._deadline, self._deadline_after = self.controller.next_deadline(), len(self.journal)
        deadline = None if life.is_away else self._deadline
        if deadline is not None and deadline < life.asleep_until:
            deadline = life.asleep_until
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
        self.faults.strike_due(self._happened)

    def perform(self, action: Action) -> None:
        own = self._performers.get(action[0])
        if own is not None:
            own(*action[1:])
        else:
            super().perform(action)

    # --- time and chance ----------------------------------------------------------------------------------------
    def between(self, range_seconds: tuple[float, float]) -> float:
        """Draw a length of time."""
        return range_seconds[0] + (range_seconds[1] - range_seconds[0]) * self.chance()

    def shortly(self) -> float:
        """Draw a short length of time."""
        return self.between(_SHORT)

    def after(self, seconds: float, action: Action) -> None:
        """Let it happen in `seconds` from now; equal times in the order in which they were planned."""
        self._planned += 1
        heapq.heappush(self._due, (self.now + seconds, self._planned, action))

    def plan(self, action: Action) -> None:
        kind = action[0]
        if kind in ("up", "down"):
            self.channels.plan(action)
        elif kind == "settle":
            # Some members notice a lost connection only once their own is cut; see decisions/0001.
            slow = not action[4] and self.chance() < 0.3 and not self.group(action[1]).gone >> action[3] & 1
            self.after(25.0 if slow else self.between(_DELAYS["settle"]), action)
        elif kind == "background" and action[2] == "fetch again":
            self.after(_FETCH_AGAIN_SECONDS, action)
        else:
            self.after(self.between(_DELAYS[kind]), action)

    def plan_step(self, worker: SimulatedWorker) -> None:
        point = worker.point
        seconds = self.between(_STAY.get(point, _SHORT) if point in PAUSES else _WAKE)
        if point == "LOADING" and worker.machine.is_standby and self.now > 1.0:
            seconds = self.between((4.0, 45.0))  # beside a training that needs the processors
        if worker.rank == self.schedule.slow_rank and point not in ("LOADING", "WARMUP"):
            seconds *= 30
        self.after(seconds, ("step", worker.name, worker.ticket))

    def plan_patience(self, worker: SimulatedWorker, seconds: float) -> None:
        self.after(seconds, ("patience", worker.name, worker.ticket))

    # --- what the world leaves to its driver ------------------------------------------------------------------------
    def feed(self, event: ev.Event) -> None:
        if self.controller_life.is_away:
            self.controller_life.keep(event)
        else:
            super().feed(event)

    def obey(self, event: ev.Event | None, commands: Sequence[Command]) -> None:
        """Write to the journal before orders are carried out; the controller may die in between."""
        self.journal.append(JournalEntry(self.now, event, tuple(commands)))
        if fault := self.checker.supply.judge(event, commands, self.now):
            raise Violation(fault)
        death = self.controller_life.take_death()
        super().obey(event, commands if death is None else commands[: death.sent])
        if death is not None and self.end is None:
            self.controller_life.die(death)

    def supply(self, command: OrderHost | CancelHost) -> None:
        if isinstance(command, OrderHost):
            self.supplier.order(command)
        else:
            self.supplier.cancel(command)

    def note(self, what: str, thing: object) -> None:
        self.trace.append((self.now, what, thing))

    def post_together(self, events: Sequence[Any]) -> None:
        self.channels.plan_together(events)

    def hold(self, agent: SimulatedAgent) -> None:
        if self._hold_seconds:
            self.after(self._hold_seconds, ("held", agent.host, agent.hold))
        else:
            super().hold(agent)

    def _expire_hold(self, host: str, hold: int) -> None:
        self.agents[host].expire(self, hold)

    def ended(self, worker: SimulatedWorker, status: int) -> None:
        if self.chance() < self.schedule.seen_dying:
            self.agent_life.plan_notice(worker, status)
        else:
            super().ended(worker, status)

    def lose(self, group: Group, rank: int) -> None:
        self.links.lose(group, rank)

    def reaches(self, one: str, other: str) -> bool:
        return not self.hosts.apart_until(one, other)


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
