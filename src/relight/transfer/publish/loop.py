"""A publisher's loop: one thread owns every connection and the decisions about updates; it never copies a tensor."""

import contextlib
import functools
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relight.transfer.io.buffers import Buffer, close_buffers
from relight.transfer.io.messages import Welcome
from relight.transfer.plan.schedule import Form
from relight.transfer.plan.update.result import Stage
from relight.transfer.plan.update.update import Timeouts
from relight.transfer.publish.bucket_writer import BucketWriter
from relight.transfer.publish.mailbox import Mailbox
from relight.transfer.publish.members import Member, Members
from relight.transfer.publish.order_sender import OrderSender
from relight.transfer.publish.publication import Publication
from relight.transfer.publish.updates import Updates


class PublisherLoop:
    """Serves the members of one publisher until `close`. Owns the listener, the buffers and both threads."""

    def __init__(
        self,
        path: Path,
        listener: socket.socket,
        buffers: Sequence[Buffer],
        *,
        timeouts: Timeouts,
        form: Form,
        bucket_bytes: int,
        on_notice: Callable[[str], None],
    ) -> None:
        """Begin to serve at `listener`, whose socket is at `path`. See `Publisher` for the other arguments."""
        self._path = path
        self._listener = listener
        self._buffers = buffers
        self._on_notice = on_notice
        self._inode = os.stat(path).st_ino
        self._selector = selectors.DefaultSelector()
        self.members = Members(
            self._selector,
            listener,
            Welcome(buffer_bytes=bucket_bytes),
            [buffer.descriptor for buffer in buffers],
            heard=self._heard,
            came=self._came,
            gone=self._gone,
            notify=self._notify,
        )
        self._mailbox = Mailbox(self._selector)
        self._writer = BucketWriter(buffers, written=self._written, failed=self._write_failed)
        self.updates = Updates(
            self.members,
            self._mailbox,
            OrderSender(self.members, self._writer),
            timeouts,
            form,
            bucket_bytes,
            notify=self._notify,
        )
        self._thread = threading.Thread(target=self._run, name="relight-publisher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop at once; an update under way ends without effect. From any thread."""
        if self.updates.close():
            self._mailbox.post(lambda: None)
            self._thread.join()

    def _run(self) -> None:
        why = "the publisher was closed"
        try:
            while not self.updates.is_closed:
                self._turn(self._patience())
                if self._patience() == 0.0:
                    self._turn(0.0)  # a member that has answered meanwhile is not late
                    now = time.monotonic()
                    self.members.expire(now)
                    self.updates.expire(now)
        except Exception as error:  # a defect of relight must not leave anyone waiting
            why = f"the publisher failed ({error!r}); this is a defect in relight"
            self._notify(why)
        finally:
            self.updates.close()
            self._end(why)

    def _turn(self, patience_seconds: float | None) -> None:
        for key, events in self._selector.select(patience_seconds):
            if events & selectors.EVENT_WRITE:
                self.members.flush(key.fd)
            if events & selectors.EVENT_READ:
                key.data(key.fileobj)
        self._mailbox.run_posted()

    def _patience(self) -> float | None:
        """Return the seconds until a member is late; None: nothing is waited for."""
        found = (self.members.greeting_deadline(), self.updates.next_deadline())
        deadlines = [deadline for deadline in found if deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _end(self, why: str) -> None:
        self.updates.end(why)
        for member in self.members:
            self.members.dismiss(member, why)
        self._selector.close()
        self._listener.close()
        self._mailbox.close()
        with contextlib.suppress(OSError):  # unless another publisher listens there by now
            if os.stat(self._path).st_ino == self._inode:
                self._path.unlink()
        self._writer.close()
        close_buffers(self._buffers)

    def _notify(self, text: str) -> None:
        with contextlib.suppress(Exception):  # an error in the owner's callback must not end the updates
            self._on_notice(text)

    # --- events, for the updates ----------------------------------------------------------------------------------
    def _heard(self, member: Member, message: Any) -> None:
        self.updates.hear(member, message)

    def _came(self, member: Member) -> None:
        if not member.is_source:
            self._mailbox.post(self.updates.help_late_engines)

    def _gone(self, member: Member, why: str) -> None:
        self.updates.gone(member, why)

    def _written(self, publication: Publication, stage: Stage, digest: int, is_elsewhere: bool) -> None:
        self._mailbox.post(functools.partial(self.updates.written, publication, stage, digest, is_elsewhere))

    def _write_failed(self, publication: Publication, why: str) -> None:
        self._mailbox.post(functools.partial(self.updates.source_failed, publication, why))
