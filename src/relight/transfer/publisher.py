"""The sending side: keeps the IPC buffers, hears engines, runs one update at a time.

Two threads. The *loop* thread owns every connection and the update's decisions (`update.Update`); it never copies a
tensor. The *writer* thread fills buckets when the publisher itself is the source. Other processes that hold the same
weights may join as sources (`SourceLink`), and then they take turns.
"""

import contextlib
import functools
import itertools
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from relight.errors import MissingPartsError, TransferError, UsageError
from relight.transfer.buffers import Buffer, close_buffers, create_buffers
from relight.transfer.channel import listen, socket_path
from relight.transfer.division import Division, Held, divide
from relight.transfer.handle import Handle
from relight.transfer.manifest import Manifest, describe_bytes
from relight.transfer.members import EngineState, Member, Members
from relight.transfer.messages import (
    AbandonUpdate,
    Behind,
    BucketLoaded,
    BucketWritten,
    Committed,
    CommitUpdate,
    LoadBucket,
    Ready,
    Refuse,
    Release,
    Welcome,
    WriteBucket,
)
from relight.transfer.plan import DEFAULT_BUCKET_BYTES, plan_buckets
from relight.transfer.publication import Publication, prepare_publication
from relight.transfer.published import SELF, Published, Stage
from relight.transfer.schedule import IPC_BUFFERS, Form, make_schedule
from relight.transfer.source import Source
from relight.transfer.update import Abandon, Commit, Drop, Finished, Load, Order, Update, Write

_POLL_SECONDS = 0.01


def _until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    end = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


class Publisher:
    """Puts weights into every engine that is connected, again and again, through the same buffers.

    Args:
        place: a directory (the socket is weights.sock in it) or the socket's own path. Engines name the same place.
        bucket_bytes: of each of the two IPC buffers, which is all the memory that an update takes here.
        form: serial or two-stage (the default: the next bucket is written while engines reload the last).
        stall_timeout_seconds: an engine or a source that does not answer for so long is dropped.
        commit_timeout_seconds: the same for an engine that holds everything, and only has to finish the requests that
            it is answering with the version before.
        source_timeout_seconds: the same for a source; by default like an engine.
        on_notice: called with a sentence for people; from the loop's thread.

    Raises:
        TransferError: the place is taken or cannot be used, or there is no memory for the buffers.
        UsageError: a `bucket_bytes` that is no positive multiple of 64.
    """

    def __init__(
        self,
        place: str | Path,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        form: Form | str = Form.TWO_STAGE,
        stall_timeout_seconds: float = 10.0,
        commit_timeout_seconds: float = 120.0,
        source_timeout_seconds: float | None = None,
        on_notice: Callable[[str], None] | None = None,
    ) -> None:
        plan_buckets(Manifest(()), bucket_bytes)  # complains about a size that cannot be used
        self.path = socket_path(place)
        self._form = Form(form)
        if self._form is Form.THREE_STAGE:
            raise TransferError("in host memory there is no host-to-device copy to overlap: use two-stage or serial")
        self._stall = stall_timeout_seconds
        self._commit_timeout = commit_timeout_seconds
        self._source_timeout = source_timeout_seconds
        self._on_notice = on_notice or (lambda _: None)
        self._listener = listen(self.path)
        self._inode = os.stat(self.path).st_ino
        try:
            self._buffers: tuple[Buffer, ...] = create_buffers(IPC_BUFFERS, bucket_bytes)
        except TransferError:
            self._listener.close()
            self.path.unlink(missing_ok=True)
            raise
        self._bucket_bytes = bucket_bytes
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[tuple[Publication, Write] | None] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._job: Publication | None = None
        self._next: Publication | None = None  # the owner's, while a late engine is helped
        self._held: tuple[Source, int, int] | None = None  # weights that late engines may get at any time
        self._numbers = itertools.count(1)  # of updates
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._members = Members(
            self._selector,
            self._listener,
            Welcome(buffer_bytes=bucket_bytes),
            [buffer.descriptor for buffer in self._buffers],
            heard=self._hear,
            came=self._came,
            gone=self._gone,
            notify=self._notify,
        )
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._drain_wakes)
        self._loop_thread = threading.Thread(target=self._run, name="relight-publisher", daemon=True)
        self._writer_thread = threading.Thread(target=self._write_buckets, name="relight-writer", daemon=True)
        self._loop_thread.start()
        self._writer_thread.start()

    # --- for the owner, from any thread -------------------------------------------------------------------------
    def begin(
        self,
        source: Source,
        *,
        version: int,
        generation: int = 0,
        form: Form | None = None,
        hold: bool = False,
        confirmed: bool = True,
        only: Iterable[str] | None = None,
        held: Held | None = None,
    ) -> Handle:
        """Start an update of every engine that is connected, or of those named in `only`; returns at once.

        The source's tensors must not change until `Handle.wait_until_read`. `hold`: they never will, so engines
        that come later get this version at once. Not `confirmed`: buckets are moved, but no engine answers with
        the version before `Handle.confirm`. `held`: what this source holds, if it is not all; the rest must be held by
        other sources that are connected. Raises TransferError if an update is under way or `close` was called,
        UsageError for weights that cannot be moved, or of which nobody holds some bytes.
        """
        handle = Handle()
        if hold and held is not None:
            raise UsageError("weights that are divided over sources cannot be held for engines that come later")
        division = None if held is None else self._divide(held)
        number, size = next(self._numbers), self._bucket_bytes
        job = prepare_publication(
            number, source, version, generation, form or self._form, handle, only, size, division=division
        )
        job.confirmed = confirmed
        with self._lock:
            if self._closing:
                raise TransferError("the publisher is closed")
            busy = self._next or self._job
            if busy is not None and not busy.is_late:
                raise TransferError(f"the update to version {busy.version} is under way; wait for it first")
            handle.on_confirm = lambda: self._post(functools.partial(self._confirm, job))
            handle.on_cancel = lambda why: self._post(functools.partial(self._cancel, job, why))
            handle.on_abandon = lambda why: self._post(functools.partial(self._cancel, job, why, held=True))
            if self._job is None:
                self._job = job
            else:
                self._next = job
            self._held = (source, version, generation) if hold else None
        self._post(self._gather)
        return handle

    def publish(self, source: Source, *, version: int, generation: int = 0, form: Form | None = None) -> Published:
        """`begin`, and wait for the end. Raises TransferError if no engine took the version."""
        result = self.begin(source, version=version, generation=generation, form=form).wait()
        assert result is not None
        if result.error:
            raise TransferError(f"version {version} was not published: {result.error}")
        return result

    def engines(self) -> tuple[EngineState, ...]:
        """Every engine that is connected."""
        return tuple(
            EngineState(name=m.name, pid=m.channel.peer_pid, version=m.version, generation=m.generation)
            for m in self._members.engines()
        )

    def sources(self) -> tuple[str, ...]:
        """Names of the other processes that write buckets."""
        return tuple(member.name for member in self._members.sources())

    def lacking(self, held: Held, timeout_seconds: float = 0.0) -> str:
        """What an update of a source that holds only this still lacks; empty: all is held by who is connected.

        Waits for the holders of the rest to come, for so long at most. Raises UsageError if what they hold does not
        fit.
        """
        why = ""

        def is_complete() -> bool:
            nonlocal why
            try:
                self._divide(held)
            except MissingPartsError as error:
                why = str(error)
                return False
            return True

        return "" if _until(is_complete, timeout_seconds) else why

    def _divide(self, own: Held) -> Division:
        others = [(member.name, member.held) for member in self._members.sources() if member.held is not None]
        return divide(((SELF, own), *others))

    def wait_for_engines(self, count: int, timeout_seconds: float) -> bool:
        """Until so many are connected. False: not within the time."""
        return _until(lambda: len(self.engines()) >= count, timeout_seconds)

    def wait_for_sources(self, count: int, timeout_seconds: float) -> bool:
        """The same for sources besides the publisher itself."""
        return _until(lambda: len(self.sources()) >= count, timeout_seconds)

    def close(self) -> None:
        """Stop at once; an update under way ends without effect. Removes the socket."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._post(lambda: None)
        self._loop_thread.join()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the loop -----------------------------------------------------------------------------------------------
    def _post(self, work: Callable[[], None]) -> None:
        self._inbox.put(work)
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"x")

    def _drain_wakes(self, _: object) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass

    def _run(self) -> None:
        why = "the publisher was closed"
        try:
            while not self._closing:
                self._turn(self._patience())
                self._turn(0.0)  # who has answered meanwhile is not late
                self._expire()
        except Exception as error:  # a defect of ours must not leave anyone waiting
            why = f"the publisher failed ({error!r}); this is a defect in relight"
            self._notify(why)
        finally:
            with self._lock:
                self._closing = True
            self._end(why)

    def _turn(self, patience_seconds: float | None) -> None:
        for key, events in self._selector.select(patience_seconds):
            if events & selectors.EVENT_WRITE:
                self._members.flush(key.fd)
            if events & selectors.EVENT_READ:
                key.data(key.fileobj)
        while not self._inbox.empty():
            self._inbox.get()()

    def _notify(self, what: str) -> None:
        with contextlib.suppress(Exception):  # somebody's broken print must not end the updates
            self._on_notice(what)

    def _patience(self) -> float | None:
        greeting = self._members.greeting_deadline()
        deadlines = [] if greeting is None else [greeting]
        job = self._job
        if job is not None and job.update is not None:
            deadline = job.update.next_deadline()
            deadlines += [] if deadline is None else [deadline]
        elif job is not None and job.ready_by:
            deadlines.append(job.ready_by)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _expire(self) -> None:
        now = time.monotonic()
        self._members.expire(now)
        job = self._job
        if job is None:
            return
        if job.update is not None:
            deadline = job.update.next_deadline()
            if deadline is not None and deadline <= now:
                self._obey(job, job.update.expire(now))
        elif job.ready_by and job.ready_by <= now:
            for name in sorted(job.awaited):
                job.dropped[name] = f"no answer for {self._stall:g} s"
                self._dismiss(name, job.dropped[name])
            job.awaited.clear()
            self._start(job)

    def _end(self, why: str) -> None:
        while self._job is not None:
            self._finish(self._job, error=why)
        for member in self._members:
            self._members.dismiss(member, why)
        self._selector.close()
        self._listener.close()
        self._wake_reader.close()
        self._wake_writer.close()
        with contextlib.suppress(OSError):  # unless somebody else listens there by now
            if os.stat(self.path).st_ino == self._inode:
                self.path.unlink()
        self._to_write.put(None)
        self._writer_thread.join()
        close_buffers(self._buffers)

    # --- connections --------------------------------------------------------------------------------------------
    def _hear(self, member: Member, message: Any) -> None:
        job = self._job
        now = time.monotonic()
        match message:
            case Behind():
                member.version, member.generation, member.offered = -1, 0, (0, -1)
                self._post(self._help_late_engines)
            case _ if job is None or message.update != job.number:
                pass  # about an update that is over
            case Ready():
                self._ready(job, member)
            case Refuse():
                self._refused(job, member, message.why)
            case _ if job.update is None:
                pass
            case BucketWritten():
                job.note_stage(member, "broadcast", message.bucket, message.seconds)
                self._obey(job, job.update.written(member.name, message.bucket, message.digest, now))
            case BucketLoaded():
                job.note_stage(member, "reload", message.bucket, message.seconds)
                answer = job.update.loaded if message.intact else job.update.damaged
                self._obey(job, answer(member.name, message.bucket, now))
            case Committed():
                member.version, member.generation = job.version, job.generation
                job.note_stage(member, "commit", -1)
                self._obey(job, job.update.committed(member.name, now))

    def _came(self, member: Member) -> None:
        if not member.is_source:
            self._post(self._help_late_engines)

    def _dismiss(self, name: str, why: str) -> None:
        member = self._members.find(name)
        if member is not None:
            self._members.dismiss(member, why)

    def _gone(self, member: Member, why: str) -> None:
        """Whoever it was has no part in the update any more."""
        job = self._job
        if job is None or not member.name:
            return
        if job.update is None:
            if member.name in job.awaited | job.ready:
                job.awaited.discard(member.name)
                job.ready.discard(member.name)
                job.dropped.setdefault(member.name, why)
                self._post(lambda: self._start_if_ready(job))
        else:
            self._obey(job, job.update.lost(member.name, why, time.monotonic()))

    # --- an update ----------------------------------------------------------------------------------------------
    def _gather(self) -> None:
        """Ask everyone whether they take part."""
        job = self._job
        if job is None:
            return
        asked = [member for member in self._members if member.hello is not None and job.asks(member)]
        begin = job.begin(self._stall * (2 + len(asked)) if job.confirmed else 0.0)
        job.awaited = {member.name for member in asked}
        for member in asked:
            member.offered = (job.generation, job.version)
            self._members.send(member, begin)
        job.ready_by = time.monotonic() + self._stall
        self._start_if_ready(job)

    def _ready(self, job: Publication, member: Member) -> None:
        if member.name in job.awaited:
            job.awaited.discard(member.name)
            job.ready.add(member.name)
            self._start_if_ready(job)

    def _refused(self, job: Publication, member: Member, why: str) -> None:
        """It stays connected: the next update may suit it."""
        self._notify(f"{member.name} refuses version {job.version}: {why}")
        if job.update is not None:
            orders = job.update.lost(member.name, why, time.monotonic())
            self._obey(job, [order for order in orders if order != Drop(member.name, why)])
            return
        if member.name in job.awaited | job.ready:
            job.awaited.discard(member.name)
            job.ready.discard(member.name)
            job.dropped[member.name] = why
            self._start_if_ready(job)

    def _start_if_ready(self, job: Publication) -> None:
        if self._job is not job or job.update is not None:
            return
        if not any(member.is_source and member.name in job.awaited for member in self._members):
            job.handle.note_joined()
        if not job.awaited:
            self._start(job)

    def _start(self, job: Publication) -> None:
        job.handle.note_joined()
        members = {m.name: m for m in self._members if m.name in job.ready}
        sources = [SELF, *sorted(name for name, member in members.items() if member.is_source)]
        engines = [name for name, member in members.items() if not member.is_source]
        schedule = make_schedule(job.form, devices=len(sources), buckets=len(job.buckets), from_host=True)
        job.update = Update(
            schedule,
            sources,
            engines,
            self._stall,
            confirmed=job.confirmed,
            commit_timeout_seconds=self._commit_timeout,
            source_timeout_seconds=self._source_timeout,
            writers=job.writers,
        )
        self._obey(job, job.update.start(time.monotonic()))

    def _confirm(self, job: Publication) -> None:
        job.confirmed = True
        if self._job is job and job.update is not None:
            self._obey(job, job.update.confirm(time.monotonic()))

    def _cancel(self, job: Publication, why: str, *, held: bool = False) -> None:
        if self._next is job:
            with self._lock:
                self._next = None
            job.handle.finish(Published(version=job.version, generation=job.generation, error=why))
            return
        is_held = job.update is not None and job.update.moved
        if self._job is job and (not is_held or (held and not job.confirmed)):
            self._finish(job, error=why)

    def _obey(self, job: Publication, orders: Iterable[Order]) -> None:
        if job.update is not None:
            job.note_held(job.update.held_buckets)
            if job.update.moved:
                self._release(job)
        by_name = {member.name: member for member in self._members}
        for order in orders:
            if self._job is not job:
                return
            match order:
                case Write() if order.source == SELF:
                    self._to_write.put((job, order))
                case Write():
                    ask = WriteBucket(update=job.number, bucket=order.bucket, buffer=order.buffer)
                    self._order(by_name.get(order.source), "broadcast", order.bucket, ask)
                case Load():
                    ask_load = LoadBucket(
                        update=job.number, bucket=order.bucket, buffer=order.buffer, digest=order.digest
                    )
                    self._order(by_name.get(order.engine), "reload", order.bucket, ask_load)
                case Commit():
                    self._order(by_name.get(order.engine), "commit", -1, CommitUpdate(update=job.number))
                case Drop():
                    self._notify(f"{order.member} was dropped from the update to {job.version}: {order.why}")
                    self._dismiss(order.member, order.why)
                case Abandon():
                    self._finish(job, error=order.why)
                case Finished():
                    self._finish(job, engines=order.engines)

    def _release(self, job: Publication) -> None:
        """Nothing more is read from any source."""
        if not job.released:
            job.released = True
            job.handle.note_read()
            for member in [m for m in self._members if m.is_source and m.name in job.ready]:
                self._members.send(member, Release(update=job.number))

    def _order(self, member: Member | None, kind: str, bucket: int, message: msgspec.Struct) -> None:
        if member is not None:
            member.ordered_ns[kind, bucket] = time.monotonic_ns()
            self._members.send(member, message)

    def _finish(self, job: Publication, *, engines: tuple[str, ...] = (), error: str = "") -> None:
        if self._job is not job:
            return
        with self._lock:
            self._job, self._next = self._next, None
            following = self._job
        if not engines and not error:
            error = "no engine took it"
        if error:
            for member in [m for m in self._members if m.name in job.ready]:
                self._members.send(member, AbandonUpdate(update=job.number, why=error))
        result = job.result(engines, error)
        what = f"version {job.version}, {describe_bytes(result.total_bytes)} in {result.seconds:.2f} s"
        who = "1 engine has it" if len(engines) == 1 else f"{len(engines)} engines have it"
        self._notify(f"{what}: {error}" if error else f"{what}: {who}")
        job.handle.finish(result)
        if following is not None:
            self._post(self._gather)
        elif self._held is not None and not self._closing:
            self._post(self._help_late_engines)

    def _help_late_engines(self) -> None:
        """Engines that came after, or fell out of, the last update get its version by themselves."""
        if self._held is None or self._closing:
            return
        source, version, generation = self._held
        late = [
            m.name
            for m in self._members
            if m.hello is not None and not m.is_source
            if (generation, version) not in ((m.generation, m.version), m.offered)
        ]
        with self._lock:
            if self._job is not None or not late:
                return
            number, size = next(self._numbers), self._bucket_bytes
            self._job = prepare_publication(
                number, source, version, generation, self._form, Handle(), late, size, is_late=True
            )
        self._gather()

    # --- the writer ---------------------------------------------------------------------------------------------
    def _write_buckets(self) -> None:
        while (task := self._to_write.get()) is not None:
            job, order = task
            if self._job is not job:
                continue
            start_ns = time.monotonic_ns()
            try:
                digest = job.source.fill(job.buckets[order.bucket], self._buffers[order.buffer].view)
            except Exception as error:  # whatever a source runs into is the update's failure, not the publisher's
                self._post(functools.partial(self._self_lost, job, f"{type(error).__name__}: {error}"))
                continue
            stage = Stage("broadcast", order.bucket, order.buffer, SELF, start_ns, time.monotonic_ns())
            self._post(functools.partial(self._self_written, job, stage, digest))

    def _self_written(self, job: Publication, stage: Stage, digest: int) -> None:
        if self._job is job and job.update is not None:
            job.stages.append(stage)
            self._obey(job, job.update.written(SELF, stage.bucket, digest, time.monotonic()))

    def _self_lost(self, job: Publication, why: str) -> None:
        if self._job is job and job.update is not None:
            self._obey(job, job.update.lost_source(SELF, why, time.monotonic()))
