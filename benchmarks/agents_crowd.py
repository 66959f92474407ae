"""Plays many agents in one process: connections, samples, and answers to what the controller orders.

Each agent has a connection of its own, and says what an agent with so many workers would say, in the same frames and at
the same pace. It starts nothing: a worker is a name, a rank and a number of steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from relight.agent.connection.session import CONFIRM_SECONDS
from relight.agent.decisions.sampling import TRACE_SECONDS
from relight.core.detection.pace import SAMPLE_SECONDS
from relight.core.protocol.commands import Assign, Begin, Kill, Release, Restore, Resume, Spawn, Stop
from relight.core.protocol.events import (
    ProcessDying,
    ProcessExited,
    ProcessStarted,
    Restored,
    RestoreProgress,
    StandbyReady,
    StepResumed,
    Stopped,
    TrainingEntered,
)
from relight.core.protocol.gathering import Gathering, subject
from relight.core.protocol.position import Phase, Position
from relight.wire.connection.framing import decode, encode_frame, encode_payload, make_decoder, split_payloads
from relight.wire.connection.handshake import ConnectingSide
from relight.wire.connection.outbox import COUNTED
from relight.wire.messages import (
    PROTOCOL_VERSION,
    AgentDown,
    Challenge,
    FromWorker,
    FromWorkers,
    Hello,
    Pace,
    Received,
    Refused,
    Sample,
    Samples,
    StoreReply,
    StoreSet,
    StoreWait,
    ToWorkers,
    TraceChunk,
    Welcome,
    WorkerDown,
)

STEP_SECONDS = 0.5  # of the job that is pretended: each of its phases is in the samples and in the trace
RECORDS_PER_STEP = 5
TICK_SECONDS = 0.01
DEADLINE_SECONDS = 600.0
JOINING_AT_ONCE = 500
LAYOUT, STATE, LINEAGE = "layout", "state", "lineage"
VERSION = 5


class Worker:
    """A process that is pretended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rank = -1
        self.generation = 1
        self.blank = True
        self.progress = 0


class Member(asyncio.Protocol):
    """One agent."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        self.crowd = crowd
        self.name = f"node-{number}"
        self.workers: dict[str, Worker] = {}
        self.sample_seconds = SAMPLE_SECONDS
        self.trace = True
        self.joined = False
        self.received = 0
        self._unconfirmed = False
        self._confirming: asyncio.TimerHandle | None = None
        self._buffer = bytearray()
        self._gathering: Gathering[FromWorker] = Gathering()
        self._transport: asyncio.Transport | None = None

    # --- the connection -------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        out: list[bytes] = []
        for payload in split_payloads(self._buffer):
            message = decode(self.crowd.decode, payload)
            self._take(message, out)
            if isinstance(message, COUNTED):
                self.received += 1
                self._unconfirmed = True
        if out:
            self._confirm()
            self.write(b"".join(out))
        elif self._unconfirmed and self._confirming is None:
            self._confirming = asyncio.get_running_loop().call_later(CONFIRM_SECONDS, self._confirm)

    def _confirm(self) -> None:
        """With the next report, or after a while, as an agent does."""
        if self._confirming is not None:
            self._confirming.cancel()
            self._confirming = None
        if self._unconfirmed:
            self._unconfirmed = False
            self.write(encode_frame(Received(count=self.received)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.crowd.lost(self, exc)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    async def is_welcome(self) -> bool:
        """Return whether the controller takes it in, as it says after a while."""
        end = time.monotonic() + 10.0
        while self._transport is not None and not self.joined and time.monotonic() < end:
            await asyncio.sleep(0.005)
        return self.joined

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- what it is told --------------------------------------------------------------------------------------------
    def _take(self, message: Any, out: list[bytes]) -> None:
        match message:
            case Challenge():
                hello = Hello(
                    protocol_version=PROTOCOL_VERSION,
                    role="agent",
                    name=self.name,
                    slots=self.crowd.ranks_each,
                    life=self.name,
                )
                out.append(encode_frame(ConnectingSide(self.crowd.token).answer(message, hello)))
            case Welcome():
                self.joined = True
                self.crowd.note_joined()
            case Refused():
                self.crowd.refused += 1
            case Spawn():
                worker = self.workers[message.process] = Worker(message.process)
                out.append(encode_frame(ProcessStarted(process=worker.name, pid=1)))
                if message.rank is None:
                    ready = StandbyReady(process=worker.name, layout_digest=LAYOUT)
                    out.append(_from_worker(worker.name, ready))
                    self.crowd.standbys.set()
            case Kill():
                if self.workers.pop(message.process, None) is not None:
                    out.append(_exited(message.process))
            case ToWorkers():
                order = decode(self.crowd.decode_order, message.payload)
                said: list[tuple[str, msgspec.Struct]] = []
                for name in message.processes:
                    worker = self.workers.get(name) or Worker(name)
                    if name in self.workers:
                        self._obey(worker, order, said)
                out += self._pass_on(said)
            case Pace():
                self.sample_seconds, self.trace = message.sample_seconds, message.trace

    def _obey(self, worker: Worker, order: Any, out: list[tuple[str, msgspec.Struct]]) -> None:
        crowd = self.crowd
        match order:
            case Assign():
                worker.rank, worker.generation = order.rank, order.generation
                crowd.holders[order.rank] = (self, worker)
                if order.generation == 1:
                    entered = TrainingEntered(
                        process=worker.name,
                        rank=worker.rank,
                        version=0,
                        layout_digest=LAYOUT,
                        state_digest=STATE,
                        until=10**6,
                    )
                    out.append((worker.name, entered))
                else:
                    out.append((worker.name, self._stopped(worker, order.generation)))
            case Begin():
                worker.blank = False
                crowd.note("begin")
            case Stop():
                worker.generation = order.generation
                crowd.note("stop")
                out.append((worker.name, self._stopped(worker, order.generation)))
            case Restore():
                crowd.note("restore")
                if not crowd.meets:
                    out.append((worker.name, self._restored(worker)))
                    return
                if worker.rank == 0:
                    key = StoreSet(generation=order.generation, key="0", value=b"x" * 128)
                    out.append((worker.name, key))
                wait = StoreWait(request=1, generation=order.generation, keys=("0",))
                out.append((worker.name, wait))
            case StoreReply():
                out.append((worker.name, self._restored(worker)))
            case Resume():
                crowd.note("resume")
                resumed = StepResumed(
                    process=worker.name,
                    rank=worker.rank,
                    generation=worker.generation,
                    step=crowd.version,
                    resumed_ns=1,
                    forward_ns=1,
                    commit_ns=2,
                )
                out.append((worker.name, resumed))
            case Release():
                pass

    def _pass_on(self, said: list[tuple[str, msgspec.Struct]]) -> list[bytes]:
        """As an agent does: what every rank says once goes together, once the last of them has said it."""
        frames: list[bytes] = []
        for name, message in said:
            relayed = FromWorker(process=name, payload=encode_payload(message))
            about = subject(message)
            if about is None or not self._gathering.joins(about):
                frames += self._gathered()
            if about is None:
                frames.append(encode_frame(relayed))
                continue
            expected = [worker.name for worker in self.workers.values() if worker.rank >= 0]
            if self._gathering.add(name, about, relayed, expected):
                frames += self._gathered()
        return frames

    def _gathered(self) -> list[bytes]:
        together = self._gathering.take()
        if not together:
            return []
        return [encode_frame(together[0] if len(together) == 1 else FromWorkers(messages=tuple(together)))]

    def _restored(self, worker: Worker) -> Restored:
        worker.blank = False
        self.crowd.note("restored")
        return Restored(
            process=worker.name,
            rank=worker.rank,
            generation=worker.generation,
            version=self.crowd.version,
            lineage=LINEAGE,
            state_digest=STATE,
            layout_digest=LAYOUT,
            progress=RestoreProgress(),
        )

    def _stopped(self, worker: Worker, generation: int) -> Stopped:
        self.crowd.note("stopped")
        return Stopped(
            process=worker.name,
            rank=worker.rank,
            generation=generation,
            step=-1 if worker.blank else self.crowd.version,
            version=0 if worker.blank else self.crowd.version,
            lineage="" if worker.blank else LINEAGE,
            prepared=-1,
            torn=False,
            blank=worker.blank,
            stop_seconds=0.01,
            derivable=True,
            restore_address=f"/tmp/restore-{worker.name}.sock",
        )

    # --- what it says by itself -------------------------------------------------------------------------------------
    def sample(self, now: float) -> bytes:
        """Samples of all its workers."""
        now_ns = time.monotonic_ns()
        step = int(now / STEP_SECONDS)
        phase = (Phase.FORWARD, Phase.BACKWARD, Phase.BARRIER, Phase.OPTIMIZER)[int(now / STEP_SECONDS * 4) % 4]
        samples = []
        for worker in self.workers.values():
            at = Position(
                generation=worker.generation,
                rank=worker.rank,
                step=step,
                phase=phase if worker.rank >= 0 else Phase.STANDBY,
                version=step,
                progress=int(now / STEP_SECONDS * 4),
                stamp_ns=now_ns - 10**6,
                private_versions=(step - 1, step),
                loss=2.5,
                commits=step,
            )
            samples.append(
                Sample(
                    process=worker.name,
                    position=at,
                    state="S",
                    run_delay_ns=10**9,
                    rss_bytes=2**30,
                    sampled_ns=now_ns,
                )
            )
        return encode_frame(Samples(samples=tuple(samples)))

    def traces(self, now: float, seconds: float) -> bytes:
        """Phase changes of its workers in the last seconds."""
        count = max(1, int(seconds / STEP_SECONDS * RECORDS_PER_STEP))
        stamp, step = time.monotonic_ns(), int(now / STEP_SECONDS)
        chunks = []
        for worker in self.workers.values():
            if worker.rank >= 0:
                records = tuple((stamp - n * 10**8, worker.generation, step, 2, step) for n in range(count))
                chunk = TraceChunk(process=worker.name, rank=worker.rank, records=records, clock_offset_ns=10**18)
                chunks.append(encode_frame(chunk))
        return b"".join(chunks)


class Crowd:
    """All agents of a job."""

    def __init__(
        self, address: tuple[str, int], token: bytes, agents: int, ranks_each: int, *, meets: bool = True
    ) -> None:
        """`meets`: to form a group, every rank puts a key into the store, or waits for one."""
        self.token = token
        self.meets = meets
        self.ranks_each = ranks_each
        self.decode = make_decoder(AgentDown)
        self.decode_order = make_decoder(WorkerDown)
        self.members = [Member(self, number) for number in range(agents)]
        self.holders: dict[int, tuple[Member, Worker]] = {}
        self.standbys = asyncio.Event()
        self.samples_sent = 0
        self.refused = 0
        self.version = VERSION  # that the ranks have reached
        self._address = address
        self._ranks = agents * ranks_each
        self._joined = 0
        self._closing = False
        self._counts: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._problem = ""

    # --- joining ----------------------------------------------------------------------------------------------------
    async def join(self) -> None:
        """Connect all; an agent that is refused because there is a crush tries again, as in production."""
        gate = asyncio.Semaphore(JOINING_AT_ONCE)

        async def join(member: Member) -> None:
            async with gate:
                while True:
                    await asyncio.get_running_loop().create_connection(lambda: member, *self._address)
                    if await member.is_welcome():
                        return
                    await asyncio.sleep(0.1)

        await asyncio.gather(*map(join, self.members))

    def note_joined(self) -> None:
        self._joined += 1

    def lost(self, member: Member, error: Exception | None) -> None:
        if not self._closing and member.joined:
            self._problem = f"{member.name} lost its connection: {error}"
            self._changed.set()

    def close(self) -> None:
        self._closing = True
        for member in self.members:
            member.close()

    # --- what has happened ------------------------------------------------------------------------------------------
    def note(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1
        self._last[what] = time.monotonic()
        if self._counts[what] == self._ranks:
            self._changed.set()

    async def _until(self, what: str) -> float:
        """Return the time at which the last of all ranks had it."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while self._counts.get(what, 0) < self._ranks:
                if self._problem:
                    raise RuntimeError(self._problem)
                self._changed.clear()
                await self._changed.wait()
        return self._last[what]

    async def until_training(self) -> None:
        await self._until("begin")

    async def until_standby(self) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self.standbys.wait()

    async def fail(self, rank: int, cpu_s: Callable[[], float]) -> dict[str, float]:
        """The worker of this rank dies; seconds of each stage, until all are told to train on.

        `cpu_s`: how much of a processor the controller has had so far.
        """
        cpu = [cpu_s()]
        self.standbys.clear()
        self._counts.clear()
        self._counts["stop"] = 1  # the dead one is told nothing
        member, worker = self.holders[rank]
        del member.workers[worker.name]
        position = Position(
            generation=worker.generation,
            rank=rank,
            step=self.version,
            version=self.version,
            phase=Phase.FORWARD,
            stamp_ns=1,
            private_versions=(self.version - 1, self.version),
        )
        begun = time.monotonic()
        member.write(
            encode_frame(ProcessDying(process=worker.name, position=position, noticed_ns=1))
            + _exited(worker.name, position)
        )
        stop = await self._until("stop")
        cpu.append(cpu_s())
        stopped = await self._until("stopped")
        restore = await self._until("restore")
        restored = await self._until("restored")
        resume = await self._until("resume")
        cpu.append(cpu_s())
        return {
            "stop_cpu_s": cpu[1] - cpu[0],
            "cpu_s": cpu[2] - cpu[0],
            "stop_s": stop - begun,
            "stopped_s": stopped - begun,
            "restore_s": restore - stopped,
            "resume_s": resume - restored,
            "total_s": resume - begun,
        }

    # --- samples and traces -----------------------------------------------------------------------------------------
    async def pulse(self) -> None:
        """Every agent says how its workers are, and what they did, at the pace it was told. Spread evenly."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        spread = max(1, len(self.members))
        sample_due = [begun + number / spread * m.sample_seconds for number, m in enumerate(self.members)]
        trace_due = [begun + number / spread * TRACE_SECONDS for number in range(len(self.members))]
        while True:
            now = loop.time()
            for number, member in enumerate(self.members):
                if sample_due[number] <= now:
                    sample_due[number] = max(now - member.sample_seconds, sample_due[number]) + member.sample_seconds
                    member.write(member.sample(now - begun))
                    self.samples_sent += 1
                if trace_due[number] <= now:
                    trace_due[number] = max(now - TRACE_SECONDS, trace_due[number]) + TRACE_SECONDS
                    if member.trace:
                        member.write(member.traces(now - begun, TRACE_SECONDS))
            await asyncio.sleep(TICK_SECONDS)


def _from_worker(name: str, message: msgspec.Struct) -> bytes:
    return encode_frame(FromWorker(process=name, payload=encode_payload(message)))


def _exited(name: str, position: Position | None = None) -> bytes:
    return encode_frame(
        ProcessExited(process=name, exit_status=-9, evidence="killed", position=position or Position(), noticed_ns=1)
    )
