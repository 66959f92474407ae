"""One worker's part in a job: its rank, its groups, and what passes between it and the controller.

Two threads meet here. The *link* thread receives orders (orders.py) and does only what must happen at once: close the
generation, break its connections, wake the main thread if it waits. The *main* thread runs the script, and everything
a recovery does to the state is done there, by the thread that owns it.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from relight.core.protocol.events import FaultStruck, StandbyReady
from relight.core.protocol.fault import Action, Fault, Point
from relight.core.protocol.position import Phase
from relight.core.worker.actions import Actions
from relight.core.worker.events import Event, Ordered, StandbyWarm
from relight.core.worker.worker import Worker
from relight.device.choose import accelerator
from relight.device.placement import Placement
from relight.training.collectives.generation_group import Forming, GenerationGroups
from relight.training.collectives.groups import Ranks
from relight.training.connection.link import AgentLink
from relight.training.connection.page import PositionPage
from relight.training.connection.store import StoreClient
from relight.training.output import flush
from relight.training.process.controller.notices import Notices
from relight.training.process.controller.orders import Orders
from relight.training.process.controller.reports import Reports
from relight.training.process.faults import Faults
from relight.training.process.groups import ProcessGroups
from relight.training.process.holdings import Holdings, Lifecycle
from relight.training.process.protection import Protection
from relight.training.process.restores import Restores
from relight.wire.memory.shared_barrier import SharedBarrier
from relight.wire.messages import StoreLost, StoreReply
from relight.wire.settings import JobSettings, read_settings

# An error in a collective nearly always precedes the Stop that explains it by milliseconds. Without a controller, it
# may take as long as the controller has to come back.
VERDICT_SECONDS = 30.0


class Runtime:
    """The parts of one process, put together. They belong to the main thread unless they say otherwise."""

    def __init__(self, settings: JobSettings, private_dir: Path) -> None:
        environment = os.environ
        self.settings = settings
        self.process = environment["RELIGHT_PROCESS"]
        self.slot = int(environment["RELIGHT_SLOT"])
        self.world_size = settings.world_size
        is_standby = environment["RELIGHT_ROLE"] == "standby"
        rank = settings.world_size - 1 if is_standby else int(environment["RANK"])
        self.worker = worker = Worker(rank, is_standby=is_standby, cap=settings.stop_after)
        self.page = PositionPage(int(environment["RELIGHT_PAGE_FD"]), int(environment["RELIGHT_PAGE_OFFSET"]))
        self._shared_barrier = _open_shared_barrier(
            environment.get("RELIGHT_SHARED_BARRIER_FD", ""), settings.world_size
        )
        self.accelerator = accelerator()
        self.device = self.accelerator.device_of_slot(self.slot)
        self.placement = Placement(has_own_collectives=False, builds_late=False)  # `relight.init` decides
        self.is_rehearsing = False  # a standby takes a step of which nothing is kept
        self.has_begun = False  # a loop of steps was begun: a process can have one
        self._built_as = rank if is_standby else None  # the rank of which a standby builds everything
        self.builds_late = False  # a standby of this job builds nothing before it knows which rank it takes
        self.guessed = False  # the script did not say so
        self.lifecycle: Lifecycle | None = None  # of the loop of steps, once it is begun
        self.at_rank_change: list[Callable[[int], None]] = []  # of the script: to be called when a standby takes a rank
        self.groups = ProcessGroups(settings.world_size)
        self.link = AgentLink(environment["RELIGHT_AGENT_SOCKET"], self.process, settings.agent_timeout_seconds, self)
        self.store = StoreClient(self.link)
        # Processes are named in the order in which they are started, the initial ranks first.
        standby_index = int(self.process.removeprefix("w")) - settings.world_size if is_standby else None
        self.faults = Faults(
            settings.plan, self.page, standby_index, self.groups.break_connections, self._announce, self._flip
        )
        self.notices = Notices(self.link, self.process, worker, self.faults)
        self.orders = Orders(worker, self._tell_of_close)
        self.restores = Restores(
            private_dir, self.process, settings.restore_timeout_seconds, worker, self.faults, self.link
        )
        patience_seconds = VERDICT_SECONDS + settings.controller_timeout_seconds
        self.reports = Reports(self.link, self.process, worker, self.page, self.faults, self.orders, patience_seconds)
        self.protection = Protection(worker, self.page, self.groups, self.notices, self.reports.await_stop)
        self.orders.at_close += [
            self.protection.stop_forwards,
            self._close_store,
            self.groups.break_connections,
            self.restores.cancel,
            self.restores.withdraw,
        ]
        self.link.start()

    # --- the link thread (LinkListener) -------------------------------------------------------------------------------
    def reconnected(self) -> None:
        """Send again what an agent that died may not have passed on; the link repeats the last report itself."""
        self.store.say_again(lost=False)
        self.notices.repeat_doubts()
        self.reports.repeat_broken()

    def receive(self, message: Any) -> None:
        """Take in what the agent sends."""
        if isinstance(message, StoreReply):
            self.store.reply(message)
        elif isinstance(message, StoreLost):
            self.store.say_again(lost=True)
        else:
            self.orders.receive(message)

    def _close_store(self) -> None:
        self.store.close_below(self.worker.newest)

    def _tell_of_close(self, name: str, error: Exception) -> None:
        self.notices.say(
            f"at close {name}",
            f"rank {self.rank}: {name} failed when a generation was closed ({type(error).__name__}: {error}). The "
            "recovery goes on; it may take longer. This is a bug in relight: please report it",
        )

    # --- what the worker has decided (core/worker) --------------------------------------------------------------------
    @property
    def rank(self) -> int:
        """The rank that this process holds; of a standby the last one, until it takes one."""
        return self.worker.rank

    @property
    def is_standby(self) -> bool:
        """True if this process has not trained with a rank yet."""
        return self.worker.is_standby

    @property
    def generation(self) -> int:
        """The generation in which the main thread works."""
        return self.worker.generation

    @property
    def closed(self) -> bool:
        """True if a newer generation was opened: the link thread knows it first."""
        return self.worker.closed

    @property
    def holdings(self) -> Holdings:
        """The state of this process and its copies."""
        return self.protection.holdings

    def handle(self, event: Event) -> Actions:
        """Hand an event in, while no order arrives."""
        return self.orders.handle(event)

    def await_cause(self) -> None:
        """Wait, before the first step and if a connection has ended, for the controller to end this process for it.

        The peer's own end is the cause of what failed here, and is what the job is to end with.
        """
        if not self.has_begun and self.groups.is_broken:
            self.orders.await_stop(VERDICT_SECONDS)

    def report_status(self) -> None:
        """Report what this rank holds, as a basis of the decision."""
        self.reports.status(self.holdings, self.restores.server)

    # --- taking a rank ------------------------------------------------------------------------------------------------
    def stand_by(self, layout_digest: str) -> None:
        """Report that this standby is warm, and wait for a rank, which this process has from now on.

        `layout_digest` is of what it has built; empty if it builds nothing before.
        """
        self.page.stamp(Phase.STANDBY)
        self.handle(StandbyWarm())
        self.link.send(StandbyReady(process=self.process, layout_digest=layout_digest), report=True)
        self.faults.strike(Point.IDLE)
        self.await_assignment()
        self.faults.recovery = self.generation - 1

    def await_assignment(self) -> None:
        """Wait for a rank, and become it."""
        self.orders.await_ready()
        self.handle(Ordered())
        self.groups.follow_rank(self.rank)
        self.page.put("rank", self.rank)
        self.page.put("generation", self.generation)
        os.environ["RANK"], os.environ["LOCAL_RANK"] = str(self.rank), str(self.local_rank)
        self.faults.rank = self.rank

    @property
    def built_as(self) -> int:
        """The rank that the script knew when it built its modules and data."""
        return self.rank if self._built_as is None or self.builds_late else self._built_as

    def note_skip(self) -> None:
        """An operation was skipped on a group that this process is no member of."""
        if self.is_standby:
            self.groups.table.skips = True

    @property
    def local_rank(self) -> int:
        """The rank on its node, as ranks are laid out at the start."""
        return self.rank % self.local_world_size

    @property
    def local_world_size(self) -> int:
        """The number of ranks on a node at the start."""
        return max(1, self.world_size // self.settings.nodes)

    # --- generations --------------------------------------------------------------------------------------------------
    def begin_forming(self, generation: int, groups: Sequence[Ranks]) -> Forming:
        """Form groups of a generation, on a thread of its own."""
        self.faults.strike(Point.REFORM)
        device = self.device if self.placement.has_own_collectives else None
        return Forming(self.store, generation, groups, self.rank, device, self.groups.waits, self._shared_barrier)

    def open_generation(self, generation_groups: GenerationGroups) -> None:
        """Resume: collectives go through the new groups. To be called with the lock of orders held."""
        self.groups.attach(generation_groups)
        self.restores.forget()
        self.protection.let_forwards_run()

    def synchronize(self) -> None:
        """Return once the device has done all that was launched."""
        self.accelerator.synchronize(self.device)

    def synchronize_stream(self) -> None:
        """Return once the device has done all that was launched on this thread's current stream."""
        self.accelerator.synchronize_stream(self.device)

    def leave(self) -> NoReturn:
        """Asked to, between two steps: another process takes this rank, and finds its private state beside the page."""
        flush()
        os._exit(0)

    def _flip(self, action: Action) -> None:
        self.holdings.flip(action)

    def _announce(self, fault: Fault) -> None:
        self.link.send(FaultStruck(process=self.process, fault=fault))


def _open_shared_barrier(descriptor: str, world_size: int) -> SharedBarrier | None:
    """Memory that this process shares with the other workers of its host; None: gloo does without."""
    try:
        return SharedBarrier(int(descriptor), world_size)
    except (ValueError, OSError):
        return None


def connect() -> Runtime:
    """The runtime of this process, from the environment that the agent set."""
    private_dir = Path(os.environ["RELIGHT_PRIVATE_DIR"])
    return Runtime(read_settings(private_dir), private_dir)
