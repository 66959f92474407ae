"""Messages between an agent and its template process, of which workers are forked (see training.template)."""

import msgspec


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Start a worker, once the agent has written GO into a pipe.

    Attached as descriptors, in this order: the pipe's read end, the worker's standard output and standard error, and
    `numbers`. A worker whose pipe closes without GO ends: its agent has not waited, and has started another.
    """

    directory: str  # to work in
    environment: dict[str, str]
    numbers: tuple[int, ...]  # of descriptors in the agent, as the environment has them


class Reap(msgspec.Struct, frozen=True, tag=True):
    """Collect a worker that has ended; until then no other process can get its number."""

    pid: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The modules are imported. `refusal`: why no worker can be forked of this process, empty if one can."""

    refusal: str = ""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The answer to Fork."""

    pid: int


Order = Fork | Reap
Answer = Ready | Forked
GO = b"1"
MOST_BYTES = 2**20  # of one message
MOST_DESCRIPTORS = 16
DESCRIPTOR_VARIABLES = ("RELIGHT_PAGE_FD", "RELIGHT_OUTPUT_FDS", "RELIGHT_SHARED_BARRIER_FD")
ROOM_VARIABLE = "RELIGHT_TEMPLATE_ROOM"  # makes room for the environment of a worker where the kernel shows it
ROOM_BYTES = 2**14
SHARED_VARIABLE = "RELIGHT_TEMPLATE"  # the socket of a template process that several jobs share
