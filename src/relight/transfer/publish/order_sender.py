"""Orders of an update, as messages to members or as work for the writer. Runs on the loop's thread."""

import time

import msgspec

from relight.transfer.io.messages import AbandonUpdate, CommitUpdate, EngineHello, LoadBucket, Release, WriteBucket
from relight.transfer.plan.update.orders import Commit, Load, Write
from relight.transfer.plan.update.result import SELF
from relight.transfer.publish.bucket_writer import BucketWriter
from relight.transfer.publish.members import Member, Members
from relight.transfer.publish.publication import Publication


class OrderSender:
    """Sends the messages of a publication to the members that take part."""

    def __init__(self, members: Members, writer: BucketWriter) -> None:
        """`writer` fills the buckets of which the publisher itself is the source."""
        self._members, self._writer = members, writer

    def ask(self, publication: Publication, stall_seconds: float) -> None:
        """Ask every member that the publication is for whether it takes part."""
        asked = [member for member in self._members if member.hello is not None and publication.asks(member)]
        begin = publication.begin_message(stall_seconds * (2 + len(asked)) if publication.confirmed else 0.0)
        lent = publication.lent_memory()
        publication.awaited = {member.name for member in asked}
        for member in asked:
            member.offered = (publication.generation, publication.version)
            borrows = isinstance(member.hello, EngineHello) and member.hello.borrows
            self._members.send(member, begin, lent if borrows else [])
        publication.ready_by = time.monotonic() + stall_seconds

    def carry_out(self, publication: Publication, order: Write | Load | Commit) -> None:
        """Send one order to its member; ignored if that is gone."""
        number = publication.number
        match order:
            case Write() if order.source == SELF:
                self._writer.write(publication, order)
            case Write():
                write = WriteBucket(update=number, bucket=order.bucket, buffer=order.buffer)
                self._send(order.source, "broadcast", order.bucket, write)
            case Load():
                load = LoadBucket(
                    update=number,
                    bucket=order.bucket,
                    buffer=order.buffer,
                    digest=order.digest,
                    is_elsewhere=publication.elsewhere.get(order.bucket, False),
                )
                self._send(order.engine, "reload", order.bucket, load)
            case Commit():
                self._send(order.engine, "commit", -1, CommitUpdate(update=number))

    def release(self, publication: Publication) -> None:
        """Nothing more is read from any source: say so, once."""
        if not publication.released:
            publication.released = True
            publication.handle.note_read()
            for member in self._taking_part(publication):
                if member.is_source:
                    self._members.send(member, Release(update=publication.number))

    def abandon(self, publication: Publication, why: str) -> None:
        """End the update at every member without effect."""
        for member in self._taking_part(publication):
            self._members.send(member, AbandonUpdate(update=publication.number, why=why))

    def dismiss(self, name: str, why: str) -> None:
        """Close the connection of a member, if it is still there."""
        member = self._members.find(name)
        if member is not None:
            self._members.dismiss(member, why)

    def _taking_part(self, publication: Publication) -> list[Member]:
        return [member for member in self._members if member.name in publication.ready]

    def _send(self, name: str, kind: str, bucket: int, message: msgspec.Struct) -> None:
        member = self._members.find(name)
        if member is not None:
            member.ordered_ns[kind, bucket] = time.monotonic_ns()
            self._members.send(member, message)
