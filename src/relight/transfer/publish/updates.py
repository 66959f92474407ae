"""The updates of a publisher, one at a time, on its loop's thread: messages to `Update`, and its orders to members."""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from relight.errors import TransferError
from relight.transfer.io import messages as msg
from relight.transfer.plan.manifest import describe_bytes
from relight.transfer.plan.schedule import Form
from relight.transfer.plan.update.orders import Abandon, Commit, Drop, Finished, Load, Order, Write
from relight.transfer.plan.update.result import SELF, Published, Stage
from relight.transfer.plan.update.update import Timeouts
from relight.transfer.publish.handle import Handle
from relight.transfer.publish.mailbox import Mailbox
from relight.transfer.publish.members import Member, Members
from relight.transfer.publish.order_sender import OrderSender
from relight.transfer.publish.publication import Publication, prepare_publication
from relight.transfer.publish.source import Source


@dataclass(frozen=True)
class Lasting:
    """Weights that do not change: engines that come late may get them at any time."""

    source: Source
    version: int
    generation: int


class Updates:
    """The update under way and the next one. Methods run on the loop's thread, unless they say otherwise."""

    def __init__(
        self,
        members: Members,
        mailbox: Mailbox,
        sender: OrderSender,
        timeouts: Timeouts,
        form: Form,
        bucket_bytes: int,
        notify: Callable[[str], None],
    ) -> None:
        """`form` and `bucket_bytes` are those of updates for engines that come late."""
        self.numbers = itertools.count(1)
        self.current: Publication | None = None
        self._members, self._mailbox, self._sender = members, mailbox, sender
        self._timeouts, self._form, self._bucket_bytes = timeouts, form, bucket_bytes
        self._notify = notify
        self._lock = threading.Lock()
        self._next: Publication | None = None  # the owner's, while a late engine is helped
        self._lasting: Lasting | None = None
        self._is_closed = False

    def submit(self, publication: Publication, lasting: Lasting | None) -> None:
        """Make this the next update; from any thread. Raises TransferError if one is under way, or after `close`."""
        handle = publication.handle
        with self._lock:
            if self._is_closed:
                raise TransferError("the publisher is closed")
            busy = self._next or self.current
            if busy is not None and not busy.is_late:
                raise TransferError(f"the update to version {busy.version} is under way; wait for it first")
            handle.on_confirm = lambda: self._mailbox.post(functools.partial(self.confirm, publication))
            handle.on_cancel = lambda why: self._mailbox.post(functools.partial(self.cancel, publication, why))
            handle.on_abandon = lambda why: self._mailbox.post(
                functools.partial(self.cancel, publication, why, even_moved=True)
            )
            if self.current is None:
                self.current = publication
            else:
                self._next = publication
            self._lasting = lasting
        self._mailbox.post(self.gather)

    @property
    def is_closed(self) -> bool:
        """True if there will be no more updates."""
        return self._is_closed

    def close(self) -> bool:
        """Accept no more updates; from any thread. False: that was so before."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            return not was_closed

    def end(self, why: str) -> None:
        """End the update under way, and the one after it, without effect."""
        while self.current is not None:
            self._finish(self.current, error=why)

    def next_deadline(self) -> float | None:
        """Seconds of CLOCK_MONOTONIC by which `expire` must be called; None: nothing is waited for."""
        return None if self.current is None else self.current.next_deadline()

    def expire(self, now: float) -> None:
        """Drop the members whose time is over."""
        publication, deadline = self.current, self.next_deadline()
        if publication is None or deadline is None or deadline > now:
            return
        if publication.update is not None:
            self._obey(publication, publication.update.expire(now))
            return
        for name in sorted(publication.awaited):
            why = f"no answer for {self._timeouts.stall_seconds:g} s"
            publication.drop(name, why)
            self._sender.dismiss(name, why)
        self._start(publication)

    def hear(self, member: Member, message: Any) -> None:
        """Handle a message of a member that has been welcomed."""
        publication = self.current
        now = time.monotonic()
        match message:
            case msg.Behind():
                member.version, member.generation, member.offered = -1, 0, (0, -1)
                self._mailbox.post(self.help_late_engines)
            case _ if publication is None or message.update != publication.number:
                pass  # about an update that is over
            case msg.Ready():
                self._ready(publication, member, message.unable)
            case msg.Refuse():
                self._refused(publication, member, message.why)
            case _ if publication.update is None:
                pass
            case msg.BucketWritten():
                publication.note_stage(member, "broadcast", message.bucket, message.seconds)
                self._obey(publication, publication.update.written(member.name, message.bucket, message.digest, now))
            case msg.BucketLoaded():
                publication.note_stage(member, "reload", message.bucket, message.seconds)
                answer = publication.update.loaded if message.intact else publication.update.damaged
                self._obey(publication, answer(member.name, message.bucket, now))
            case msg.Committed():
                member.version, member.generation = publication.version, publication.generation
                publication.note_stage(member, "commit", -1)
                self._obey(publication, publication.update.committed(member.name))

    def gone(self, member: Member, why: str) -> None:
        """A member's connection was closed: it has no part in the update any more."""
        publication = self.current
        if publication is None or not member.name:
            return
        if publication.update is not None:
            self._obey(publication, publication.update.lost(member.name, why, time.monotonic()))
        elif publication.drop(member.name, why):
            self._mailbox.post(lambda: self._start_if_ready(publication))

    def gather(self) -> None:
        """Ask every member whether it takes part in the current update."""
        publication = self.current
        if publication is None:
            return
        self._sender.ask(publication, self._timeouts.stall_seconds)
        self._start_if_ready(publication)

    def _ready(self, publication: Publication, member: Member, unable: str) -> None:
        if member.name in publication.awaited:
            publication.awaited.discard(member.name)
            publication.unable[member.name] = unable
            publication.ready.add(member.name)
            self._start_if_ready(publication)

    def _refused(self, publication: Publication, member: Member, why: str) -> None:
        """Keep the member connected: the next update may suit it."""
        self._notify(f"{member.name} refuses version {publication.version}: {why}")
        if publication.update is not None:
            orders = publication.update.lost(member.name, why, time.monotonic())
            self._obey(publication, [order for order in orders if order != Drop(member.name, why)])
            return
        if publication.drop(member.name, why):
            self._start_if_ready(publication)

    def _start_if_ready(self, publication: Publication) -> None:
        if self.current is not publication or publication.update is not None:
            return
        if not any(member.is_source and member.name in publication.awaited for member in self._members):
            publication.handle.note_joined()
        if not publication.awaited:
            self._start(publication)

    def _start(self, publication: Publication) -> None:
        publication.handle.note_joined()
        update = publication.create_update(self._members, self._timeouts)
        self._obey(publication, update.start(time.monotonic()))

    def confirm(self, publication: Publication) -> None:
        """The version will last: engines that hold it may take it."""
        publication.confirmed = True
        if self.current is publication and publication.update is not None:
            self._obey(publication, publication.update.confirm(time.monotonic()))

    def cancel(self, publication: Publication, why: str, *, even_moved: bool = False) -> None:
        """Give the update up, unless engines hold all of it; `even_moved`: also then, if it was not confirmed."""
        if self._next is publication:
            with self._lock:
                self._next = None
            publication.handle.finish(
                Published(version=publication.version, generation=publication.generation, error=why)
            )
            return
        is_moved = publication.update is not None and publication.update.moved
        if self.current is publication and (not is_moved or (even_moved and not publication.confirmed)):
            self._finish(publication, error=why)

    def _obey(self, publication: Publication, orders: Iterable[Order]) -> None:
        if publication.update is not None:
            publication.note_held(publication.update.held_buckets)
            if publication.update.moved:
                self._sender.release(publication)
        for order in orders:
            if self.current is not publication:
                return
            match order:
                case Write() | Load() | Commit():
                    self._sender.carry_out(publication, order)
                case Drop():
                    self._notify(f"{order.member} was dropped from the update to {publication.version}: {order.why}")
                    self._sender.dismiss(order.member, order.why)
                case Abandon():
                    self._finish(publication, error=order.why)
                case Finished():
                    self._finish(publication, engines=order.engines)

    def _finish(self, publication: Publication, *, engines: tuple[str, ...] = (), error: str = "") -> None:
        if self.current is not publication:
            return
        with self._lock:
            self.current, self._next = self._next, None
            following = self.current
        if not engines and not error:
            error = "no engine took it"
        if error:
            self._sender.abandon(publication, error)
        result = publication.result(engines, error)
        what = f"version {publication.version}, {describe_bytes(result.total_bytes)} in {result.seconds:.2f} s"
        who = "1 engine has it" if len(engines) == 1 else f"{len(engines)} engines have it"
        self._notify(f"{what}: {error}" if error else f"{what}: {who}")
        publication.handle.finish(result)
        if following is not None:
            self._mailbox.post(self.gather)
        elif self._lasting is not None and not self._is_closed:
            self._mailbox.post(self.help_late_engines)

    def help_late_engines(self) -> None:
        """Start an update of the engines that came after the last one, or were dropped from it."""
        if self._lasting is None or self._is_closed:
            return
        source, version, generation = self._lasting.source, self._lasting.version, self._lasting.generation
        late = [
            engine.name
            for engine in self._members.engines()
            if (generation, version) not in ((engine.generation, engine.version), engine.offered)
        ]
        with self._lock:
            if self.current is not None or not late:
                return
            self.current = prepare_publication(
                next(self.numbers),
                source,
                version,
                generation,
                form=self._form,
                handle=Handle(),
                only=late,
                buffer_bytes=self._bucket_bytes,
                is_late=True,
            )
        self.gather()

    def written(self, publication: Publication, stage: Stage, digest: int, is_elsewhere: bool) -> None:
        """The publisher's own writer has filled a shared buffer with a bucket or, elsewhere, lent or placed it."""
        if self.current is publication and publication.update is not None:
            publication.stages.append(stage)
            publication.elsewhere[stage.bucket] = is_elsewhere
            self._obey(publication, publication.update.written(SELF, stage.bucket, digest, time.monotonic()))

    def source_failed(self, publication: Publication, why: str) -> None:
        """The publisher's own writer could not fill a bucket."""
        if self.current is publication and publication.update is not None:
            self._obey(publication, publication.update.lost_source(SELF, why, time.monotonic()))
