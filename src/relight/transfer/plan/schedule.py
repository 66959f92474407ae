"""Buckets to a schedule: the operations of each device, with their buffers and dependencies. Pure, without torch.

A schedule is a value: a tuple of operations, each with the operations it must wait for. The engine runs it by these
dependencies alone, the cost model gives each operation a time, the drawing puts them on a page.

Each device has one H2D buffer and two IPC buffers. In a round every device copies its own bucket from host memory
into its H2D buffer; then they take turns as the source of a broadcast into one IPC buffer of every device, while the
engines reload the bucket before from the other. On a host whose "devices" are host memory (`from_host`) the source
writes straight into the IPC buffers, and there is no H2D operation.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from relight.errors import UsageError

IPC_BUFFERS = 2


class Form(StrEnum):
    """The overlap of the stages."""

    SERIAL = "serial"  # one operation after the other
    TWO_STAGE = "two-stage"  # the reload of a bucket beside the broadcast of the next
    THREE_STAGE = "three-stage"  # and the next round's host-to-device copies beside both


class Kind(StrEnum):
    H2D = "h2d"  # the source copies its bucket from host memory into its H2D buffer
    BROADCAST = "broadcast"  # from the source into an IPC buffer of every device
    RELOAD = "reload"  # every engine takes the bucket out of that IPC buffer


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """One use of one buffer. `after` are the indices of the operations that must be over before it begins."""

    index: int
    kind: Kind
    bucket: int
    source: int  # the device whose bucket it is
    buffer: int  # of the IPC buffers; -1: the source's H2D buffer
    round: int
    after: tuple[int, ...]


class Schedule(msgspec.Struct, frozen=True, array_like=True):
    """All operations of one update, in an order in which they could be run one by one."""

    form: Form
    devices: int
    buckets: int
    from_host: bool
    operations: tuple[Operation, ...]

    @property
    def rounds(self) -> int:
        return -(-self.buckets // self.devices)


def make_schedule(form: Form, *, devices: int, buckets: int, from_host: bool = False) -> Schedule:
    """The schedule for `buckets` buckets that `devices` devices hold in turns: bucket k is device k mod N's.

    Raises UsageError for a number of devices below 1 or of buckets below 0.
    """
    if devices < 1 or buckets < 0:
        raise UsageError(f"{buckets} buckets on {devices} devices: at least one device, and no negative number")
    builder = _Builder(form, devices, buckets, from_host=from_host)
    for first in range(0, buckets, devices):
        builder.add_round(range(first, min(first + devices, buckets)))
    return Schedule(form, devices, buckets, from_host, tuple(builder.operations))


class _Builder:
    def __init__(self, form: Form, devices: int, buckets: int, *, from_host: bool) -> None:
        self.form, self.devices, self.buckets, self.from_host = form, devices, buckets, from_host
        self.operations: list[Operation] = []
        self._copied: dict[int, int] = {}  # bucket -> its H2D operation
        self._sent: dict[int, int] = {}  # bucket -> its BROADCAST
        self._reloaded: dict[int, int] = {}  # bucket -> its RELOAD

    def add_round(self, buckets: Iterable[int]) -> None:
        buckets = list(buckets)
        if not self.from_host:
            for bucket in buckets:
                self._copied[bucket] = self._add(Kind.H2D, bucket, -1, self._before_copy(bucket, buckets[0]))
        for bucket in buckets:
            self._sent[bucket] = self._add(Kind.BROADCAST, bucket, bucket % IPC_BUFFERS, self._before_send(bucket))
            if self.form is not Form.SERIAL and bucket:
                self._reload(bucket - 1)
            if self.form is Form.SERIAL or bucket == self.buckets - 1:
                self._reload(bucket)

    def _reload(self, bucket: int) -> None:
        before = self._reloaded.get(bucket - 1)  # an engine reloads one bucket at a time
        after = [self._sent[bucket]] + ([] if before is None else [before])
        self._reloaded[bucket] = self._add(Kind.RELOAD, bucket, bucket % IPC_BUFFERS, after)

    def _before_copy(self, bucket: int, first: int) -> list[int]:
        if not first:
            return []
        if self.form is Form.THREE_STAGE:
            return [self._sent[bucket - self.devices]]  # its own H2D buffer is free
        # The device-wide bus belongs to one kind of traffic at a time: all broadcasts of the round before are over.
        last = self._sent if self.form is Form.TWO_STAGE else self._reloaded
        return [last[first - 1]]

    def _before_send(self, bucket: int) -> list[int]:
        after = []
        if not self.from_host:
            after.append(self._copied[bucket])
            if self.form is not Form.THREE_STAGE and bucket % self.devices == 0:
                # The round's copies go together, before its first broadcast.
                others = range(bucket + 1, min(bucket + self.devices, self.buckets))
                after += [self._copied[other] for other in others]
        if bucket:
            after.append(self._sent[bucket - 1])  # one broadcast at a time
        held = bucket - (1 if self.form is Form.SERIAL else IPC_BUFFERS)
        if held >= 0:
            after.append(self._reloaded[held])  # the buffer (serial: everybody) is free
        return after

    def _add(self, kind: Kind, bucket: int, buffer: int, after: Iterable[int]) -> int:
        index = len(self.operations)
        source = bucket % self.devices
        self.operations.append(
            Operation(index, kind, bucket, source, buffer, bucket // self.devices, tuple(sorted(set(after))))
        )
        return index
