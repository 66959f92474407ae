"""training/process/runtime.py: the thread that hears orders, standing still, and what a fault does to a process."""

from relight.core import events as ev
from relight.core.commands import Assign, Stop, WorkerCommand
from relight.core.position import Phase
from relight.sim.model.process.process import Process


class Runtime(Process):
    """What goes on beside the main thread, and where that says that it stands."""

    __slots__ = ()

    # --- what a fault does --------------------------------------------------------------------------------------
    def die(self, status: int) -> None:
        """The process ends, for whatever reason."""
        if not self.alive:
            return
        self.alive = False
        self.ticket += 1
        self._break_connections()
        self._leave_meeting()
        self.offer = None
        self.world.offered(self)
        self.world.ended(self, status)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True

    def thaw(self) -> None:
        """SIGCONT: first the link thread reads what has come meanwhile."""
        if not self.alive or not self.frozen:
            return
        self.frozen = False
        unread, self.unread = self.unread, []
        for message in unread:
            self.receive(message)
        if self.resume_on_thaw:
            self.resume_on_thaw = False
            self.world.plan_step(self)
        self.world.offered(self)

    def raise_in_script(self, summary: str) -> None:
        """bootstrap.py: report, then leave; or stay, if a last checkpoint may need what is here."""
        stands = self._stays()
        self._report(
            ev.WorkerFailed(
                process=self.name,
                rank=self.rank,
                kind="exception",
                step=self.page.step,
                phase=self.page.phase.name,
                summary=summary,
                traceback=f"Traceback ...\n{summary}",
                noticed_ns=1,
                stands=stands,
            ),
        )
        self.prepared = -1
        self._go_to("STAYS" if stands else "RAISED")

    def _stays(self) -> bool:
        """Once training began here; a process that is still being restored, or that was in a write, has nothing."""
        trains = not (self.blank or self.page.torn) and self.point not in ("LOADING", "WARMUP")
        return trains and self.lower is not None and bool(self.lower.checkpoint_every)

    def _exit_failed(self) -> None:
        self.die(1)

    def cut(self) -> None:
        """Lose all connections, and live."""
        self._break_connections()

    # --- link thread --------------------------------------------------------------------------------------------
    def receive(self, message: WorkerCommand) -> None:
        """Runtime._receive."""
        if not self.alive:
            return
        if self.frozen:
            self.unread.append(message)
            return
        if isinstance(message, Stop):
            if message.generation <= self.newest:
                return
            self.newest = message.generation
            self._close()
        elif isinstance(message, Assign):
            self.newest = max(self.newest, message.generation)
            self.orders[Assign] = message
        elif message.generation >= self.newest:
            self.orders[type(message)] = message
        self.poke()

    def _close(self) -> None:
        self.closed = True
        self._break_connections()
        self._leave_meeting()
        if self.copying is not None and not self.copying.over:
            self.copying.failed = "cancelled"
        if self.offer is not None and self.offer[0] < self.newest:
            self.offer = None
        self.world.offered(self)

    def _break_connections(self) -> None:
        if self.group_generation:
            self.world.left(self.world.group(self.group_generation), self.rank)

    def _leave_meeting(self) -> None:
        if self.meeting_generation:
            meeting = self.world.rendezvous(self.meeting_generation)
            if meeting is not None and self.rank in meeting.present:
                meeting.absent.add(self.rank)
                self.world.left(meeting.group, self.rank)

    def _report(self, event: ev.Event) -> None:
        self.last_report = event
        self.world.send(self, event)

    # --- main thread ----------------------------------------------------------------------------------------------
    def _await_stop(self) -> None:
        """Runtime.await_stop: a collective broke; the Stop that explains it is here, or on its way."""
        if self.closed:
            self._recover()
            return
        self._go_to("VERDICT")
        self.say_again()

    def say_again(self) -> None:
        """Runtime.report_broken_collective; also to an agent that was restarted, as Runtime._say_again does."""
        if self.point == "VERDICT" and not self.closed:
            self.world.send(
                self,
                ev.CollectiveFailed(
                    process=self.name,
                    rank=self.rank,
                    generation=self.generation,
                    step=self.state.version,
                    summary="connection reset",
                    noticed_ns=1,
                ),
            )

    def _recover(self, *, torn: bool = False) -> None:
        """Recovery.run: obey the order in hand if it is still the newest, else say where this rank stands."""
        if self.restore is not None and self.newest <= self.restore.generation:
            self._stamp(Phase.PARKED)
            self._go_to("OBEY")
            return
        self.restore = None
        self.page.torn = torn or (self.page.torn and self.holds_nothing)
        self._stamp(Phase.PARKED)
        self.stop_seen = self.newest
        self._go_to("STOP")

    def _stand_still(self) -> None:
        """Runtime.report_standing."""
        generation = self.stop_seen
        self.page.generation = generation
        self.page.collectives = 0
        self._report(
            ev.Stopped(
                process=self.name,
                rank=self.rank,
                generation=generation,
                step=self.started,
                version=self.state.version,
                lineage=self.state.lineage,
                prepared=self.prepared if self.prepared == self.state.version else -1,
                torn=self.page.torn and not self.blank,
                blank=self.blank,
                stop_seconds=0.0,
                derivable=self.world.derivable,
                restore_address=self.name,
                snapshots=self.lower.held() if self.lower is not None else (),
                checkpoints=self.lower.checkpoints() if self.lower is not None else (),
                agreed=self.agreed,
            )
        )
        self.standing_in = generation
        self._go_to("PARKED")
