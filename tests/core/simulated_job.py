"""A whole job in virtual time around the production controller: workers, standbys, one agent, and faults.

Deterministic: a `Schedule` decides everything. Events reach the controller in random order, but those of one
process in their own; so do orders on their way to a process.
"""

from collections.abc import Callable
from functools import partial

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
    Spawn,
    Stop,
    WorkerCommand,
)
from relight.core.controller import Controller, ControllerSettings
from relight.core.fault import Action
from relight.core.position import IN_STEP, Phase
from tests.core.simulated_checker import Checker
from tests.core.simulated_clock import Clock, Violation
from tests.core.simulated_group import Group, Rendezvous
from tests.core.simulated_schedule import ControllerDeath, PlannedFault, Schedule
from tests.core.simulated_worker import Worker

MAX_EVENTS = 20_000
HANG_SECONDS = 30.0
_QUIET_POINTS = ("START", "IDLE", "DONE", "RELEASED", "RAISED", "FAILED")  # a loop there is no hang that anyone notices
# What an agent says until it is confirmed; deadlines, suspicions and shutdowns are the controller's own.
_REPORTED = (
    *(ev.ProcessStarted, ev.ProcessDying, ev.ProcessExited, ev.TrainingEntered, ev.StandbyReady, ev.Stopped),
    *(ev.Restored, ev.RestoreFailed, ev.StepResumed, ev.WorkerFailed, ev.CollectiveFailed, ev.TrainingDone),
)
MakeController = Callable[[ControllerSettings], Controller]


class JournalEntry(msgspec.Struct, frozen=True):
    """What the controller was told (None: that its deadline has passed), and what it ordered."""

    now: float
    event: ev.Event | None
    commands: tuple[Command, ...]


class SimulatedJob:
    """Run it once. Raises Violation, with the schedule and the trace, if an invariant breaks."""

    def __init__(
        self,
        schedule: Schedule,
        make_controller: MakeController = Controller,
        worker_kind: type[Worker] = Worker,
    ) -> None:
        self.schedule = schedule
        self.world_size = schedule.world_size
        self.until = schedule.until
        self.clock = Clock(schedule.seed)
        self.settings = ControllerSettings(world_size=schedule.world_size, standbys=schedule.standbys)
        self.controller = make_controller(self.settings)
        self.journal: list[JournalEntry] = []
        self.end: EndJob | None = None
        self.struck = 0
        self._worker_kind = worker_kind
        self._workers: dict[str, Worker] = {}
        self._checker = Checker(schedule.world_size, schedule.until, self._workers)
        self._store_generation = 0
        self._rendezvous: dict[int, Rendezvous] = {}
        self._first_groups: dict[int, Group] = {}
        self._up: dict[str, float] = {}  # when the newest message of a process arrives: the next one comes later
        self._down: dict[str, float] = {}
        self._happened = 0
        self._points: dict[str, int] = {}
        self._pending = list(schedule.faults)
        self._trace: list[tuple[float, str, object]] = []
        self._make_controller = make_controller
        self._deaths = list(schedule.controller_deaths)
        self._away = False  # there is no controller
        self._unheard: list[ev.Event] = []  # what agents keep for it meanwhile
        self._life = 0
        self._lost_after: dict[tuple[int, str], float] = {}  # orders of a dead controller that arrive later do not

    # --- the run ------------------------------------------------------------------------------------------------
    def run(self) -> EndJob:
        try:
            self._feed(ev.AgentJoined(agent="node-0", slots=self.world_size))
            while self.end is None:
                self._advance()
            self._checker.final(self.end, self._names_of_ranks(), self.controller.report())
        except Violation as violation:
            raise Violation(f"{violation}\n{self.explain()}") from None
        return self.end

    def explain(self, lines: int = 400) -> str:
        """The schedule, for `decode_schedule`, and what happened."""
        trace = [f"{now:9.4f}  {what:8}  {_show(thing)}" for now, what, thing in self._trace]
        return "\n".join([f"schedule: {self.schedule.describe()}", *trace[-lines:]])

    def _advance(self) -> None:
        due, deadline = self.clock.next_time(), None if self._away else self.controller.next_deadline()
        if due is None and deadline is None:
            raise Violation(f"stuck: nothing will ever happen again, in stage {self.controller.stage}")
        if due is not None and (deadline is None or due <= deadline):
            self.clock.run_next()
        else:
            assert deadline is not None
            self.clock.now = max(self.clock.now, deadline)
            self._obey(None, self.controller.expire(self.clock.now))
        self._count_event()

    def _count_event(self) -> None:
        self._happened += 1
        if self._happened > MAX_EVENTS:
            raise Violation(f"no end after {MAX_EVENTS} events, in stage {self.controller.stage}")
        if self._pending:
            for fault in [f for f in self._pending if not f.point and f.nth <= self._happened]:
                self._strike_someone(fault)
        if self._happened in self.schedule.agent_restarts:
            self._repeat_reports()
        if self._happened in self.schedule.stalls:
            self.struck += 1
            self._feed(ev.CommunicationStalled(evidence="nobody progresses", step=0, noticed_ns=1))

    # --- controller ---------------------------------------------------------------------------------------------
    def _feed(self, event: ev.Event) -> None:
        if self._away:
            self._unheard.append(event)
        elif self.end is None:
            self._trace.append((self.clock.now, "event", event))
            self._obey(event, self.controller.handle(event, self.clock.now))

    def _obey(self, event: ev.Event | None, commands: tuple[Command, ...]) -> None:
        self.journal.append(JournalEntry(self.clock.now, event, commands))
        self.controller.check()
        death = next((death for death in self._deaths if death.entries == len(self.journal)), None)
        for command in commands if death is None else commands[: death.sent]:
            self._trace.append((self.clock.now, "command", command))
            self._carry_out(command)
        if death is not None and self.end is None:
            self._lose_controller(death)

    def _lose_controller(self, death: ControllerDeath) -> None:
        """Some of its last orders never arrive, and what it had not confirmed is reported once more."""
        self._trace.append((self.clock.now, "FAULT", f"the controller dies: {death}"))
        self._deaths.remove(death)
        for process in sorted(self._workers):
            if self.clock.coin():
                self._lost_after[self._life, process] = self.clock.now + self.clock.between(0.0, 0.004)
        self._life += 1
        self._away = True
        said = [entry.event for entry in self.journal if isinstance(entry.event, _REPORTED)]
        self._unheard[:0] = said[max(0, len(said) - death.repeated) :]
        self.clock.after(death.away_seconds, self._restart_controller)

    def _restart_controller(self) -> None:
        self.controller = self._make_controller(self.settings)
        for entry in self.journal:
            if entry.event is None:
                self.controller.expire(entry.now)
            else:
                self.controller.handle(entry.event, entry.now)
        self._away = False
        if self.controller.ended is not None:
            self.end = self.controller.ended
            return
        self._trace.append((self.clock.now, "event", ev.ControllerRestarted()))
        self._obey(ev.ControllerRestarted(), self.controller.handle(ev.ControllerRestarted(), self.clock.now))
        for _, worker in sorted(self._workers.items()):  # the detector is a new one too
            self.clock.after(self.clock.between(1.0, 2.0), partial(self._notice_frozen, worker))
            if worker.hung:
                self.clock.after(HANG_SECONDS, partial(self._notice_hang, worker))
        while self._unheard and not self._away:
            self._feed(self._unheard.pop(0))

    def _carry_out(self, command: Command) -> None:
        """As the server does: audiences are looked up when the order goes out."""
        ranks = self._names_of_ranks()
        self._checker.commanded(command, ranks, self.controller.generation)
        match command:
            case Spawn():
                self._tell(command.process, partial(self._start, command))
            case Kill():
                self._tell(command.process, partial(self._kill, command.process))
            case Assign():
                self._store_generation = max(self._store_generation, command.generation)
                self._order((command.process,), command)
            case Begin() | Stop():
                self._store_generation = max(self._store_generation, command.generation)
                self._order(self.controller.audience(command.audience), command)
            case Restore():
                self._hand_over_private_state(command)
                self._order(self.controller.audience(command.audience), command)
            case Resume() | Release():
                self._order(self.controller.audience(command.audience), command)
            case EndJob():
                self.end = command
            case Notice():
                pass

    def _names_of_ranks(self) -> tuple[str, ...]:
        return tuple(self.controller.rank_processes().values())

    def _hand_over_private_state(self, restore: Restore) -> None:
        holders = self.controller.rank_processes()
        for rank in restore.targets:
            for source in self.controller.predecessors.get(rank, ()):
                self._tell(holders[rank], partial(self._copy_private, source, holders[rank], restore.target))

    # --- agent --------------------------------------------------------------------------------------------------
    def _latency(self) -> float:
        if self.clock.coin(self.schedule.slow_messages):
            return self.clock.between(0.02, 1.0)
        return self.clock.between(0.0002, 0.004)

    def _tell(self, process: str, action: Callable[[], None]) -> None:
        arrives = max(self._down.get(process, 0.0), self.clock.now + self._latency())
        self._down[process] = arrives
        life = self._life

        def arrive() -> None:
            if life == self._life or self.clock.now <= self._lost_after.get((life, process), self.clock.now):
                action()

        self.clock.at(arrives, arrive)

    def _order(self, processes: tuple[str, ...], command: WorkerCommand) -> None:
        for process in processes:
            self._tell(process, partial(self._deliver, process, command))

    def _deliver(self, process: str, command: WorkerCommand) -> None:
        worker = self._workers.get(process)
        if worker is not None and worker.alive:
            worker.receive(command)

    def _start(self, spawn: Spawn) -> None:
        if spawn.process in self._workers:
            return  # ordered again
        worker = self._workers[spawn.process] = self._worker_kind(self, spawn.process, spawn.rank)
        self.send(worker, ev.ProcessStarted(process=spawn.process, pid=1))
        worker.begin()

    def _kill(self, process: str) -> None:
        if process in self._workers:
            self._workers[process].die(-9)

    def _copy_private(self, source: str, target: str, version: int) -> None:
        payload = self._workers[source].page.read_private(version)
        if payload is not None:
            self._workers[target].page.slots[version % 2] = (version, payload)

    def _repeat_reports(self) -> None:
        """The agent was restarted: every worker says its last report again (training/link.py)."""
        self._trace.append((self.clock.now, "agent", "is restarted"))
        for worker in list(self._workers.values()):
            if worker.alive and not worker.frozen:
                self.send(worker, ev.ProcessStarted(process=worker.name, pid=1))
                if worker.last_report is not None:
                    self.send(worker, worker.last_report)

    # --- what workers need (simulated_worker.World) -------------------------------------------------------------
    def send(self, worker: Worker, event: ev.Event) -> None:
        arrives = max(self._up.get(worker.name, 0.0), self.clock.now + self._latency())
        self._up[worker.name] = arrives
        self.clock.at(arrives, partial(self._feed, event))

    def find(self, name: str) -> Worker | None:
        return self._workers.get(name)

    def first_group(self, generation: int) -> Group:
        return self._first_groups.setdefault(generation, Group(self.clock, generation, self.world_size))

    def rendezvous(self, generation: int) -> Rendezvous | None:
        if generation != self._store_generation:
            return None
        return self._rendezvous.setdefault(generation, Rendezvous(self.clock, generation, self.world_size))

    def ended(self, worker: Worker, status: int) -> None:
        self._trace.append((self.clock.now, "exit", f"{worker.name} (rank {worker.rank}) {status}"))
        freed = self.clock.between(0.0005, 0.01)
        if self.clock.coin(self.schedule.seen_dying):
            self.clock.after(freed, partial(self._report_dying, worker))
            freed += self.clock.between(0.0, 0.5)
        self.clock.after(freed, partial(self._report_exit, worker, status))

    def _report_dying(self, worker: Worker) -> None:
        self.send(worker, ev.ProcessDying(process=worker.name, position=worker.page.position(), noticed_ns=1))

    def _report_exit(self, worker: Worker, status: int) -> None:
        evidence = "was killed by SIGKILL" if status < 0 else f"exited with status {status}"
        self.send(
            worker,
            ev.ProcessExited(
                process=worker.name,
                exit_status=status,
                evidence=evidence,
                position=worker.page.position(),
                noticed_ns=1,
            ),
        )

    def entered_step(self, worker: Worker) -> None:
        self._checker.entered_step(worker)

    def committed(self, worker: Worker) -> None:
        self._trace.append((self.clock.now, "commit", f"{worker.name} (rank {worker.rank}) {worker.state.version}"))
        self._checker.committed(worker)

    def overwrites(self, worker: Worker) -> None:
        self._checker.overwrites(worker)

    # --- faults -------------------------------------------------------------------------------------------------
    def at_point(self, worker: Worker, point: str) -> None:
        count = self._points[point] = self._points.get(point, 0) + 1
        if self._pending:
            for fault in [f for f in self._pending if f.point == point and f.nth == count]:
                self._strike(fault, worker)

    def _strike_someone(self, fault: PlannedFault) -> None:
        living = [self._workers[name] for name in sorted(self._workers) if self._workers[name].alive]
        if living:
            self._strike(fault, living[fault.pick % len(living)])

    def _strike(self, fault: PlannedFault, worker: Worker) -> None:
        self._pending.remove(fault)
        if not worker.alive or worker.frozen or worker.hung:
            return
        action = self._possible(fault.action, worker)
        self._trace.append((self.clock.now, "FAULT", f"{action} {worker.name} (rank {worker.rank}) in {worker.point}"))
        self._checker.struck(action, worker, worker.point)
        worker.struck = True
        self.struck += 1
        match action:
            case Action.FREEZE:
                self._freeze(worker, fault.thaw_seconds)
            case Action.LOOP:
                worker.hung = True
                worker.frozen = fault.holds_lock
                self.clock.after(HANG_SECONDS, partial(self._notice_hang, worker))
            case Action.RAISE:
                worker.raise_in_script(f"ValueError: number {self.struck}")
            case Action.EXIT:
                worker.die(self.struck - 1)
            case Action.CUT:
                worker.cut()
            case _:
                worker.die(-9)

    def _possible(self, action: Action, worker: Worker) -> Action:
        """The script can raise only where it runs, and an endless loop is a hang only where somebody waits."""
        runs = worker.page.phase in IN_STEP or worker.page.phase in (Phase.OUTSIDE, Phase.STARTING)
        if action is Action.RAISE and (not runs or worker.point in _QUIET_POINTS):
            return Action.KILL
        if action is Action.LOOP and worker.point in _QUIET_POINTS:
            return Action.KILL
        return action

    def _freeze(self, worker: Worker, thaw_seconds: float) -> None:
        worker.freeze()
        self.clock.after(self.clock.between(1.0, 2.0), partial(self._notice_frozen, worker))
        if thaw_seconds:
            self.clock.after(thaw_seconds, worker.thaw)

    def _notice_frozen(self, worker: Worker) -> None:
        if worker.alive and worker.frozen:
            self._suspect(worker, "frozen")

    def _notice_hang(self, worker: Worker) -> None:
        """core/detector.py, roughly: parked processes are judged only once their peers train."""
        if not worker.alive or self.end is not None:
            return
        stage = self.controller.stage
        if worker.page.phase in IN_STEP or worker.page.phase is Phase.OUTSIDE or stage in ("training", "finishing"):
            self._suspect(worker, "hang")
        else:
            self.clock.after(HANG_SECONDS, partial(self._notice_hang, worker))

    def _suspect(self, worker: Worker, kind: str) -> None:
        self._feed(
            ev.ProcessSuspected(
                process=worker.name, kind=kind, evidence=kind, position=worker.page.position(), noticed_ns=1
            )
        )


def run_schedule(schedule: Schedule, make_controller: MakeController = Controller) -> SimulatedJob:
    """Run a schedule to its end; returns the job for a closer look."""
    job = SimulatedJob(schedule, make_controller)
    job.run()
    return job


def _show(thing: object) -> str:
    if not isinstance(thing, msgspec.Struct):
        return str(thing)
    hidden = ("progress", "position", "sources", "stop_seconds", "restore_address", "noticed_ns", "traceback")
    fields = {name: getattr(thing, name) for name in thing.__struct_fields__ if name not in hidden}
    return f"{type(thing).__name__} " + " ".join(f"{name}={value}" for name, value in fields.items())
