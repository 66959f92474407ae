"""A whole job around the production controller: workers, one node, its channels. It knows no time and no chance.

What may happen next is an *action*, a plain tuple. Two drivers choose among them: timed.py gives each a time in a
virtual clock, drawn from a seed; exhaustive.py tries all of them, one after another, on copies.

    ("step", process, ticket)          its main thread moves on
    ("patience", process, ticket)      its wait has lasted for too long
    ("up", process)                    its next message reaches the controller
    ("down", process)                  the next order or request for it reaches its node
    ("settle", generation, number, rank, completes)
    ("connect", generation, rank)      it has formed the group
    ("arrive", process)                the source's state is here
    ("dead", process, status)          its agent notices the death
    ("background", process, what, version, generation)  work beside its main thread continues
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from relight.agent.decisions.host import Said
from relight.core.controller import Controller, ControllerSettings
from relight.core.protocol import events as ev
from relight.core.protocol.commands import CancelHost, Command, EndJob, OrderHost, Save
from relight.sim.judge.checker import Checker
from relight.sim.model.fallback_tiers import Disk, FallbackTiers
from relight.sim.model.network import Group, Rendezvous
from relight.sim.model.shapes import ONE_WRITE, Pattern
from relight.sim.model.worker.worker import SimulatedWorker
from relight.sim.world import copies, groups, node, tiers
from relight.sim.world.agent import SimulatedAgent
from relight.sim.world.orders import carry_out

Action = tuple[Any, ...]


class World:
    """State of the job. `plan` and `note` are what a driver adds."""

    detailed_pages = True  # with the counters that the detector reads
    several_hosts = False
    derivable = False  # a rank's private state follows from its number and the step
    parts = 1  # that the state is divided into
    leaves = 0  # version with which the scripts leave their loops by themselves; 0: they do not
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
        self.agents: dict[str, SimulatedAgent] = {}  # of each host
        self.spawned: set[str] = set()  # processes that were ordered to be started
        self.host_of: dict[str, str] = {}  # on which host
        self.fenced: set[str] = set()  # processes of a host that was given up: their messages are dropped
        self.up: dict[str, deque[ev.Event]] = {}
        self.down: dict[str, deque[Any]] = {}
        self.groups: dict[int, Group] = {}
        self.meetings: dict[int, Rendezvous] = {}
        self.store_generation = 0
        self.disk = Disk(settings.world_size)
        self.end: EndJob | None = None

    # --- what a driver adds ---------------------------------------------------------------------------------------
    def plan(self, action: Action) -> None:
        """Make an action possible from now on."""
        raise NotImplementedError

    def note(self, what: str, thing: object) -> None:
        """Show an event to people who look at this run."""

    def supply(self, command: OrderHost | CancelHost) -> None:
        """Take an order for a host, or its cancellation."""

    def lose(self, group: Group, rank: int) -> None:
        """Decide which ranks have lost data on its way to them, now that `rank` has left the group."""

    def reaches(self, one: str, other: str) -> bool:  # noqa: ARG002 (drivers with hosts)
        """Return whether data passes between two processes."""
        return True

    def own(self, process: str) -> SimulatedWorker:
        """A worker that is about to change. A driver that shares workers between worlds makes a copy first."""
        return self.workers[process]

    # --- the controller -------------------------------------------------------------------------------------------
    def feed(self, event: ev.Event) -> None:
        """Hand an event to the controller."""
        if self.end is None:
            self.note("event", event)
            self.obey(event, self.controller.handle(event, self.now))

    def expire(self) -> None:
        """Let the controller's deadline pass."""
        if self.end is None:
            self.obey(None, self.controller.expire(self.now))

    def obey(self, event: ev.Event | None, commands: Sequence[Command]) -> None:  # noqa: ARG002 (drivers record it)
        """Carry out what the controller ordered after an event."""
        self.controller.check()
        for command in commands:
            self.note("command", command)
            carry_out(self, command)

    def tell(self, process: str, message: Any) -> None:
        """Send to a process, or to its node about it; in order."""
        if process in self.fenced:
            return
        self.down.setdefault(process, deque()).append(message)
        self.plan(("down", process))

    def perform(self, action: Action) -> None:
        """Let an action happen."""
        _PERFORM[action[0]](self, *action[1:])

    # --- agents ---------------------------------------------------------------------------------------------------
    def agent_of(self, process: str) -> SimulatedAgent:
        """The agent of the host on which a process runs, or is about to be started."""
        name = self.host_of[process]
        if name not in self.agents:
            self.agents[name] = SimulatedAgent(name, {})
        return self.agents[name]

    def post(self, process: str, event: ev.Event) -> None:
        """Send to the controller what an agent says about one of its processes, or for it."""
        self.up.setdefault(process, deque()).append(event)
        self.plan(("up", process))

    def post_together(self, events: Sequence[Any]) -> None:
        """Send reports of several processes as one message."""
        for event in events:
            self.post(event.process, event)

    def hold(self, agent: SimulatedAgent) -> None:
        """Let reports wait for each other. Without a clock they do not wait."""
        agent.expire(self, agent.hold)

    # --- what workers need (model/surroundings.py) ------------------------------------------------------------------
    group = groups.find_group
    rendezvous = groups.find_rendezvous
    entered = groups.enter
    left = groups.leave
    joined = groups.join
    choose_source = copies.spread_source
    asked = copies.request
    offered = copies.request_again
    find_kept = tiers.find_snapshot
    saves = tiers.save

    def plan_step(self, worker: SimulatedWorker) -> None:
        self.plan(("step", worker.name, worker.ticket))

    def plan_patience(self, worker: SimulatedWorker, seconds: float) -> None:  # noqa: ARG002 (of drivers with a clock)
        self.plan(("patience", worker.name, worker.ticket))

    def plan_background(self, worker: SimulatedWorker, what: str, version: int) -> None:
        self.plan(("background", worker.name, what, version, worker.machine.generation))

    def send(self, worker: SimulatedWorker, event: ev.Event) -> None:
        self.agent_of(worker.name).feed(self, Said(worker.name, event, event))

    def ended(self, worker: SimulatedWorker, status: int) -> None:
        self.note("exit", f"{worker.name} (rank {worker.rank}) {status}")
        self.plan(("dead", worker.name, status))

    def thawed(self, worker: SimulatedWorker) -> None:
        stalled, worker.stalled = worker.stalled, ()
        for action in stalled:
            self.plan(action)
        self.offered(worker)

    def make_tiers(self, worker: SimulatedWorker) -> FallbackTiers | None:
        if not (self.buddy_every or self.checkpoint_every):
            return None
        return worker.tiers_kind(worker, self.buddy_every, self.checkpoint_every, self.disk)

    def is_saved(self, save: Save) -> bool:
        return save.target in self.disk.complete


def _step(world: World, process: str, ticket: int) -> None:
    world.own(process).wake(ticket)


def _patience(world: World, process: str, ticket: int) -> None:
    world.own(process).lose_patience(ticket)


_PERFORM: dict[str, Callable[..., None]] = {
    "step": _step,
    "patience": _patience,
    "up": node.pass_up,
    "down": node.pass_down,
    "settle": groups.settle,
    "connect": groups.connect,
    "arrive": copies.arrive,
    "dead": node.report_exit,
    "background": tiers.continue_in_background,
}
