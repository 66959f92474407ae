"""Nonsense, said to a real controller in memory: one connection, from its first byte to its end.

An input is one byte that chooses who speaks, then the stream of bytes of that peer: a stranger, or a process that has
proved that he knows the token. Whatever he says, the controller must not fail, and its journal must stay readable.
"""

import asyncio
import contextlib
import io
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from relight.core.protocol.events import (
    CollectiveFailed,
    ProcessDying,
    ProcessExited,
    ProcessStarted,
    Restored,
    RestoreFailed,
    RestoreProgress,
    StandbyReady,
    StateDiffers,
    StepResumed,
    Stopped,
    TrainingDone,
    TrainingEntered,
    WorkerFailed,
    WorkerNotice,
    WorkerReleased,
)
from relight.core.protocol.position import Phase, Position
from relight.core.replay import replay
from relight.server.network.connection import Connection
from relight.server.network.observers import Observers
from relight.server.records.journal import Journal, read_journal, records
from relight.server.server import Server
from relight.wire.connection.framing import encode_frame, encode_payload, make_decoder, split_payloads
from relight.wire.connection.handshake import ConnectingSide
from relight.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    FromWorker,
    FromWorkers,
    Hello,
    PrivateState,
    Received,
    Sample,
    Samples,
    StopAgent,
    StoreAdd,
    StoreRecall,
    StoreSet,
    StoreWait,
    TraceChunk,
    WorkerHello,
)
from relight.wire.settings import JobSettings
from relight.wire.status import EngineVersion, PublishStatus, RestoreStatus

STRANGER, OBSERVER, AGENT, TRAINING = range(4)  # who speaks; the last is an agent whose job trains
TOKEN = b"a token of the fuzzer's own job."
_RANKS = ("w0", "w1")
_STANDBY = "w2"
_challenge = make_decoder(Challenge)


def from_worker(process: str, message: msgspec.Struct) -> FromWorker:
    return FromWorker(process=process, payload=encode_payload(message))


def _entered(rank: int) -> FromWorker:
    return from_worker(
        _RANKS[rank],
        TrainingEntered(process=_RANKS[rank], rank=rank, version=0, layout_digest="l", state_digest="s", until=100),
    )


BEGINNING: tuple[msgspec.Struct, ...] = (
    *(ProcessStarted(process=name, pid=100 + number) for number, name in enumerate((*_RANKS, _STANDBY))),
    _entered(0),
    _entered(1),
    from_worker(_STANDBY, StandbyReady(process=_STANDBY, layout_digest="l")),
)
_POSITION = Position(generation=1, rank=1, step=3, phase=Phase.BACKWARD, version=3, stamp_ns=5, private_versions=(2, 3))
_DEATH = (
    ProcessDying(process="w1", position=_POSITION, noticed_ns=7),
    ProcessExited(process="w1", exit_status=-9, evidence="killed", position=_POSITION, noticed_ns=8),
)


def _stopped(process: str, rank: int, *, blank: bool = False, generation: int = 2) -> FromWorker:
    stopped = Stopped(
        process=process,
        rank=rank,
        generation=generation,
        step=3,
        version=3,
        lineage="abc",
        prepared=-1,
        torn=False,
        blank=blank,
        stop_seconds=0.1,
        restore_address="/tmp/x.sock",
    )
    return from_worker(process, stopped)


def _restored(process: str, rank: int) -> FromWorker:
    restored = Restored(
        process=process,
        rank=rank,
        generation=2,
        version=3,
        lineage="abc",
        state_digest="s",
        layout_digest="l",
        progress=RestoreProgress(),
    )
    return from_worker(process, restored)


def _done(process: str, rank: int) -> FromWorker:
    done = TrainingDone(
        process=process,
        rank=rank,
        generation=1,
        version=100,
        lineage="z",
        state_digest="s",
        cut_collectives=0,
    )
    return from_worker(process, done)


# Everything that may be said, with values that make sense: what a mutation begins with.
MESSAGES: tuple[msgspec.Struct, ...] = (
    *BEGINNING,
    *_DEATH,
    _stopped("w0", 0),
    _stopped("w2", 1, blank=True),
    _restored("w0", 0),
    _restored("w2", 1),
    FromWorkers(messages=(_stopped("w0", 0), _stopped("w2", 1, blank=True))),
    FromWorkers(messages=(_restored("w0", 0), _restored("w2", 1), _done("w0", 0))),
    _done("w0", 0),
    _done("w1", 1),
    from_worker("w0", WorkerReleased(process="w0")),
    from_worker("w0", WorkerHello(process="w0", pid=100)),
    from_worker("w0", WorkerNotice(process="w0", rank=0, text="hello")),
    from_worker("w0", RestoreFailed(process="w0", generation=2, evidence="?")),
    from_worker("w0", CollectiveFailed(process="w0", rank=0, generation=1, step=3, summary="reset", noticed_ns=9)),
    from_worker("w0", StateDiffers(process="w0", rank=0, generation=1, step=3, digests=(1, 2), noticed_ns=9)),
    from_worker(
        "w0",
        StepResumed(process="w0", rank=0, generation=2, step=3, resumed_ns=10, forward_ns=11, commit_ns=12),
    ),
    from_worker(
        "w1",
        WorkerFailed(
            process="w1",
            rank=1,
            kind="exception",
            step=3,
            phase="FORWARD",
            summary="ValueError: x",
            traceback="...",
            noticed_ns=4,
        ),
    ),
    from_worker("w0", StoreSet(generation=1, key="k", value=b"1")),
    from_worker("w1", StoreWait(request=1, generation=1, keys=("k",))),
    from_worker("w1", StoreAdd(request=2, generation=1, key="k", amount=3)),
    from_worker("w1", StoreRecall(generation=1, added={"k": 3})),
    from_worker(
        "w0",
        PublishStatus(process="w0", engines=(EngineVersion(name="e", pid=1, version=2),), version=2, total_bytes=9),
    ),
    from_worker("w0", RestoreStatus(process="w0", rank=0, generation=2, copied_bytes=1, total_bytes=2, seconds=0.5)),
    Samples(
        samples=(
            Sample(process="w0", position=_POSITION, state="T", run_delay_ns=1, rss_bytes=2, sampled_ns=3 * 10**9),
        )
    ),
    TraceChunk(process="w0", rank=0, records=((1, 1, 1, 2, 1),), clock_offset_ns=5),
    PrivateState(source="w1", target="w2", version=3, payload=b"state"),
    Received(count=3),
    StopAgent(why="enough"),
    Hello(protocol_version=PROTOCOL_VERSION, role="agent", name="node-0", mac=b""),
)


def frames(*messages: msgspec.Struct) -> bytes:
    return b"".join(encode_frame(message) for message in messages)


def seeds() -> dict[str, bytes]:
    """Conversations that make sense, by name."""
    recovery = (*_DEATH, _stopped("w0", 0), _stopped("w2", 1, blank=True), _restored("w0", 0), _restored("w2", 1))
    found = {
        "everything": bytes([TRAINING]) + frames(*MESSAGES),
        "beginning": bytes([AGENT]) + frames(*BEGINNING),
        "recovery": bytes([TRAINING]) + frames(*recovery),
        "recovery-and-end": bytes([TRAINING]) + frames(*recovery, _done("w0", 0), _done("w2", 1)),
        "end": bytes([TRAINING]) + frames(_done("w0", 0), _done("w1", 1)),
        "observer": bytes([OBSERVER]) + frames(StopAgent(why="enough")),
    }
    for number, message in enumerate(MESSAGES):
        found[f"one-{number:02}"] = bytes([TRAINING]) + frames(message)
    return found | {f"stranger-{name}": bytes([STRANGER]) + data[1:] for name, data in found.items() if "one" in name}


class _Line(asyncio.Transport):
    """The peer's end of a connection, in memory."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._closed = False
        self.protocol: asyncio.StreamReaderProtocol
        self.said = bytearray()  # by the controller

    def write(self, data: Any) -> None:
        self.said += data

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.call_soon(self.protocol.connection_lost, None)

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class Judge:
    """Plays inputs, one after another, each with a controller of its own. Close it at the end."""

    def __init__(self) -> None:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        self._loop = asyncio.new_event_loop()
        self._directory = Path(tempfile.mkdtemp(prefix="relight-fuzz-"))

    def close(self) -> None:
        self._loop.close()
        shutil.rmtree(self._directory)

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def judge(self, data: bytes) -> str:
        """Complaints about how the controller took this; empty if there is none."""
        if not data:
            return ""
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            wrong = self._loop.run_until_complete(self._play(data[0] % 4, data[1:]))
        return wrong or (printed.getvalue() if "Traceback" in printed.getvalue() else "")

    async def _play(self, who: int, stream: bytes) -> str:
        settings = JobSettings(job="fuzz", script="x.py", world_size=2, standbys=1, run_dir=str(self._directory))
        path = self._directory / "journal.jsonl"
        path.unlink(missing_ok=True)
        observers = Observers()
        server = Server(settings, TOKEN, Journal(self._directory, settings, observers.tell), observers)
        reader, line = asyncio.StreamReader(), _Line(self._loop)
        line.protocol = asyncio.StreamReaderProtocol(reader)
        line.protocol.connection_made(line)
        connection = Connection(reader, asyncio.StreamWriter(line, line.protocol, reader, self._loop))
        serving = self._loop.create_task(server.serve(connection))
        while not line.said:
            await asyncio.sleep(0)
        if who != STRANGER:
            reader.feed_data(self._hello(bytearray(line.said), who))
        if who == TRAINING:
            reader.feed_data(frames(*BEGINNING))
        reader.feed_data(stream)
        reader.feed_eof()
        await serving
        ended = server.end.command
        server.close()
        if ended is not None and "defect in relight" in ended.error:
            return f"{ended.error}\n{ended.details}"
        _, lines = read_journal(path)
        replay(server.job.core.settings, records(lines))
        return ""

    def _hello(self, said: bytearray, who: int) -> bytes:
        (payload,) = split_payloads(said)
        role, name = ("observer", "someone") if who == OBSERVER else ("agent", "node-0")
        hello = Hello(protocol_version=PROTOCOL_VERSION, role=role, name=name, slots=3, life="a")
        return frames(ConnectingSide(TOKEN).answer(_challenge.decode(payload), hello))
