"""The sending side: keeps the IPC buffers, serves engines, runs one update at a time.

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
from relight.transfer.io.buffers import Buffer, close_buffers, create_buffers
from relight.transfer.io.channel import listen, socket_path
from relight.transfer.io.messages import (
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
from relight.transfer.plan.division import Division, Held, divide
from relight.transfer.plan.manifest import Manifest, describe_bytes
from relight.transfer.plan.plan import DEFAULT_BUCKET_BYTES, plan_buckets
from relight.transfer.plan.published import SELF, Published, Stage
from relight.transfer.plan.schedule import IPC_BUFFERS, Form, make_schedule
from relight.transfer.plan.update import Abandon, Commit, Drop, Finished, Load, Order, Update, Write
from relight.transfer.publish.handle import Handle
from relight.transfer.publish.members import EngineState, Member, Members
from relight.transfer.publish.publication import Publication, prepare_publication
from relight.transfer.publish.source import Source

_POLL_SECONDS = 0.01


def _until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    end = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


class Publisher:
    """Puts weights into every connected engine, again and again, through the same buffers.

    Args:
        place: a directory (the socket is weights.sock in it) or the socket's own path. Engines name the same place.
        bucket_bytes: size of each of the two IPC buffers, which are all the memory that an update takes here.
        form: "serial" or "two-stage" (the default: the next bucket is written while engines reload the last).
        stall_timeout_seconds: an engine or a source that does not answer for so long is dropped.
        commit_timeout_seconds: the same for an engine that holds the whole version, and only has to finish requests
            that it is answering with the version before.
        source_timeout_seconds: the same for a source; default: as for an engine.
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
        self._current: Publication | None = None  # that the loop works on
        self._next: Publication | None = None  # the owner's, while a late engine is helped
        self._lasting: tuple[Source, int, int] | None = None  # weights that late engines may get at any time
        self._divided: tuple[list[tuple[str, Held]], Division] = [], Division(Manifest(()), ())  # of the last update
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
        the version before `Handle.confirm`. `held`: the parts that this source holds, if not all; other connected
        sources must hold the rest. Raises TransferError if an update is under way or `close` was called,
        UsageError for weights that cannot be moved, or of which no source holds some bytes.
        """
        handle = Handle()
        source.settle()
        if hold and held is not None:
            raise UsageError("weights that are divided over sources cannot be held for engines that come later")
        division = None if held is None else self._divide(held)
        publication = prepare_publication(
            next(self._numbers),
            source,
            version,
            generation,
            form=form or self._form,
            handle=handle,
            only=only,
            buffer_bytes=self._bucket_bytes,
            confirmed=confirmed,
            division=division,
        )
        with self._lock:
            if self._closing:
                raise TransferError("the publisher is closed")
            busy = self._next or self._current
            if busy is not None and not busy.is_late:
                raise TransferError(f"the update to version {busy.version} is under way; wait for it first")
            handle.on_confirm = lambda: self._post(functools.partial(self._confirm, publication))
            handle.on_cancel = lambda why: self._post(functools.partial(self._cancel, publication, why))
            handle.on_abandon = lambda why: self._post(
                functools.partial(self._cancel, publication, why, even_moved=True)
            )
            if self._current is None:
                self._current = publication
            else:
                self._next = publication
            self._lasting = (source, version, generation) if hold else None
        self._post(self._gather)
        return handle

    def publish(self, source: Source, *, version: int, generation: int = 0, form: Form | None = None) -> Published:
        """Start an update and wait for its end. Raises TransferError if no engine took the version."""
        result = self.begin(source, version=version, generation=generation, form=form).wait()
        assert result is not None
        if result.error:
            raise TransferError(f"version {version} was not published: {result.error}")
        return result

    def engines(self) -> tuple[EngineState, ...]:
        """Return every connected engine."""
        return tuple(
            EngineState(name=m.name, pid=m.channel.peer_pid, version=m.version, generation=m.generation)
            for m in self._members.engines()
        )

    def sources(self) -> tuple[str, ...]:
        """Return the names of the other processes that write buckets."""
        return tuple(member.name for member in self._members.sources())

    def lacking(self, held: Held, timeout_seconds: float = 0.0) -> str:
        """Say what an update of a source that holds only `held` still lacks; empty: connected sources hold all of it.

        Waits for the holders of the rest, for `timeout_seconds` at most. Raises UsageError if their parts do not fit.
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
        held = [(SELF, own), *others]
        # The same weights go out again and again, and thousands of tensors take a while, even to be compared.
        if [(name, id(its)) for name, its in held] != [(name, id(its)) for name, its in self._divided[0]]:
            self._divided = held, divide(held)
        return self._divided[1]

    def wait_for_engines(self, count: int, timeout_seconds: float) -> bool:
        """Wait until `count` engines are connected. Returns False if the time ran out."""
        return _until(lambda: len(self.engines()) >= count, timeout_seconds)

    def wait_for_sources(self, count: int, timeout_seconds: float) -> bool:
        """Wait until `count` sources besides the publisher are connected. Returns False if the time ran out."""
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
            while len(self._wake_reader.recv(4096)) == 4096:
                pass

    def _run(self) -> None:
        why = "the publisher was closed"
        try:
            while not self._closing:
                self._turn(self._patience())
                if self._patience() == 0.0:
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
        """Seconds until somebody is late; None: nobody is waited for."""
        greeting = self._members.greeting_deadline()
        answer = None if self._current is None else self._current.next_deadline()
        deadlines = [deadline for deadline in (greeting, answer) if deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _expire(self) -> None:
        now = time.monotonic()
        self._members.expire(now)
        publication = self._current
        deadline = None if publication is None else publication.next_deadline()
        if publication is None or deadline is None or deadline > now:
            return
        if publication.update is not None:
            self._obey(publication, publication.update.expire(now))
            return
        for name in sorted(publication.awaited):
            why = f"no answer for {self._stall:g} s"
            publication.drop(name, why)
            self._dismiss(name, why)
        self._start(publication)

    def _end(self, why: str) -> None:
        while self._current is not None:
            self._finish(self._current, error=why)
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
        publication = self._current
        now = time.monotonic()
        match message:
            case Behind():
                member.version, member.generation, member.offered = -1, 0, (0, -1)
                self._post(self._help_late_engines)
            case _ if publication is None or message.update != publication.number:
                pass  # about an update that is over
            case Ready():
                self._ready(publication, member)
            case Refuse():
                self._refused(publication, member, message.why)
            case _ if publication.update is None:
                pass
            case BucketWritten():
                publication.note_stage(member, "broadcast", message.bucket, message.seconds)
                self._obey(publication, publication.update.written(member.name, message.bucket, message.digest, now))
            case BucketLoaded():
                publication.note_stage(member, "reload", message.bucket, message.seconds)
                answer = publication.update.loaded if message.intact else publication.update.damaged
                self._obey(publication, answer(member.name, message.bucket, now))
            case Committed():
                member.version, member.generation = publication.version, publication.generation
                publication.note_stage(member, "commit", -1)
                self._obey(publication, publication.update.committed(member.name, now))

    def _came(self, member: Member) -> None:
        if not member.is_source:
            self._post(self._help_late_engines)

    def _dismiss(self, name: str, why: str) -> None:
        member = self._members.find(name)
        if member is not None:
            self._members.dismiss(member, why)

    def _gone(self, member: Member, why: str) -> None:
        """Whoever it was has no part in the update any more."""
        publication = self._current
        if publication is None or not member.name:
            return
        if publication.update is not None:
            self._obey(publication, publication.update.lost(member.name, why, time.monotonic()))
        elif publication.drop(member.name, why):
            self._post(lambda: self._start_if_ready(publication))

    # --- an update ----------------------------------------------------------------------------------------------
    def _gather(self) -> None:
        """Ask everyone whether they take part."""
        publication = self._current
        if publication is None:
            return
        asked = [member for member in self._members if member.hello is not None and publication.asks(member)]
        begin = publication.begin(self._stall * (2 + len(asked)) if publication.confirmed else 0.0)
        publication.awaited = {member.name for member in asked}
        for member in asked:
            member.offered = (publication.generation, publication.version)
            self._members.send(member, begin)
        publication.ready_by = time.monotonic() + self._stall
        self._start_if_ready(publication)

    def _ready(self, publication: Publication, member: Member) -> None:
        if member.name in publication.awaited:
            publication.awaited.discard(member.name)
            publication.ready.add(member.name)
            self._start_if_ready(publication)

    def _refused(self, publication: Publication, member: Member, why: str) -> None:
        """It stays connected: the next update may suit it."""
        self._notify(f"{member.name} refuses version {publication.version}: {why}")
        if publication.update is not None:
            orders = publication.update.lost(member.name, why, time.monotonic())
            self._obey(publication, [order for order in orders if order != Drop(member.name, why)])
            return
        if publication.drop(member.name, why):
            self._start_if_ready(publication)

    def _start_if_ready(self, publication: Publication) -> None:
        if self._current is not publication or publication.update is not None:
            return
        if not any(member.is_source and member.name in publication.awaited for member in self._members):
            publication.handle.note_joined()
        if not publication.awaited:
            self._start(publication)

    def _start(self, publication: Publication) -> None:
        publication.handle.note_joined()
        members = {m.name: m for m in self._members if m.name in publication.ready}
        sources = [SELF, *sorted(name for name, member in members.items() if member.is_source)]
        engines = [name for name, member in members.items() if not member.is_source]
        schedule = make_schedule(
            publication.form, devices=len(sources), buckets=len(publication.buckets), from_host=True
        )
        publication.update = Update(
            schedule,
            sources,
            engines,
            self._stall,
            confirmed=publication.confirmed,
            commit_timeout_seconds=self._commit_timeout,
            source_timeout_seconds=self._source_timeout,
            writers=publication.writers,
        )
        self._obey(publication, publication.update.start(time.monotonic()))

    def _confirm(self, publication: Publication) -> None:
        publication.confirmed = True
        if self._current is publication and publication.update is not None:
            self._obey(publication, publication.update.confirm(time.monotonic()))

    def _cancel(self, publication: Publication, why: str, *, even_moved: bool = False) -> None:
        if self._next is publication:
            with self._lock:
                self._next = None
            publication.handle.finish(
                Published(version=publication.version, generation=publication.generation, error=why)
            )
            return
        is_moved = publication.update is not None and publication.update.moved
        if self._current is publication and (not is_moved or (even_moved and not publication.confirmed)):
            self._finish(publication, error=why)

    def _obey(self, publication: Publication, orders: Iterable[Order]) -> None:
        if publication.update is not None:
            publication.note_held(publication.update.held_buckets)
            if publication.update.moved:
                self._release(publication)
        by_name = {member.name: member for member in self._members}
        for order in orders:
            if self._current is not publication:
                return
            match order:
                case Write() if order.source == SELF:
                    self._to_write.put((publication, order))
                case Write():
                    ask = WriteBucket(update=publication.number, bucket=order.bucket, buffer=order.buffer)
                    self._order(by_name.get(order.source), "broadcast", order.bucket, ask)
                case Load():
                    ask_load = LoadBucket(
                        update=publication.number, bucket=order.bucket, buffer=order.buffer, digest=order.digest
                    )
                    self._order(by_name.get(order.engine), "reload", order.bucket, ask_load)
                case Commit():
                    self._order(by_name.get(order.engine), "commit", -1, CommitUpdate(update=publication.number))
                case Drop():
                    self._notify(f"{order.member} was dropped from the update to {publication.version}: {order.why}")
                    self._dismiss(order.member, order.why)
                case Abandon():
                    self._finish(publication, error=order.why)
                case Finished():
                    self._finish(publication, engines=order.engines)

    def _release(self, publication: Publication) -> None:
        """Nothing more is read from any source."""
        if not publication.released:
            publication.released = True
            publication.handle.note_read()
            for member in [m for m in self._members if m.is_source and m.name in publication.ready]:
                self._members.send(member, Release(update=publication.number))

    def _order(self, member: Member | None, kind: str, bucket: int, message: msgspec.Struct) -> None:
        if member is not None:
            member.ordered_ns[kind, bucket] = time.monotonic_ns()
            self._members.send(member, message)

    def _finish(self, publication: Publication, *, engines: tuple[str, ...] = (), error: str = "") -> None:
        if self._current is not publication:
            return
        with self._lock:
            self._current, self._next = self._next, None
            following = self._current
        if not engines and not error:
            error = "no engine took it"
        if error:
            for member in [m for m in self._members if m.name in publication.ready]:
                self._members.send(member, AbandonUpdate(update=publication.number, why=error))
        result = publication.result(engines, error)
        what = f"version {publication.version}, {describe_bytes(result.total_bytes)} in {result.seconds:.2f} s"
        who = "1 engine has it" if len(engines) == 1 else f"{len(engines)} engines have it"
        self._notify(f"{what}: {error}" if error else f"{what}: {who}")
        publication.handle.finish(result)
        if following is not None:
            self._post(self._gather)
        elif self._lasting is not None and not self._closing:
            self._post(self._help_late_engines)

    def _help_late_engines(self) -> None:
        """Engines that came after, or fell out of, the last update get its version by themselves."""
        if self._lasting is None or self._closing:
            return
        source, version, generation = self._lasting
        late = [
            engine.name
            for engine in self._members.engines()
            if (generation, version) not in ((engine.generation, engine.version), engine.offered)
        ]
        with self._lock:
            if self._current is not None or not late:
                return
            self._current = prepare_publication(
                next(self._numbers),
                source,
                version,
                generation,
                form=self._form,
                handle=Handle(),
                only=late,
                buffer_bytes=self._bucket_bytes,
                is_late=True,
            )
        self._gather()

    # --- the writer ---------------------------------------------------------------------------------------------
    def _write_buckets(self) -> None:
        while (task := self._to_write.get()) is not None:
            publication, order = task
            if self._current is not publication:
                continue
            start_ns = time.monotonic_ns()
            try:
                digest = publication.source.fill(publication.buckets[order.bucket], self._buffers[order.buffer].view)
            except Exception as error:  # whatever a source runs into is the update's failure, not the publisher's
                self._post(functools.partial(self._self_lost, publication, f"{type(error).__name__}: {error}"))
                continue
            stage = Stage("broadcast", order.bucket, order.buffer, SELF, start_ns, time.monotonic_ns())
            self._post(functools.partial(self._self_written, publication, stage, digest))

    def _self_written(self, publication: Publication, stage: Stage, digest: int) -> None:
        if self._current is publication and publication.update is not None:
            publication.stages.append(stage)
            self._obey(publication, publication.update.written(SELF, stage.bucket, digest, time.monotonic()))

    def _self_lost(self, publication: Publication, why: str) -> None:
        if self._current is publication and publication.update is not None:
            self._obey(publication, publication.update.lost_source(SELF, why, time.monotonic()))
