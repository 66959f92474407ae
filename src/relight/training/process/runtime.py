"""One worker's part in a job: it hears the controller's orders and brings the main thread to obey them.

Two threads meet here. The *link* thread receives orders and does only what must happen at once: close the
generation, break its connections, wake whoever waits. The *main* thread runs the script; where it may stand still
it calls `stand_still`, and everything a recovery does to the state is done there, by the thread that owns it.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.nn.modules import module as torch_module

from relight.core.events import (
    BitsDoubted,
    CollectiveFailed,
    FaultStruck,
    RestoreFailed,
    StandbyReady,
    StateDiffers,
    Stopped,
    WorkerNotice,
)
from relight.core.fault import Action, Fault, Point
from relight.core.position import Phase
from relight.core.worker.actions import Actions, CloseGeneration
from relight.core.worker.events import CollectiveBroke, Event, Ordered, StandbyWarm
from relight.device.choose import accelerator
from relight.device.placement import Placement
from relight.errors import RestoreError, StepInterrupted
from relight.training.collectives.generation_group import Forming, GenerationGroup, GenerationGroups
from relight.training.collectives.group import RelightProcessGroup
from relight.training.collectives.groups import GroupTable, Ranks
from relight.training.collectives.waits import Waits
from relight.training.connection.link import AgentLink
from relight.training.connection.page import PositionPage
from relight.training.connection.store import StoreClient
from relight.training.process.faults import Faults
from relight.training.process.holdings import Holdings, Lifecycle, NoHoldings
from relight.training.process.progress import Progress
from relight.training.torch_private.autograd import not_compiled
from relight.training.torch_private.mesh import regroup
from relight.transfer.restore.client import RestoreClient
from relight.transfer.restore.server import RestoreServer
from relight.transfer.restore.shared_fabric import SpareBuffer
from relight.wire.handshake import read_token
from relight.wire.messages import StoreLost, StoreReply
from relight.wire.settings import JobSettings, host_address, read_settings
from relight.wire.shared_barrier import SharedBarrier
from relight.wire.status import RestoreStatus
from relight.wire.tls import Tls

# An error in a collective nearly always precedes the Stop that explains it by milliseconds. Without a controller, it
# may take as long as the controller has to come back.
VERDICT_SECONDS = 30.0


class Superseded(Exception):
    """A newer Stop arrived while the main thread obeyed an older generation's orders."""


class Runtime:
    """See the module's docstring. Attributes without an underscore belong to the main thread unless noted."""

    def __init__(self, settings: JobSettings, private_dir: Path) -> None:
        environment = os.environ
        self.settings = settings
        self.process = environment["RELIGHT_PROCESS"]
        self.is_standby = environment["RELIGHT_ROLE"] == "standby"
        self.slot = int(environment["RELIGHT_SLOT"])
        self.world_size = settings.world_size
        self.rank = settings.world_size - 1 if self.is_standby else int(environment["RANK"])
        self.page = PositionPage(int(environment["RELIGHT_PAGE_FD"]), int(environment["RELIGHT_PAGE_OFFSET"]))
        self.shared_barrier = _open_shared_barrier(
            environment.get("RELIGHT_SHARED_BARRIER_FD", ""), settings.world_size
        )
        self.accelerator = accelerator()
        self.device = self.accelerator.device_of_slot(self.slot)
        self.placement = Placement(has_own_collectives=False, builds_late=False)  # `relight.init` decides
        self.worker = Progress(self.rank, is_standby=self.is_standby, cap=settings.stop_after)
        self.in_step = False  # inside `with step`
        self.has_begun = False  # a loop of steps was begun: a process can have one
        self.started = False  # the first step was offered; before that nothing is protected
        self.builds_late = False  # a standby of this job builds nothing before it knows which rank it takes
        self.guessed = False  # nobody said so
        self.waits = Waits()  # whether this rank waits for others, where ranks run different modules
        self.count_collective: Callable[[], None] = self.page.count_collective  # as its process groups ask (Gate)
        self.cut_collectives = 0
        # Operations that the script launched, buckets of DDP included, and sends and receives that it began to wait
        # for. To wait for a collective counts for nothing: `await_launched` has done so before the write.
        self.launches = 0
        self.holdings: Holdings = NoHoldings()  # of `Training`, once it is made
        self.lifecycle: Lifecycle | None = None  # of the loop of steps, once it is begun
        self.at_close: list[Callable[[], None]] = []  # to be called by the link's thread when a generation is closed
        self.at_rank_change: list[Callable[[int], None]] = []  # of the script: to be called when a standby takes a rank
        self.groups: list[RelightProcessGroup] = []  # the default group is the first
        self.table = GroupTable(settings.world_size)
        # Processes are named in the order in which they are started, the initial ranks first.
        standby_index = int(self.process.removeprefix("w")) - settings.world_size if self.is_standby else None
        self.faults = Faults(
            settings.plan, self.page, standby_index, self.break_connections, self._announce, self._flip
        )
        self._condition = threading.Condition()
        self._stop_arrived_ns = 0
        self._client: RestoreClient | None = None
        self._interrupt: Any = None
        self._said: set[str] = set()
        self.doubts: dict[str, BitsDoubted] = {}  # by reason; said again to an agent's successor
        self.doubts_of_job: tuple[str, ...] = ()  # those of all ranks, as of the newest recovery
        self._risk = (-1, "")  # the newest step after which a recovery makes this a doubt
        self._gathering, self._broken = False, ""  # why a collective broke in this generation, if one did
        self.token, self.tls = read_token(private_dir), Tls.from_environment()  # for connections between hosts
        self.server = RestoreServer(
            private_dir / f"restore-{self.process}.sock",
            lambda: self.faults.strike(Point.RESTORE_SEND),
            host_address=host_address(),
            token=self.token,
            tls=self.tls,
        )
        agent = environment["RELIGHT_AGENT_SOCKET"]
        self.link = AgentLink(agent, self.process, settings.agent_timeout_seconds, self)
        self.store = StoreClient(self.link)
        self.link.start()

    # --- the link thread (LinkListener) -----------------------------------------------------------------------
    def reconnected(self) -> None:
        """Send again what an agent that died may not have passed on; the link repeats the last report itself."""
        self.store.say_again(lost=False)
        for doubt in list(self.doubts.values()):
            self.link.send(doubt)
        if self._broken and not self.closed:
            self.report_broken_collective(self._broken)

    def receive(self, message: Any) -> None:
        if isinstance(message, StoreReply):
            self.store.reply(message)
            return
        if isinstance(message, StoreLost):
            self.store.say_again(lost=True)
            return
        with self._condition:
            for action in self.worker.handle(message):
                assert isinstance(action, CloseGeneration)
                self._stop_arrived_ns = time.monotonic_ns()
                self._close()
            self._condition.notify_all()

    # --- decisions (core/worker) ------------------------------------------------------------------------------
    @property
    def generation(self) -> int:
        """The generation in which the main thread works."""
        return self.worker.generation

    @property
    def closed(self) -> bool:
        """Whether a newer generation was opened: the link thread knows it first."""
        return self.worker.closed

    @property
    def lock(self) -> threading.Condition:
        """To be held where an order must not arrive in between."""
        return self._condition

    def handle(self, event: Event) -> Actions:
        """Hand an event in, while no order arrives."""
        with self._condition:
            return self.worker.handle(event)

    def await_ready(self) -> None:
        """Wait until an order is here that the worker waits for in its state."""
        with self._condition:
            self._condition.wait_for(lambda: self.worker.is_ready)

    def _close(self) -> None:
        """Stop: nothing of the older generation goes on. Holds the condition."""
        if self._interrupt is None:
            # Registered only now, so that an undisturbed forward pays nothing for it.
            self._interrupt = torch_module.register_module_forward_pre_hook(self._interrupt_forward)
        cancel = [] if self._client is None else [self._client.cancel]
        for call in (
            lambda: self.store.close_below(self.worker.newest),
            self.break_connections,
            *cancel,
            *self.at_close,
            lambda: self.server.withdraw(self.worker.newest),
        ):
            self._contained(call)

    def _contained(self, call: Callable[[], None]) -> None:
        """What goes wrong in there is told: without its link thread a worker obeys no order, and the job is lost."""
        try:
            call()
        except Exception as error:
            name = getattr(call, "__qualname__", repr(call))
            self.say(
                f"at close {name}",
                f"rank {self.rank}: {name} failed when a generation was closed ({type(error).__name__}: {error}). The "
                "recovery goes on; it may take longer. This is a bug in relight: please report it",
            )

    def break_connections(self) -> None:
        """Make collectives in flight fail at once."""
        for formed in self._generation_groups():
            formed.break_connections()

    def await_launched(self) -> None:
        """Returns once every collective that the script has launched, on any group, has its result.

        Whoever holds the work of one and waits for it later has it at once, also after a recovery. Sends and receives
        are not waited for. Raises RuntimeError or StepInterrupted as waiting for the operation would.
        """
        for formed in self._generation_groups():
            formed.await_launched()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Collectives complete at once, in this process alone; then they are what they were."""
        kept = [(group, group.formed) for group in self.groups]
        for group, _ in kept:
            group.formed = None
            group.detach()
        try:
            yield
        finally:
            for group, formed in kept:
                group.formed = formed

    def _generation_groups(self) -> list[GenerationGroup]:
        """Each formed group once, however many of the script's groups share it."""
        return list({id(group.formed): group.formed for group in self.groups if group.formed is not None}.values())

    @not_compiled
    def _interrupt_forward(self, module: torch.nn.Module, arguments: Any) -> None:  # noqa: ARG002
        if not self.started:  # a replacement that builds its modules after it was given its rank
            return
        if self.closed and self.is_protected() and threading.current_thread() is threading.main_thread():
            raise StepInterrupted("the generation was closed by a failure elsewhere")

    # --- what the process group asks (Gate) -------------------------------------------------------------------
    def is_protected(self) -> bool:
        return not self.started or (self.in_step and self.page.phase is not Phase.OPTIMIZER)

    def waited(self, nanoseconds: int) -> None:
        self.page.waited(nanoseconds)

    def synchronize(self) -> None:
        """Returns once the device has done all that was launched."""
        self.accelerator.synchronize(self.device)

    def runs_other_modules(self) -> None:
        """Ranks run different modules, so the number of their collectives says nothing about who is behind whom."""
        self.waits.show_on(self.page)
        self.count_collective = self.page.note_operation

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """Collectives in here follow the write, and are repeated after a recovery: nothing is lost if one is cut."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False

    def cut(self, operation: str) -> None:
        if self._gathering:
            return
        self.cut_collectives += 1
        where = "after the write" if self.in_step else "between two steps"
        if self.in_step:  # the step goes on with this value; a rank that has the right one may still be there
            self.worker.torn = True
        text = (
            f"{operation} {where} was cut short by a recovery; its result is this rank's own value. Put collectives "
            "inside `with step`, before optimizer.step(), where they are repeated"
        )
        if self.worker.torn:  # what was written is thrown away
            self.say("cut", f"rank {self.rank}: {text}")
        else:
            self.doubt(text)

    def unprotected(self, operation: str) -> None:
        if self.rank != 0 or self.is_standby or self._gathering:
            return
        if self.in_step and self.holdings.is_optimizer_at_work():
            self.say(
                "communicating optimizer",
                f"the optimizer calls {operation} in its step, behind the first write, where a recovery cannot repeat "
                "it: should a failure strike just there, what was written is worth nothing on any rank, and the job "
                "ends, or goes back to buddy memory or a checkpoint. Have it communicate before optimizer.step(), or "
                "take one that needs no other rank",
            )
        else:
            where = "after optimizer.step()" if self.in_step else "between two steps"
            self.say(
                "unprotected",
                f"the script calls {operation} {where}, where a recovery cannot repeat it: should a failure strike "
                "just there, each rank keeps its own value. Move it inside `with step`, before optimizer.step()",
            )

    def await_verdict(self, summary: str = "the connection to a peer was lost") -> bool:
        """A collective broke: wait for the Stop that explains it. False if the group is sound and none comes."""
        return self.closed or (self.is_broken() and self.await_stop(summary))

    def is_broken(self) -> bool:
        """Whether some peer's connection has ended."""
        return any(formed.is_broken() for formed in self._generation_groups())

    def await_stop(self, summary: str) -> bool:
        """Report a broken collective and wait for Stop. False if none comes."""
        if self.handle(CollectiveBroke()):
            self.report_broken_collective(summary)
        with self._condition:
            patience_seconds = VERDICT_SECONDS + self.settings.controller_timeout_seconds
            return self._condition.wait_for(lambda: self.closed, patience_seconds)

    def report_broken_collective(self, summary: str) -> None:
        self._broken = summary
        self.link.send(
            CollectiveFailed(
                process=self.process,
                rank=self.rank,
                generation=self.generation,
                step=self.faults.step,
                summary=summary,
                noticed_ns=time.monotonic_ns(),
            )
        )

    def await_replacement(self, version: int, digests: Sequence[int], tensors: Sequence[str]) -> None:
        """The ranks' states differ: say so, and wait until the controller has decided who is wrong."""
        self.link.send(
            StateDiffers(
                process=self.process,
                rank=self.rank,
                generation=self.generation,
                step=version,
                digests=tuple(digests),
                tensors=tuple(tensors),
                noticed_ns=time.monotonic_ns(),
            )
        )
        with self._condition:
            self._condition.wait_for(lambda: self.closed)

    def _flip(self, action: Action) -> None:
        self.holdings.flip(action)

    def _announce(self, fault: Fault) -> None:
        self.link.send(FaultStruck(process=self.process, fault=fault))

    def say(self, key: str, text: str) -> None:
        """Tell the user once."""
        if key not in self._said:
            self._said.add(key)
            self.link.send(WorkerNotice(process=self.process, rank=self.rank, text=text))

    def doubt(self, reason: str, step: int | None = None) -> None:
        """Say, once for each reason, that relight cannot vouch for the bits of an undisturbed run from here on.

        To be called where a failure has struck, and on every rank that knows of it: one may be lost.
        """
        if reason in self.doubts:
            return
        step = max(0, self.faults.step if step is None else step)
        doubt = self.doubts[reason] = BitsDoubted(process=self.process, rank=self.rank, step=step, reason=reason)
        self.link.send(doubt)

    def doubt_if_lost_after(self, step: int, reason: str) -> None:
        """The same, if a recovery goes back to where this step has just ended, or before that."""
        self._risk = step, reason

    def note_recovery(self, version: int) -> None:
        """All ranks go on from `version`."""
        if reason := self.holdings.standing_risk():
            self.doubt(reason)
        step, reason = self._risk
        if step >= version - 1 >= 0:
            self.doubt(reason)

    def leave(self) -> NoReturn:
        """Asked to, between two steps: another process takes this rank, and finds its private state beside the page."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    # --- orders, on the main thread ---------------------------------------------------------------------------
    def stand_by(self, layout_digest: str) -> None:
        """A standby: report that it is warm, and wait for a rank, which this process has from now on.

        `layout_digest` is of what it has built; empty if it builds nothing before.
        """
        self.page.stamp(Phase.STANDBY)
        self.handle(StandbyWarm())
        self.link.send(StandbyReady(process=self.process, layout_digest=layout_digest), report=True)
        self.faults.strike(Point.IDLE)
        self.await_assignment()
        self.faults.recovery = self.worker.generation - 1

    def await_assignment(self) -> None:
        """Wait for a rank, and become it."""
        self.await_ready()
        self.handle(Ordered())
        self.take_assignment(self.worker.generation, self.worker.rank)

    def take_assignment(self, generation: int, rank: int) -> None:
        self.rank = rank
        for group in self.groups:
            group.ranks = self.table.acting(group.place, group.built_as, rank)
            regroup(group, group.ranks)
        self.worker.rank, self.worker.generation = rank, generation
        self.page.put("rank", rank)
        self.page.put("generation", generation)
        os.environ["RANK"], os.environ["LOCAL_RANK"] = str(rank), str(self.local_rank)
        self.faults.rank = rank

    def note_skip(self) -> None:
        """An operation was skipped on a group that this process is no member of."""
        if self.is_standby:
            self.table.skips = True

    @property
    def local_rank(self) -> int:
        """The rank on its node, as ranks are laid out at the start."""
        return self.rank % self.local_world_size

    @property
    def local_world_size(self) -> int:
        """The number of ranks on a node at the start."""
        return max(1, self.world_size // self.settings.nodes)

    def report_status(self) -> None:
        """Report what is in hand, as a basis of the decision."""
        status = self.worker.status()
        self.page.stamp(Phase.PARKED)
        self.faults.recovery = status.generation - 1
        self.faults.strike(Point.STOP)
        self.page.put("generation", status.generation)
        self.page.put("collectives", 0)
        arrived = self._stop_arrived_ns
        self.link.send(
            Stopped(
                process=self.process,
                rank=self.rank,
                generation=status.generation,
                step=status.step,
                version=status.version,
                lineage=status.lineage,
                prepared=status.prepared,
                torn=status.torn,
                blank=status.blank,
                stop_seconds=(time.monotonic_ns() - arrived) / 1e9 if arrived else 0.0,
                derivable=self.holdings.is_derivable(),
                restore_address=self.server.address.path,
                restore_endpoint=self.server.address.endpoint,
                snapshots=self.holdings.kept_snapshots(),
                checkpoints=self.holdings.readable_checkpoints(),
                agreed=status.agreed,
                wrote=status.wrote,
            ),
            report=True,
        )

    def begin_forming(self, generation: int, groups: Sequence[Ranks]) -> Forming:
        """Form groups of a generation, on a thread of its own."""
        self.faults.strike(Point.REFORM)
        device = self.device if self.placement.has_own_collectives else None
        return Forming(self.store, generation, groups, self.rank, device, self.waits, self.shared_barrier)

    def await_formed(self, forming: Forming, generation: int) -> GenerationGroups:
        """The formed groups. Raises Superseded if the generation is closed first, RestoreError if forming failed."""
        forming.result.add_done_callback(lambda _: self._notify())
        with self._condition:
            self._condition.wait_for(lambda: forming.result.done() or self.worker.newest > generation)
            if self.worker.newest > generation:
                raise Superseded
        try:
            return forming.result.result()
        except Exception as error:
            raise RestoreError(f"the new process groups could not be formed: {error}") from error

    def is_current(self, generation: int) -> bool:
        """Whether no newer Stop has arrived."""
        with self._condition:
            return self.worker.newest <= generation

    def _notify(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def fetcher(self, generation: int) -> RestoreClient:
        """A client that is cancelled when the generation is closed."""

        def tell(copied_bytes: int, total_bytes: int, seconds: float) -> None:
            self.link.send(
                RestoreStatus(
                    process=self.process,
                    rank=self.rank,
                    generation=generation,
                    copied_bytes=copied_bytes,
                    total_bytes=total_bytes,
                    seconds=seconds,
                )
            )

        client = RestoreClient(
            lambda: self.faults.strike(Point.RESTORE_RECEIVE),
            self.settings.restore_timeout_seconds,
            self.token,
            tell,
            self.tls,
        )
        with self._condition:
            self._client = client
            if self.worker.newest > generation:
                client.cancel()
        return client

    def background_fetcher(self, spare: SpareBuffer) -> RestoreClient:
        """A client for what is no part of a recovery. Whoever asks for it must cancel it (`at_close`)."""
        seconds = self.settings.restore_timeout_seconds
        return RestoreClient(lambda: None, seconds, self.token, tls=self.tls, spare=spare)

    def report_restore_failure(self, generation: int, evidence: str) -> None:
        failed = RestoreFailed(process=self.process, generation=generation, evidence=evidence, culprit="")
        self.link.send(failed, report=True)

    def open_generation(self, generation_groups: GenerationGroups) -> None:
        """Resume: collectives go through the new groups. To be called with the lock held."""
        for group in self.groups:
            if group.has_member:
                group.attach(generation_groups[group.ranks])
        self.waits.forget()
        self._broken = ""
        self._client = None
        if self._interrupt is not None:
            self._interrupt.remove()
            self._interrupt = None


def _open_shared_barrier(descriptor: str, world_size: int) -> SharedBarrier | None:
    """What this process shares with the other workers of its host; None: gloo does without."""
    try:
        return SharedBarrier(int(descriptor), world_size)
    except (ValueError, OSError):
        return None


def connect() -> Runtime:
    """The runtime of this process, from the environment that the agent set."""
    private_dir = Path(os.environ["RELIGHT_PRIVATE_DIR"])
    return Runtime(read_settings(private_dir), private_dir)
