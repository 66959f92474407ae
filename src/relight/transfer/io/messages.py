"""Messages of publisher, sources and engines. msgpack, typed, bounded; buffers travel as descriptors."""

import msgspec

from relight.transfer.plan.division import ShardSpec
from relight.transfer.plan.manifest import Manifest

# 2: weights divided over sources; 3: over stages of a pipeline; 4: messages renamed; 5: buckets are lent
PROTOCOL_VERSION = 5
MAX_NAME = 200


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class EngineHello(_Message, frozen=True, kw_only=True):
    """An engine's first words. `wants`: what it can take, if it knows; otherwise anything is offered to it."""

    protocol_version: int
    name: str
    pid: int
    version: int  # that it answers with; -1: none yet
    generation: int
    wants: Manifest | None = None
    borrows: bool = False  # it reads weights that are lent, and takes their descriptor with each Begin


class Behind(_Message, frozen=True, kw_only=True):
    """A relay that an engine has joined: it has no version any more, as if it had just connected."""


class SourceHello(_Message, frozen=True, kw_only=True):
    """A process that holds the publisher's weights, or parts of them; it writes buckets when ordered to."""

    protocol_version: int
    name: str
    pid: int
    held: ShardSpec | None = None  # that, and nothing else; None: it holds all


class Welcome(_Message, frozen=True, kw_only=True):
    """The descriptors of the IPC buffers come with it."""

    buffer_bytes: int


class Begin(_Message, frozen=True, kw_only=True):
    """An update begins. Which bytes lie where in which bucket follows from the manifest and `bucket_bytes`."""

    update: int
    version: int
    generation: int
    bucket_bytes: int
    manifest: Manifest
    patience_seconds: float = 0.0  # no order for so long: the publisher is frozen; 0: it may wait for its owner
    lent_bytes: int = 0  # of shared memory that has all weights, laid out as buckets end to end; 0: none is lent
    device: str = ""  # the one whose memory has the buffers; empty: none has
    handles: tuple[bytes, ...] = ()  # of these buffers
    near: str = ""  # why engines on other devices may not import them; empty: they may


class Ready(_Message, frozen=True, kw_only=True):
    """The engine (or source) takes part."""

    update: int
    unable: str = "it uses shared buffers only"  # why it cannot take what Begin offers besides; empty: it can


class Refuse(_Message, frozen=True, kw_only=True):
    """The answer of a member that takes no part, or no longer, and why. Nothing of it was changed."""

    update: int
    why: str


class WriteBucket(_Message, frozen=True, kw_only=True):
    update: int
    bucket: int
    buffer: int


class Release(_Message, frozen=True, kw_only=True):
    """To a source: nothing more is read from its weights for this update."""

    update: int


class BucketWritten(_Message, frozen=True, kw_only=True):
    update: int
    bucket: int
    digest: int
    seconds: float


class LoadBucket(_Message, frozen=True, kw_only=True):
    update: int
    bucket: int
    buffer: int
    digest: int
    is_elsewhere: bool = False  # it is in the memory that Begin offers, not in the shared buffer


class BucketLoaded(_Message, frozen=True, kw_only=True):
    update: int
    bucket: int
    intact: bool
    seconds: float


class CommitUpdate(_Message, frozen=True, kw_only=True):
    update: int


class Committed(_Message, frozen=True, kw_only=True):
    update: int
    version: int


class AbandonUpdate(_Message, frozen=True, kw_only=True):
    """Forget what was loaded; answer with the version you have."""

    update: int
    why: str


class Dismissed(_Message, frozen=True, kw_only=True):
    """The publisher closes this connection, and says why."""

    why: str


ToPublisher = EngineHello | SourceHello | Behind | Ready | Refuse | BucketWritten | BucketLoaded | Committed
FromPublisher = Welcome | Begin | WriteBucket | Release | LoadBucket | CommitUpdate | AbandonUpdate | Dismissed
