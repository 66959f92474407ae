"""Serves the page of one job: assets, events, tiles of the timeline, logs. Read-only."""

import array
import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import msgspec

from relight.dashboard.follow import Follower
from relight.dashboard.model.exposition import CONTENT_TYPE
from relight.dashboard.model.row import MAX_SHIFT, MIN_SHIFT
from relight.dashboard.model.sync import Sync
from relight.dashboard.sources.logs import read_tail
from relight.dashboard.sources.stacks import ask_rank
from relight.dashboard.web.guard import refusal
from relight.dashboard.web.http import MAX_HEAD_BYTES, BadRequest, Request, head, read_request

POLL_SECONDS = 0.1
EVENT_SECONDS = 0.25  # at least between two events for one page
CLOCK_SECONDS = 1.0  # between two looks at a job in which nothing happens
UNWATCHED_SECONDS = 1.0  # between two looks while no page is open
QUIET_SECONDS = 5.0  # an event is sent after this long even if nothing has changed: the page sees that we live
IDLE_SECONDS = 30.0  # for the next request on a connection
SEND_SECONDS = 20.0  # for a peer to take an answer
MAX_CONNECTIONS = 64
MAX_TILE_ROWS = 1024
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Dashboard:
    """The page of one run directory."""

    def __init__(self, run_dir: Path, token: str = "") -> None:
        """`token`: what requests about the job must carry; empty where only this machine can ask."""
        self._run_dir = run_dir
        self._token = token
        self._follower = Follower(run_dir)
        self._sync = Sync(secrets.token_hex(6))
        self._clock = (0, 0)
        self._published: tuple[int, int] = (-1, -1)  # what of the job has been looked at
        self._published_at = 0.0
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()
        self._pages = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._asking = asyncio.Lock()
        self._assets = _load_assets()
        self._calls: dict[str, Callable[[Request], tuple[str, bytes]]] = {
            "/api/tiles": self._tiles,
            "/api/log": self._log,
            "/api/failure": self._failure,
            "/metrics": self._metrics,
        }

    async def listen(self, host: str, port: int) -> int:
        """Open the port (0: a free one), and follow the job from here on; returns the port. Raises OSError."""
        self._server = await asyncio.start_server(self._on_connection, host, port, limit=MAX_HEAD_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def run(self) -> None:
        """Follow the job until this is cancelled."""
        try:
            while True:
                await self._follower.read()
                await self._publish()
                if self._follower.is_behind:
                    continue
                self._wake.clear()
                with contextlib.suppress(TimeoutError):  # no wait_for: before Python 3.12 it can lose a cancellation
                    async with asyncio.timeout(POLL_SECONDS if self._pages else UNWATCHED_SECONDS):
                        await self._wake.wait()
        finally:
            await self.close()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._follower.close()

    async def _publish(self) -> None:
        """Work out what is new; not for nothing, since with a thousand ranks it takes milliseconds."""
        job, now = self._follower.job, time.monotonic()
        state = (job.journal_changes + job.status_changes, job.edge_ns)
        if state == self._published and now - self._published_at < CLOCK_SECONDS:
            return
        if state[0] == self._published[0] and now - self._published_at < EVENT_SECONDS:
            return
        self._published, self._published_at = state, now
        topics, ranks, now_ns, known_ns = self._follower.values()
        self._clock = (now_ns, known_ns)
        if self._sync.update(topics, ranks):
            async with self._changed:
                self._changed.notify_all()

    # --- connections ----------------------------------------------------------------------------------------------
    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._connections) > MAX_CONNECTIONS:
                await self._fail(writer, 503, "too many connections: close some of the pages that show this job")
                return
            while True:
                async with asyncio.timeout(IDLE_SECONDS):
                    request = await read_request(reader)
                if request is None or not await self._answer(request, writer):
                    return
        except BadRequest as error:
            with contextlib.suppress(OSError, TimeoutError):
                await self._fail(writer, error.status, str(error))
        except (OSError, TimeoutError):
            pass  # the page was closed, or is too slow
        finally:
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Answer a request; return whether another one may follow on this connection."""
        asset = self._assets.get(request.path)
        refused = refusal(request.headers, self._token, is_private=asset is None)
        if refused is not None:
            await self._fail(writer, *refused)
            return False
        if asset is not None:
            await _send(writer, head(200, asset[0], len(asset[1])) + asset[1])
        elif request.path == "/api/events":
            await self._send_events(request, writer)
            return False
        elif request.path in self._calls or request.path == "/api/stack":
            call = self._calls.get(request.path)
            kind, body = await self._stack(request) if call is None else call(request)
            await _send(writer, head(200, kind, len(body)) + body)
        else:
            await self._fail(writer, 404, "there is nothing here")
            return False
        return request.headers.get("connection", "").lower() != "close"

    async def _fail(self, writer: asyncio.StreamWriter, status: int, why: str) -> None:
        body = f"relight: {why}\n".encode()
        await _send(writer, head(status, "text/plain; charset=utf-8", len(body), {"Connection": "close"}) + body)

    # --- what is asked for ----------------------------------------------------------------------------------------
    async def _send_events(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """Changes as they come, from the one on that the page has seen last."""
        await _send(writer, head(200, "text/event-stream", None))
        seen = self._sync.seen(request.headers.get("last-event-id", ""))
        self._pages += 1
        self._wake.set()  # what was read last may be old
        try:
            while True:
                await _send(writer, self._sync.event(seen, *self._clock))
                seen = self._sync.round
                await asyncio.sleep(EVENT_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(QUIET_SECONDS):
                        await self._next_round(seen)
        finally:
            self._pages -= 1

    async def _next_round(self, seen: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._sync.round > seen)

    def _tiles(self, request: Request) -> tuple[str, bytes]:
        """Tiles of some rows, little-endian 32-bit words: as cells (256 bytes a row) or as runs (length, then runs).

        Query: shift, tile, first (a rank), rows, runs (0 or 1).
        """
        shift = _number(request, "shift", MIN_SHIFT, MAX_SHIFT)
        tile = _number(request, "tile", 0, 2**40)
        first = _number(request, "first", 0, 2**31)
        count = _number(request, "rows", 1, MAX_TILE_ROWS)
        as_runs = _number(request, "runs", 0, 1)
        known_ns = self._clock[1]
        rows = [self._follower.job.row(rank) for rank in range(first, first + count)]
        found = [row for row in rows if row is not None]
        if not as_runs:
            return "application/octet-stream", b"".join(row.cells(shift, tile, known_ns) for row in found)
        words = array.array("i")
        for row in found:
            runs = row.runs(shift, tile, known_ns)
            words.append(len(runs))
            words.extend(min(word, 2**31 - 1) for word in runs)
        if sys.byteorder == "big":
            words.byteswap()
        return "application/octet-stream", words.tobytes()

    def _log(self, request: Request) -> tuple[str, bytes]:
        """The end of a rank's log. Query: rank, since (bytes; optional)."""
        rank = _number(request, "rank", 0, 2**31)
        since = _number(request, "since", 0, 2**60) if "since" in request.query else None
        return "application/json", msgspec.json.encode(read_tail(self._run_dir, rank, since))

    def _failure(self, request: Request) -> tuple[str, bytes]:
        """The stacks that were taken of a hang. Query: number (of the failure)."""
        number = _number(request, "number", 1, 2**31)
        failures = self._follower.job.report().failures
        stack = failures[number - 1].stack if number <= len(failures) else ""
        return "application/json", msgspec.json.encode({"stack": stack})

    async def _stack(self, request: Request) -> tuple[str, bytes]:
        """The present stack of a rank's main thread. Query: rank. One at a time: a page cannot keep workers busy."""
        rank = _number(request, "rank", 0, 2**31)
        job = self._follower.job
        async with self._asking:
            found = await ask_rank(rank, job.processes().get(rank))
        return "application/json", msgspec.json.encode({**found, "now_ns": job.now_ns(time.time_ns())})

    def _metrics(self, _: Request) -> tuple[str, bytes]:
        """For Prometheus. Nothing before all is read: a counter that begins again at 0 would look like a new job."""
        if not self._follower.has_caught_up:
            raise BadRequest(503, "the run directory is still being read; ask again")
        return CONTENT_TYPE, self._follower.metrics().encode()


def _number(request: Request, name: str, low: int, high: int) -> int:
    text = request.query.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise BadRequest(400, f"{name} is a number from {low} to {high}")
    return int(text)


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    async with asyncio.timeout(SEND_SECONDS):
        await writer.drain()


def _load_assets() -> dict[str, tuple[str, bytes]]:
    """The page's own files by path, with their types: nothing else can be asked for."""
    found = {}
    for file in resources.files("relight.dashboard").joinpath("assets").iterdir():
        kind = _KINDS.get(Path(file.name).suffix)
        if kind is not None:
            found[f"/{file.name}"] = (f"{kind}; charset=utf-8", file.read_bytes())
    found["/"] = found["/index.html"]
    return found
