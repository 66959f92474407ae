"""Carries out the core's commands: each becomes messages to agents, a change of the store, or a line for people."""

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
    WindDown,
)
from relight.core.controller import Controller
from relight.server.agents import Agents
from relight.server.job_end import JobEnd
from relight.server.observers import Observers
from relight.server.private_state import PrivateStates
from relight.server.report_files import ReportFiles
from relight.server.store import Store


class Orders:
    """Knows the addressee of each command."""

    def __init__(
        self,
        core: Controller,
        agents: Agents,
        store: Store,
        observers: Observers,
        private: PrivateStates,
        reports: ReportFiles,
        end: JobEnd,
    ) -> None:
        self._core = core
        self._agents = agents
        self._store = store
        self._observers = observers
        self._private = private
        self._reports = reports
        self._end = end

    def carry_out(self, command: Command) -> None:
        """Send the messages that `command` asks for."""
        match command:
            case Spawn():
                self._agents.spawn(command)
            case Kill():
                self._agents.kill(command)
            case Assign():
                self._store.open(command.generation)
                self._agents.order((command.process,), command)
            case Begin() | Stop():
                if isinstance(command, Begin):
                    self._reports.write_coverage()
                self._store.open(command.generation)
                self._agents.order(self._core.audience(command.audience), command)
            case Restore():
                self._private.hand_over(command)
                self._agents.order(self._core.audience(command.audience), command)
            case Resume():
                self._agents.order(self._core.audience(command.audience), command)
                self._agents.forget_dead()
            case Save():
                self._private.collect(command)
                self._agents.order(self._core.audience(command.audience), command)
            case WindDown() | Release():
                self._agents.order(self._core.audience(command.audience), command)
            case Notice():
                self._observers.tell(command.level, command.why)
            case EndJob():
                self._end.begin(command)
