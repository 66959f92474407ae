"""The agent of one node: composes the session with the controller, the host's processes, and the sampler."""

import asyncio
import secrets
import signal
from collections.abc import Callable

import msgspec

from relight.agent.connection.session import ControllerSession
from relight.agent.decisions.host import ORDERS
from relight.agent.decisions.session import Session
from relight.agent.gpu_watch import GpuWatch
from relight.agent.processes.output import Printer
from relight.agent.processes.process import Launch
from relight.agent.processes.process_table import ProcessTable
from relight.agent.sampler import Sampler
from relight.agent.traces import TraceReporter
from relight.agent.workers import Workers
from relight.wire.connection.keepalive import control_keepalive
from relight.wire.connection.tls import Tls
from relight.wire.messages import Pace, ToWorkers
from relight.wire.settings import CONTROLLER_LOST
from relight.wire.versions import installed_versions

FLUSH_SECONDS = 2.0


class Agent:
    """Runs what the controller orders, until the controller or a signal ends it."""

    def __init__(
        self,
        name: str,
        launch: Launch,
        token: bytes,
        find_controller: Callable[[], tuple[str, int]],
        *,
        take_over: bool,
        spare: bool = False,
        machine: str = "",
        tls: Tls | None = None,
        server_name: Callable[[tuple[str, int]], str] = lambda address: address[0],
    ) -> None:
        """`find_controller` gives the controller's address, which may change when it is restarted.

        `take_over`: continue where a dead predecessor stopped. `spare`: this host is none of the nodes that the job
        starts on. `machine`: the cluster's name for it. `tls`, `server_name` (for an address): see
        ControllerConnection.connect. Raises UsageError if another agent of this name is running, OSError if the socket
        cannot be made.
        """
        self._name = name
        self._seconds = launch.settings.controller_timeout_seconds
        self._printer = Printer(launch.settings.run_dir)
        self._session = ControllerSession(
            Session(
                name,
                launch.slots,
                secrets.token_hex(8),
                self._seconds,
                spare=spare,
                machine=machine,
                versions=installed_versions(),
            ),
            *(token, launch.settings.nodes, find_controller, self._say),
            tls=tls,
            server_name=server_name,
            keepalive=control_keepalive(launch.settings.agent_timeout_seconds),
        )
        table = ProcessTable(launch.private_dir / f"agent-{name}.pids", keep=take_over)
        traces = TraceReporter(self._session)
        self._workers = Workers(launch, table, self._session, traces, self._printer, self._say)
        self._sampler = Sampler(self._workers, self._session, traces)

    async def run(self, told_to_end: asyncio.Event) -> int:
        """Serve until the controller ends the agent, or `told_to_end` is set; return the exit status."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._sampler.wake)
        GpuWatch(self._name, self._session).start()
        serving = asyncio.create_task(self._serve())
        ending = asyncio.create_task(told_to_end.wait())
        try:
            await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
            return serving.result() if serving.done() else 0
        finally:
            serving.cancel()
            await self._workers.end()
            await self._session.close()
            self._workers.close()
            self._printer.flush(FLUSH_SECONDS)

    async def _serve(self) -> int:
        """Serve until the controller orders the agent to stop, or none is left to order anything."""
        await self._workers.preload()
        given_up = await self._session.connect(self._workers.names)
        while not given_up:
            async with asyncio.TaskGroup() as group:
                works = (self._sampler.run(), self._session.leave_for_another())
                watching = [group.create_task(work) for work in works]
                evidence = await self._session.receive_all(self._take)
                for task in watching:
                    task.cancel()
            if not evidence:
                return 0
            self._session.drop()
            self._say(
                f"lost the controller ({evidence}); training continues, waiting {self._seconds:g} s for it to return"
            )
            given_up = await self._session.connect(self._workers.names)
        # Without a controller no recovery is possible: the processes end with this agent.
        self._say(f"the controller is gone ({given_up}); ending {len(self._workers.names())} process(es)")
        return CONTROLLER_LOST

    def _take(self, message: msgspec.Struct) -> None:
        if isinstance(message, (*ORDERS, ToWorkers)):
            self._workers.obey(message)
        elif isinstance(message, Pace):
            self._sampler.set_pace(message)

    def _say(self, text: str) -> None:
        self._printer.say(f"relight: agent {self._name}: {text}")
