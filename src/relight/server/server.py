"""The controller of one job as a server: composes the parts around the core. Everything runs in one thread."""

import asyncio
import time
import traceback
from pathlib import Path

from relight.core.controller import Controller, ControllerSettings
from relight.core.events import ControllerRestarted
from relight.errors import ProtocolError
from relight.server.admission import Admission
from relight.server.agent_sessions import AgentSessions
from relight.server.agents import Agents
from relight.server.clock import JobClock
from relight.server.connection import Connection
from relight.server.driver import Driver
from relight.server.faults import ControllerFault
from relight.server.health import HealthMonitor
from relight.server.job_end import JobEnd
from relight.server.journal import Journal
from relight.server.listener import Listener
from relight.server.observer_sessions import ObserverSessions
from relight.server.observers import Observers
from relight.server.orders import Orders
from relight.server.presence import Presence
from relight.server.private_state import PrivateStates
from relight.server.refusals import Refusals
from relight.server.report_files import ReportFiles
from relight.server.router import AgentRouter, WorkerRouter
from relight.server.shutdown import Shutdown
from relight.server.status import StatusBoard
from relight.server.store import Store
from relight.server.takeover import Predecessor, read_predecessor
from relight.server.trace import StatusFile, TraceFile, read_statuses
from relight.timeline.publications import Publications
from relight.wire.settings import JobSettings, part_of
from relight.wire.status import PublishStatus
from relight.wire.tls import Tls

STATUS_SECONDS = 0.5
LIFE_SECONDS = 5.0  # between two signs of life to people who see only the files
FLUSH_SECONDS = 2.0


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
        self.core = core
        self.journal = journal
        self._clock = clock
        self._observers = observers
        self._agents = Agents()
        self._store = Store(self._agents.reply)
        self._board = StatusBoard(settings.job, core)
        publications = Publications()
        reports = ReportFiles(settings, core, journal, clock, observers, publications)
        self.end = JobEnd(reports, observers, self._agents)
        private = PrivateStates(core, self._agents, self._store)
        orders = Orders(core, self._agents, self._store, observers, private, reports, self.end)
        restarts = core.job_stats.controller_restarts + 1 if predecessor else 0
        self._driver = Driver(core, journal, clock, orders, self.end, ControllerFault(life=restarts))
        self.shutdown = Shutdown(self._driver, self._board, self.end)
        self._refusals = Refusals(observers, journal, clock)
        health = HealthMonitor(settings, core, self._driver, clock, self._board, self._agents)
        status = StatusFile(run_dir, observers.alarm)
        workers = WorkerRouter(
            *(self._driver, self._agents, self._store, self._board, publications, status),
            *(journal, clock, self._refusals),
        )
        router = AgentRouter(
            *(core, self._driver, self._agents, self._store, self._board, health, workers, private),
            *(TraceFile(run_dir, observers.alarm), status, clock, self._refusals, self.shutdown),
        )
        self._presence = Presence(settings, self._agents, self._driver, observers, self._board)
        self._admission = Admission(token, settings, tls)
        self._agent_sessions = AgentSessions(
            *(settings.nodes, self._admission, self._agents, router, self._driver, health),
            *(self._presence, clock, self.end),
        )
        self._observer_sessions = ObserverSessions(self._admission, observers, self.shutdown, self.end)
        self._resumed = predecessor is not None
        if predecessor is not None:
            for line in read_statuses(run_dir):
                if isinstance(line, PublishStatus):
                    publications.add(line)
            self._continue(predecessor)

    def _continue(self, predecessor: Predecessor) -> None:
        """Continue where the dead controller stopped: find out what has become of its commands."""
        core = self.core
        if predecessor.failure is not None:
            self.end.begin(predecessor.failure)
            return
        self._store.open(core.generation)
        lives = {name: core.job.hosts.life(name) for name in core.job.hosts.in_order()}
        self._agents.recall(lives, core.members.processes.values())
        if core.ended is not None:
            if not predecessor.has_recorded_end:  # it died just before it could write this
                self.journal.commands(self._clock.now(), (core.ended,))
            self.end.expect_agents()
            self.end.begin(core.ended)
            return
        self._driver.feed(ControllerRestarted())
        ranks = tuple(core.rank_processes().values())
        self._store.recall(ranks)
        self._agents.tell_store_lost(ranks)
        self._presence.await_all("after the controller's restart")

    async def run(self, listener: Listener) -> int:
        """Serve until the job has ended; return the exit status."""
        ticker = asyncio.create_task(self._tick())
        await self.end.wait()
        ticker.cancel()
        await self.end.wait_for_peers(resumed=self._resumed)
        listener.close()
        await self._observers.finish(FLUSH_SECONDS)
        await listener.end_connections()
        self.close()
        return 0 if self.end.command is not None and not self.end.command.error else 1

    def close(self) -> None:
        """Cancel all timers and close the journal."""
        self._presence.stop()
        self._driver.stop()
        self.journal.close()

    async def serve(self, connection: Connection) -> None:
        """Serve one connection from its handshake to its end."""
        try:
            peer = await self._admission.admit(connection)
            if isinstance(peer, str):
                self._refusals.note(f"refused a connection from {connection.peer}: {peer}")
            elif peer.hello.role == "agent":
                await self._agent_sessions.serve(connection, peer)
            else:
                await self._observer_sessions.serve(connection, peer)
        except ProtocolError as error:
            self._refusals.note(f"closed the connection from {connection.peer}: {error}")
        except Exception as error:
            traceback.print_exc()
            self._refusals.note(f"closed the connection from {connection.peer} after a defect in relight: {error!r}")
        finally:
            await connection.finish(FLUSH_SECONDS)

    async def _tick(self) -> None:
        """Send the job's status to observers, and show in the files that the job has a controller."""
        shown = time.monotonic()
        while True:
            self._observers.send(self._board.update(self._clock.now()))
            if time.monotonic() - shown >= LIFE_SECONDS:
                shown = time.monotonic()
                self.journal.show_life()
            await asyncio.sleep(STATUS_SECONDS)
