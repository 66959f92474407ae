"""Carries out the core's commands: each becomes messages to agents, a change of the store, or a line for people."""

from relight.core.protocol import commands as cmd
from relight.core.protocol.commands import WorkerCommand
from relight.server.job.job import Job
from relight.server.job.job_end import JobEnd
from relight.server.job.private_state import PrivateStates
from relight.server.job.report_files import ReportFiles
from relight.server.supply.supplier import Supplier
from relight.wire.messages import DrainAnswer


class Orders:
    """Knows the addressee of each command."""

    def __init__(
        self, job: Job, private: PrivateStates, reports: ReportFiles, end: JobEnd, supplier: Supplier | None
    ) -> None:
        self._job = job
        self._private = private
        self._reports = reports
        self._end = end
        self._supplier = supplier

    def carry_out(self, command: cmd.Command) -> None:
        """Send the messages that `command` asks for."""
        match command:
            case cmd.Spawn():
                self._job.agents.spawn(command)
            case cmd.Kill():
                self._job.agents.kill(command)
            case cmd.Assign():
                self._job.store.open(command.generation)
                self._job.agents.order((command.process,), command)
            case cmd.Begin() | cmd.Stop():
                if isinstance(command, cmd.Begin):
                    self._reports.write_coverage()
                self._job.store.open(command.generation)
                self._order_members(command)
            case cmd.Restore():
                self._private.hand_over(command)
                self._order_members(command)
            case cmd.Resume():
                self._order_members(command)
                self._job.agents.forget_dead()
            case cmd.Save():
                self._private.collect(command)
                self._order_members(command)
            case cmd.WindDown() | cmd.Release():
                self._order_members(command)
            case cmd.ReleaseHost():
                self._job.agents.release(command)
                self._job.observers.send(
                    DrainAnswer(host=command.agent, why=command.why, refused=False, faulty=command.faulty)
                )
            case cmd.RefuseDrain():
                self._job.observers.send(DrainAnswer(host=command.agent, why=command.why, refused=True))
            case cmd.OrderHost():
                if self._supplier is not None:
                    self._supplier.order(command)
            case cmd.CancelHost():
                if self._supplier is not None:
                    self._supplier.cancel(command)
            case cmd.Notice():
                self._job.observers.tell(command.level, command.why)
            case cmd.EndJob():
                self._end.begin(command)

    def _order_members(self, command: WorkerCommand) -> None:
        self._job.agents.order(self._job.core.rank_processes().values(), command)
