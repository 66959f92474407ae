"""The position of a worker: the record it stamps into shared memory, readable after its death.

The *position page* is the step tag of FlashRecovery (section 3.2): the worker overwrites plain 64-bit words,
with no system call and no lock, and its agent reads them at any time, also when the process is gone. The page
is only ever *evidence*: a decision is taken from what survivors report after Stop, never from a page.
"""

import enum
import struct

import msgspec

from relight.core.protocol.numbers import Whole


class Phase(enum.IntEnum):
    """The work of a worker. FORWARD to OPTIMIZER lie inside a step; the others lie outside one."""

    STARTING = 0  # running the script up to the first step
    OUTSIDE = 1  # between two steps: evaluation, logging, checkpoint
    FORWARD = 2  # fetching the batch and computing the loss
    BACKWARD = 3  # computing and synchronizing gradients
    BARRIER = 4  # every gradient is reduced here; waiting for proof that it is so everywhere
    OPTIMIZER = 5  # writing parameters and optimizer state; not interruptible
    PARKED = 6  # stopped, obeying the commands of a recovery
    STANDBY = 7  # warm, waiting to take a rank
    DONE = 8  # all steps committed, waiting for the others


IN_STEP = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.BARRIER, Phase.OPTIMIZER})


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of a position page. Times are CLOCK_MONOTONIC nanoseconds of the worker's host."""

    generation: Whole = 0
    rank: Whole = -1
    step: Whole = 0
    attempt: Whole = 0  # how often this step was started before
    phase: Phase = Phase.STARTING
    version: Whole = 0  # optimizer steps applied to the state
    prepared: Whole = -1  # the step whose gradient is completely reduced here, or -1
    torn: bool = False  # a write is in progress, or was cut short
    # Launched in this generation; the rank with fewest is the one the others wait for. Where ranks run different
    # modules, and so make different numbers of them: 1 while the rank waits for others.
    collectives: Whole = 0
    progress: Whole = 0  # goes up at every stamp
    stamp_ns: Whole = 0  # time of the last stamp
    fault_ns: Whole = 0  # when a planned fault struck here, or 0
    private_versions: tuple[Whole, Whole] = (-1, -1)  # versions of the rank-private state kept beside the page
    loss: float = float("nan")  # last loss the script reported
    commits: Whole = 0  # steps that this process itself has finished; unlike its version, never inherited
    work_ns: tuple[Whole, Whole, Whole] = (0, 0, 0)  # FORWARD, BACKWARD, OPTIMIZER; waiting not counted


def usual_step_ns(position: Position) -> int:
    """The average time of a step of this process, waiting for others not counted; 0: it has finished none."""
    return sum(position.work_ns) // position.commits if position.commits > 0 else 0


# Layout: nineteen little-endian words. The private state's two slots and the phase trace follow the page in the
# same mapping (read by agent/processes/readings/page.py, written by training/connection/page.py).
_LAYOUT = struct.Struct("<14qd4q")
PAGE_BYTES = 4096
TRACE_RECORDS = 8192
TRACE_RECORD = struct.Struct("<5q")  # stamp_ns, generation, step, phase, version
TRACE_INDEX_OFFSET = 2048  # one word: number of trace records ever written
TRACE_OFFSET = PAGE_BYTES
LEAVE_OFFSET = 2304  # one word, the agent's: not 0 asks the worker to end between two steps
LIFE_LOCK_OFFSET = 2560  # see wire.lifelock
BATCH_MARK = struct.Struct("<qQ")  # a step, and a digest of the batch that was drawn for it
BATCH_MARK_OFFSET = 3072  # this process's own
INHERITED_MARK_OFFSET = 3584  # that of the process whose rank it took, put there by the agent
PRIVATE_HEADER = struct.Struct("<qqQ")  # version, payload bytes, xxh3_64 of the payload
PRIVATE_SLOT_BYTES = 64 * 2**20
PRIVATE_OFFSET = 2**20  # the trace ends well below this
# Sparse: what is untouched costs nothing. One follows the other in a file, so they begin where a mapping can.
MAPPING_BYTES = PRIVATE_OFFSET + 2 * PRIVATE_SLOT_BYTES

assert TRACE_OFFSET + TRACE_RECORDS * TRACE_RECORD.size <= PRIVATE_OFFSET


def decode_page(page: bytes | memoryview) -> Position:
    """Read a page. An untouched (all zero) page is a worker that has not stamped yet."""
    words = _LAYOUT.unpack_from(page)
    if words[10] == 0:
        return Position()
    return Position(
        generation=words[0],
        rank=words[1],
        step=words[2],
        attempt=words[3],
        phase=Phase(words[4]),
        version=words[5],
        prepared=words[6],
        torn=bool(words[7]),
        collectives=words[8],
        progress=words[9],
        stamp_ns=words[10],
        fault_ns=words[11],
        private_versions=(words[12], words[13]),
        loss=words[14],
        commits=words[15],
        work_ns=(words[16], words[17], words[18]),
    )


# Word indices for the writer, which stores single words instead of the whole page.
WORD = {
    name: index
    for index, name in enumerate(
        "generation rank step attempt phase version prepared torn collectives progress stamp_ns fault_ns "
        "private_version_0 private_version_1 loss commits forward_work_ns backward_work_ns optimizer_work_ns".split()
    )
}
