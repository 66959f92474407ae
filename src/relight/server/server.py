"""The controller of one job as a server: composes the parts around the core. Everything runs in one thread."""

import asyncio
import functools
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from relight.core.controller import Controller, ControllerSettings
from relight.core.protocol.commands import CancelHost
from relight.core.protocol.events import ControllerRestarted
from relight.errors import ProtocolError
from relight.server.job.clock import JobClock
from relight.server.job.driver import Driver
from relight.server.job.faults import ControllerFault
from relight.server.job.job import Job
from relight.server.job.job_end import JobEnd
from relight.server.job.orders import Orders
from relight.server.job.private_state import PrivateStates
from relight.server.job.refusals import Refusals
from relight.server.job.report_files import ReportFiles
from relight.server.job.takeover import Predecessor, read_predecessor
from relight.server.network.admission import Admission
from relight.server.network.agents import Agents
from relight.server.network.connection import Connection
from relight.server.network.listener import Listener
from relight.server.network.observers import Observers
from relight.server.network.store import Store
from relight.server.records.journal import Journal
from relight.server.records.status import StatusBoard
from relight.server.records.trace import StatusFile, TraceFile, read_statuses
from relight.server.sessions.agent_sessions import AgentSessions
from relight.server.sessions.health import HealthMonitor
from relight.server.sessions.observer_sessions import ObserverSessions
from relight.server.sessions.presence import Presence
from relight.server.sessions.router import AgentRouter, WorkerRouter
from relight.server.sessions.shutdown import Shutdown
from relight.server.supply.choose import make_supplier, make_watches
from relight.timeline.model.publications import Publications
from relight.wire.connection.tls import Tls
from relight.wire.settings import JobSettings, part_of
from relight.wire.status import PublishStatus

STATUS_SECONDS = 0.5
LIFE_SECONDS = 5.0  # between two signs of life to people who see only the files
FLUSH_SECONDS = 2.0
SUPPLY_SECONDS = 10.0  # for orders to be cancelled once the job is over


class Server:
    """Serves one job, from the first connection to the end of the job, or from where a dead controller stopped."""

    def __init__(
        self, settings: JobSettings, token: bytes, journal: Journal, observers: Observers, tls: Tls | None = None
    ) -> None:
        """Continue the job of `journal`, or begin it.

        Raises OSError, or msgspec.DecodeError, if the journal of an earlier controller cannot be read.
        """
        core_settings = part_of(ControllerSettings, settings)
        predecessor = read_predecessor(journal, core_settings)
        core = predecessor.core if predecessor else Controller(core_settings)
        clock = predecessor.clock if predecessor else JobClock()
        run_dir = Path(settings.run_dir)
        agents = Agents(settings.staying_host)
        self.job = job = Job(
            *(settings, core, journal, clock, agents, Store(agents.reply), StatusBoard(settings.job, core)),
            *(observers, Publications(), Refusals(observers, journal, clock)),
        )
        reports = ReportFiles(job)
        private = PrivateStates(job)
        self.end = JobEnd(job, reports)
        restarts = core.job_stats.controller_restarts + 1 if predecessor else 0
        self._supplier = make_supplier(settings, lambda event: self._driver.feed(event))  # noqa: PLW0108 (the driver comes next)
        orders = Orders(job, private, reports, self.end, self._supplier)
        self._driver = Driver(job, orders, self.end, ControllerFault(life=restarts))
        self.shutdown = Shutdown(job, self._driver, self.end)
        health = HealthMonitor(job, self._driver)
        trace, status = TraceFile(run_dir, observers.alarm), StatusFile(run_dir, observers.alarm)
        workers = WorkerRouter(job, self._driver, status)
        router = AgentRouter(job, self._driver, health, workers, private, trace, status, self.shutdown)
        self._presence = Presence(job, self._driver)
        self._admission = Admission(token, settings, tls)
        self._agent_sessions = AgentSessions(
            job, self._admission, router, self._driver, health, self._presence, self.end
        )
        self._observer_sessions = ObserverSessions(self._admission, observers, self.shutdown, self._driver, self.end)
        self._resumed = predecessor is not None
        if predecessor is not None:
            for line in read_statuses(run_dir):
                if isinstance(line, PublishStatus):
                    job.publications.add(line)
            self._continue(predecessor)

    def _continue(self, predecessor: Predecessor) -> None:
        """Continue where the dead controller stopped: find out what has become of its commands."""
        core = self.job.core
        if predecessor.failure is not None:
            self.end.begin(predecessor.failure)
            return
        self.job.store.open(core.generation)
        lives = {name: core.job.hosts.life(name) for name in core.job.hosts.in_order()}
        self.job.agents.recall(lives, core.members.processes.values())
        if core.ended is not None:
            if not predecessor.has_recorded_end:  # it died just before it could write this
                self.job.journal.commands(self.job.clock.now(), (core.ended,))
            self._cancel_orders(core.supplying.leftover())
            self.end.expect_agents()
            self.end.begin(core.ended)
            return
        self._driver.feed(ControllerRestarted())
        ranks = tuple(core.rank_processes().values())
        self.job.store.recall(ranks)
        self.job.agents.tell_store_lost(ranks)
        self._presence.await_all("after the controller's restart")

    async def run(self, listener: Listener) -> int:
        """Serve until the job has ended; return the exit status."""
        ticker = asyncio.create_task(self._tick())
        warn = functools.partial(self.job.observers.tell, "warning")
        watches = make_watches(self.job.settings, self.job.core, self._driver.feed, warn)
        watching = [asyncio.create_task(watch.run()) for watch in watches]
        await self.end.wait()
        ticker.cancel()
        for task in watching:
            task.cancel()
        if self.job.core.ended is None:  # ended by a defect, or by a disk that is full
            self._cancel_orders(self.job.core.supplying.remaining())
        await asyncio.gather(self.end.wait_for_peers(resumed=self._resumed), self._finish_supply())
        listener.close()
        await self.job.observers.finish(FLUSH_SECONDS)
        await listener.end_connections()
        self.close()
        return 0 if self.end.command is not None and not self.end.command.error else 1

    def _cancel_orders(self, orders: Iterable[CancelHost]) -> None:
        """Cancel orders for hosts whose cancellation the core cannot order any more."""
        if self._supplier is not None:
            for order in orders:
                self._supplier.cancel(order)

    async def _finish_supply(self) -> None:
        """Wait until no command of the supplier runs."""
        if self._supplier is None:
            return
        for order in await self._supplier.finish(SUPPLY_SECONDS):
            text = f"it is not known whether the order {order} for a host is cancelled; see to it by hand"
            self.job.observers.tell("warning", text)

    def close(self) -> None:
        """Cancel all timers and close the journal."""
        self._presence.stop()
        self._driver.stop()
        self.job.journal.close()

    async def serve(self, connection: Connection) -> None:
        """Serve one connection from its handshake to its end."""
        try:
            peer = await self._admission.admit(connection)
            if isinstance(peer, str):
                self.job.refusals.note(f"refused a connection from {connection.peer}: {peer}")
            elif peer.hello.role == "agent":
                await self._agent_sessions.serve(connection, peer)
            else:
                await self._observer_sessions.serve(connection, peer)
        except ProtocolError as error:
            self.job.refusals.note(f"closed the connection from {connection.peer}: {error}")
        except Exception as error:
            traceback.print_exc()
            self.job.refusals.note(f"closed the connection from {connection.peer} after a defect in relight: {error!r}")
        finally:
            await connection.close(FLUSH_SECONDS)

    async def _tick(self) -> None:
        """Send the job's status to observers, and show in the files that the job has a controller."""
        shown = time.monotonic()
        while True:
            self.job.observers.send(self.job.board.update(self.job.clock.now()))
            if time.monotonic() - shown >= LIFE_SECONDS:
                shown = time.monotonic()
                self.job.journal.show_life()
            await asyncio.sleep(STATUS_SECONDS)
