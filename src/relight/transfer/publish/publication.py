"""The update that a publisher works on: what is published, who takes part, what has happened so far. No torch."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from relight.transfer.io.messages import Begin
from relight.transfer.plan.division import Division
from relight.transfer.plan.manifest import Manifest
from relight.transfer.plan.plan import Bucket, bucket_bytes_for, plan_buckets
from relight.transfer.plan.schedule import IPC_BUFFERS, Form, make_schedule
from relight.transfer.plan.update.result import SELF, Published, Stage, UpdateProgress
from relight.transfer.plan.update.update import Timeouts, Update
from relight.transfer.plan.update.way import Way, WayChoice, choose_way
from relight.transfer.publish.handle import Handle
from relight.transfer.publish.members import Member
from relight.transfer.publish.source import DeviceSource, Lender, Source, why_copied

NOT_CHOSEN = WayChoice(Way.COPIED, "")


@dataclass
class Publication:
    """The update that the loop works on."""

    number: int
    source: Source
    manifest: Manifest  # as engines get it: with parts, if the weights are divided
    writers: tuple[tuple[str, ...], ...] | None  # of each bucket, if the weights are divided
    version: int
    generation: int
    form: Form
    handle: Handle
    only: frozenset[str] | None  # engines; None: all
    is_late: bool  # begun here for engines that came after an update, not by the owner
    bucket_bytes: int
    buckets: tuple[Bucket, ...]
    started_ns: int
    confirmed: bool = True
    awaited: set[str] = field(default_factory=set)  # members that have yet to say whether they take part
    ready: set[str] = field(default_factory=set)  # members that do
    unable: dict[str, str] = field(default_factory=dict)  # of these: why it cannot take what is offered
    choice: WayChoice = NOT_CHOSEN
    # Buckets that were written, and whether each is elsewhere than in a shared buffer.
    elsewhere: dict[int, bool] = field(default_factory=dict)
    ready_by: float = 0.0  # when awaited members are late, of CLOCK_MONOTONIC; 0: none was asked yet
    released: bool = False  # sources know that nothing more is read
    update: Update | None = None  # once every member has said whether it takes part
    dropped: dict[str, str] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)

    def asks(self, member: Member) -> bool:
        """Return whether the member is asked to take part: an engine that the update is for, or a source that holds
        parts, or all, as the publisher itself does."""
        if member.is_source:
            return (member.held is not None) == (self.writers is not None)
        return self.only is None or member.name in self.only

    def next_deadline(self) -> float | None:
        """Return when a member is late: with a bucket or, before the first one, with saying whether it takes part."""
        return self.ready_by or None if self.update is None else self.update.next_deadline()

    def drop(self, name: str, why: str) -> bool:
        """Drop a member before the first bucket. False: it was not asked to take part."""
        if name not in self.awaited | self.ready:
            return False
        self.awaited.discard(name)
        self.ready.discard(name)
        self.dropped.setdefault(name, why)
        return True

    def begin_message(self, patience_seconds: float) -> Begin:
        """Return the message that asks members to take part."""
        return Begin(
            update=self.number,
            version=self.version,
            generation=self.generation,
            bucket_bytes=self.bucket_bytes,
            manifest=self.manifest,
            patience_seconds=patience_seconds,
            lent_bytes=self.source.memory.nbytes if isinstance(self.source, Lender) else 0,
            device=self.source.device if isinstance(self.source, DeviceSource) else "",
            handles=self.source.handles if isinstance(self.source, DeviceSource) else (),
            near=self.source.near if isinstance(self.source, DeviceSource) else "",
        )

    def lent_memory(self) -> list[int]:
        """Return the descriptor of the memory that is lent, if any is."""
        return [self.source.memory.descriptor] if isinstance(self.source, Lender) else []

    def create_update(self, members: Iterable[Member], timeouts: Timeouts) -> Update:
        """Begin to move buckets, with those of `members` that are ready."""
        taking_part = [member for member in members if member.name in self.ready]
        sources = [SELF, *sorted(member.name for member in taking_part if member.is_source)]
        engines = [member.name for member in taking_part if not member.is_source]
        offered = Way.COPIED
        if isinstance(self.source, Lender):
            offered = Way.LENT
        elif isinstance(self.source, DeviceSource):
            offered = Way.ON_DEVICE
        self.choice = choose_way(offered, why_copied(self.source), {name: self.unable[name] for name in self.ready})
        self.update = Update(
            make_schedule(self.form, devices=len(sources), buckets=len(self.buckets), from_host=True),
            sources,
            engines,
            timeouts,
            confirmed=self.confirmed,
            writers=self.writers,
        )
        return self.update

    def write(self, bucket: int, buffer: int, view: memoryview) -> tuple[int, bool]:
        """Lend a bucket, or copy it into a buffer; return its digest, and whether it is elsewhere than in `view`.

        A lent one that is to be written again is copied: an engine could not read it where it lies, or it has changed.
        """
        if self.choice.way is Way.LENT and bucket not in self.elsewhere and isinstance(self.source, Lender):
            return self.source.lend(self.buckets[bucket]), True
        if self.choice.way is Way.ON_DEVICE and isinstance(self.source, DeviceSource):
            return self.source.place(self.buckets[bucket], buffer), True
        return self.source.fill(self.buckets[bucket], view), False

    def note_held(self, buckets: int) -> None:
        """Every remaining engine holds the first `buckets` buckets."""
        before = self.handle.progress()
        if buckets > before.held_buckets:
            pieces = (piece for bucket in self.buckets[before.held_buckets : buckets] for piece in bucket.pieces)
            held = before.held_bytes + sum(piece.nbytes for piece in pieces)
            self.handle.note_progress(
                UpdateProgress(
                    held_buckets=buckets,
                    total_buckets=before.total_buckets,
                    held_bytes=held,
                    total_bytes=before.total_bytes,
                )
            )

    def note_stage(self, member: Member, kind: str, bucket: int, seconds: float | None = None) -> None:
        """`seconds`: how long it took, as the other side says; None: since it was ordered."""
        end_ns = time.monotonic_ns()
        start_ns = member.ordered_ns.pop((kind, bucket), end_ns)
        if seconds is not None:
            start_ns = max(start_ns, end_ns - (round(seconds * 1e9) if 0.0 <= seconds < 1e6 else 0))
        buffer = -1 if bucket < 0 else bucket % IPC_BUFFERS
        self.stages.append(Stage(kind, bucket, buffer, member.name, start_ns, end_ns))

    def result(self, engines: tuple[str, ...], error: str) -> Published:
        """Return how the update ended."""
        return Published(
            version=self.version,
            generation=self.generation,
            engines=engines,
            dropped={**self.dropped, **(self.update.dropped if self.update is not None else {})},
            error=error,
            total_bytes=self.manifest.total_bytes,
            buckets=len(self.buckets),
            bucket_bytes=self.bucket_bytes,
            started_ns=self.started_ns,
            seconds=(time.monotonic_ns() - self.started_ns) / 1e9,
            stages=tuple(self.stages),
            way=self.choice.way,
            why=self.choice.why,
        )


def prepare_publication(
    number: int,
    source: Source,
    version: int,
    generation: int,
    *,
    form: Form,
    handle: Handle,
    only: Iterable[str] | None,
    buffer_bytes: int,
    confirmed: bool = True,
    is_late: bool = False,
    division: Division | None = None,
) -> Publication:
    """Plan an update; see `Publisher.begin`. Raises UsageError for weights that cannot be moved."""
    started_ns = time.monotonic_ns()
    manifest = source.manifest if division is None else division.manifest
    total_bytes = manifest.total_bytes
    bucket_bytes = bucket_bytes_for(total_bytes, buffer_bytes)
    buckets = plan_buckets(manifest, bucket_bytes)
    handle.note_progress(UpdateProgress(total_buckets=len(buckets), total_bytes=total_bytes))
    return Publication(
        number=number,
        source=source,
        manifest=manifest,
        writers=None if division is None else division.writers(buckets),
        version=version,
        generation=generation,
        form=form,
        handle=handle,
        only=None if only is None else frozenset(only),
        is_late=is_late,
        bucket_bytes=bucket_bytes,
        buckets=buckets,
        started_ns=started_ns,
        confirmed=confirmed,
    )
