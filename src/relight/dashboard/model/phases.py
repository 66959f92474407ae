"""The phases of each rank, from the lines of a trace. Pure, bounded. Times are ns since the job's start."""

from collections.abc import Collection

from relight.core.protocol.position import Phase
from relight.dashboard.model.row import Row
from relight.timeline.model.spans import Chunk

ROWS_KEPT = 2_000_000  # phase changes remembered exactly, shared by all rows
ROW_KEPT = (1024, 65536)
CLOCKS_DIFFER_NS = 60 * 10**9  # at most, from host to host; a stamp further in the future is none


class Phases:
    """The rows of all ranks, filled by one pass over a trace or over its end."""

    def __init__(self, world_size: int, standbys: Collection[str]) -> None:
        """`standbys`: processes that began without a rank; it may grow."""
        kept = max(ROW_KEPT[0], min(ROW_KEPT[1], ROWS_KEPT // max(1, world_size)))
        self.rows = {rank: Row(kept) for rank in range(world_size)}
        self.edge_ns = 0  # newest phase change of any rank
        self.steps = 0  # newest version that any rank ever held
        self.unreadable_records = 0
        self._standbys = standbys
        self._heard: set[str] = set()  # of the standbys: those that have reported something already
        self._offsets: dict[str, int] = {}  # by process: wall clock minus monotonic clock, as first heard

    def take(self, chunk: Chunk, origin_ns: int, wall_ns: int, until: int) -> None:
        """One line, read at `wall_ns` (Unix time), of a job that started at `origin_ns` and takes `until` steps.

        0 steps: it is not known yet how many.
        """
        # One offset per process: a wall clock that is set anew must not bend a worker's monotonic time.
        offset = self._offsets.setdefault(chunk.process, chunk.clock_offset_ns - origin_ns)
        row = self.rows.get(chunk.rank)
        if row is None:
            return
        records = chunk.records
        if chunk.process in self._standbys and chunk.process not in self._heard:
            # All up to its waiting was warm-up, on behalf of no rank.
            waits = [index for index, record in enumerate(records) if record[3] == Phase.STANDBY]
            records = records[waits[-1] + 1 :] if waits else records
            self._heard.add(chunk.process)
        latest_ns = wall_ns - origin_ns + CLOCKS_DIFFER_NS
        for stamp_ns, generation, step, phase, version in records:
            at_ns = stamp_ns + offset
            if phase == Phase.STANDBY:
                continue
            if at_ns > latest_ns or not 0 <= phase <= Phase.DONE or not (_is_count(step) and _is_count(version)):
                self.unreadable_records += 1  # a position page that was overwritten
                continue
            row.add(chunk.process, at_ns, generation, step, phase, version)
            if version > self.steps and (version <= until or not until):
                self.steps = version
        self.edge_ns = max(self.edge_ns, row.last_ns)

    @property
    def since_ns(self) -> int:
        """From when on something is known of every rank that is heard of at all."""
        return max((row.first_ns for row in self.rows.values() if row.last_ns >= 0), default=0)


def _is_count(number: int) -> bool:
    return -1 <= number < 2**62
