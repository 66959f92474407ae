"""All that is known of a job, from the lines of its journal and its trace. Pure, bounded; `now` is an argument.

The journal is replayed through a controller of our own (`core`), so the page says what the job's controller knows, by
the same code, and a restart of that one is an event like others. Its orders are thrown away.
"""

import contextlib
import datetime
from collections import deque

import msgspec

from relight.core.account.report import FailureReport, JobReport, RecoveryReport
from relight.core.controller import Controller, ControllerSettings, Stage
from relight.core.membership.members import Process
from relight.core.protocol.commands import EndJob, Notice
from relight.core.protocol.events import ProcessStarted, StandbyReady
from relight.core.recovery.coverage import Coverage
from relight.dashboard.model.phases import Phases
from relight.dashboard.model.row import Joined, Row
from relight.server.records.journal import JournalHeader, JournalLine, decode_line
from relight.timeline.model.publications import Publications
from relight.timeline.model.spans import Chunk
from relight.wire.settings import JobSettings, part_of
from relight.wire.status import Gpu, PublishStatus, RestoreStatus, Status
from relight.wire.status import decode_line as decode_status

PARTS_LISTED = 64  # parts of divided state; the rarest are what matters
LISTED = 300  # failures, recoveries and notices that are shown; older ones are only counted
RATE_SECONDS = 10.0
REPORT_DELAY_NS = 1_500_000_000  # agents report phases once a second; what is older than this is known
CHUNK_NS = 3 * 10**9  # agents report once a second, so lines of different ranks overlap by about as much
LATEST_NS = 10**18
_decode_chunk = msgspec.json.Decoder(Chunk).decode


class Job:
    """One job, as far as its files have been read."""

    def __init__(self) -> None:
        self.settings: JobSettings | None = None
        self.problem = ""  # why the journal cannot be followed further
        self.notices: deque[tuple[float, str, str]] = deque(maxlen=LISTED)  # seconds since the start, level, text
        self.ended: EndJob | None = None
        self.ended_seconds = 0.0
        self.journal_changes = 0  # goes up with everything that may change the report
        self.status_changes = 0
        self.origin_ns = 0  # the job's start on the wall clock; 0: not known yet
        self._core: Controller | None = None
        self.publications = Publications()
        self._restores: dict[int, RestoreStatus] = {}  # by rank: the newest of each
        self._gpus: dict[str, tuple[Gpu, ...]] = {}  # by agent
        self._early: list[Chunk] = []  # read before the journal said when the job started
        self._standbys: set[str] = set()  # processes that began without a rank
        self.phases = Phases(0, self._standbys)
        self._older: Phases | None = None
        self._report: tuple[int, JobReport] = (-1, JobReport(job=""))
        self._rate: deque[tuple[float, int]] = deque()

    # --- the journal ----------------------------------------------------------------------------------------------
    def take_journal(self, line: bytes) -> None:
        """One line of `journal.jsonl`; the first one is the header."""
        if self.problem:
            return
        self.journal_changes += 1
        try:
            if self.settings is None:
                self._begin(msgspec.json.decode(line, type=JournalHeader).settings)
            else:
                self._take(decode_line(line))
        except msgspec.DecodeError as error:
            self.problem = f"the journal cannot be read further (written by another version of relight?): {error}"
        except Exception as error:  # a defect in the core ends the job; it must not end the page that shows it
            self.problem = f"the journal cannot be followed further: {error!r}"

    def _begin(self, settings: JobSettings) -> None:
        self.settings = settings
        self._core = Controller(part_of(ControllerSettings, settings), full_account=True)
        self.phases = Phases(settings.world_size, self._standbys)

    def _take(self, line: JournalLine) -> None:
        assert self._core is not None
        if line.wall and not self.origin_ns:
            written = datetime.datetime.fromisoformat(line.wall).timestamp()
            self.origin_ns = round((written - line.now) * 1e9)
            early, self._early = self._early, []
            for chunk in early:
                self._take_chunk(chunk, self.origin_ns + LATEST_NS)
        if line.event is not None:
            self._core.handle(line.event, line.now)
            if isinstance(line.event, ProcessStarted | StandbyReady):
                process = self._core.members.processes.get(line.event.process)
                if process is not None and process.rank is None:
                    self._standbys.add(process.name)
        elif line.expired:
            self._core.expire(line.now)
        elif isinstance(line.command, Notice):
            self.notices.append((line.now, line.command.level, line.command.why))
        elif isinstance(line.command, EndJob) and self.ended is None:
            self.ended, self.ended_seconds = line.command, line.now
        elif line.note:
            self.notices.append((line.now, "warning", line.note))

    def coverage(self) -> Coverage | None:
        """Return the losses that a divided state survives; None: it is not divided, or training has not begun."""
        return None if self._core is None else self._core.coverage

    def hosts(self, now_ns: int) -> str:
        """Say which hosts are here, on order, and avoided; empty if there is nothing to say."""
        return "" if self._core is None else self._core.supplying.describe(now_ns / 1e9)

    # --- the trace ------------------------------------------------------------------------------------------------
    def take_chunk(self, chunk: Chunk, wall_ns: int) -> None:
        """One line of `trace.jsonl`, read at `wall_ns` (Unix time)."""
        if self.origin_ns:
            self._take_chunk(chunk, wall_ns)
        elif len(self._early) < 10_000:
            self._early.append(chunk)

    def _take_chunk(self, chunk: Chunk, wall_ns: int) -> None:
        self.phases.take(chunk, self.origin_ns, wall_ns, self.until)

    def begin_older(self) -> Phases:
        """The end of the trace was taken first: rows for a pass from its beginning, until `finish_older`."""
        assert self.settings is not None
        self._older = Phases(self.settings.world_size, self._standbys)
        return self._older

    def finish_older(self) -> None:
        """Use the rows of the pass over the older past from now on: it has caught up."""
        assert self._older is not None
        self.phases, self._older = self._older, None

    @property
    def rows(self) -> dict[int, Row]:
        return self.phases.rows

    @property
    def edge_ns(self) -> int:
        """Newest phase change of any rank."""
        return self.phases.edge_ns

    @property
    def steps(self) -> int:
        """Newest version that any rank ever held."""
        return self.phases.steps

    def row(self, rank: int) -> Row | Joined | None:
        """Return the known past of a rank, from both passes while there are two."""
        row = self.rows.get(rank)
        return row if row is None or self._older is None else Joined(row, self._older.rows[rank])

    def newest_row(self, rank: int) -> Row:
        """The one that knows what a rank did last: one that has been silent for long is not in the end of a trace."""
        row = self.rows[rank]
        return row if self._older is None or row.last_ns >= 0 else self._older.rows[rank]

    def gap_ns(self) -> tuple[int, int] | None:
        """From when to when it is not known yet what ranks did, because it is still being read."""
        if self._older is None:
            return None
        since_ns = self.phases.since_ns
        return min(since_ns, max(0, self._older.edge_ns - CHUNK_NS)), since_ns

    # --- what workers say besides ---------------------------------------------------------------------------------
    def take_status(self, status: Status) -> None:
        """One line of `status.jsonl`."""
        self.status_changes += 1
        if isinstance(status, PublishStatus):
            self.publications.add(status)
        elif isinstance(status, RestoreStatus):
            self._restores[status.rank] = status
        else:
            self._gpus[status.agent] = status.gpus

    def gpu(self, process: Process) -> Gpu | None:
        """The device of a process; where a host does not show whose process computes where, by its slot."""
        gpus = self._gpus.get(process.agent, ())
        if not gpus:
            return None
        named = next((gpu for gpu in gpus if process.pid in gpu.pids), None)
        return named or gpus[process.slot % len(gpus)]

    def restoring(self) -> list[RestoreStatus]:
        """Copies of the recovery under way, as far as they are long enough to be spoken of."""
        if self.stage != Stage.RESTORING:
            return []
        newest = (self._restores[rank] for rank in sorted(self._restores))
        return [status for status in newest if status.generation == self.generation]

    # --- what follows ---------------------------------------------------------------------------------------------
    def report(self) -> JobReport:
        """Failures and recoveries so far, as the job's controller would report them now."""
        if self._core is not None and self._report[0] != self.journal_changes:
            self._report = (self.journal_changes, self._core.report())
        return self._report[1]

    def settled_recoveries(self) -> list[RecoveryReport]:
        """Those whose account is closed: nothing of it will change."""
        return [] if self._core is None else self._core.job_stats.recoveries.newest

    @property
    def until(self) -> int:
        """Steps that were asked for; 0: not known yet."""
        return 0 if self._core is None else self._core.job.until

    def now_ns(self, wall_ns: int) -> int:
        """Time since the job's start; of a job that has ended, how long it took."""
        if not self.origin_ns:
            return 0
        if self.ended is not None:
            return max(round(self.ended_seconds * 1e9), self.edge_ns)
        return max(wall_ns - self.origin_ns, self.edge_ns)

    def known_ns(self, now_ns: int) -> int:
        """Until when it is known what each rank did."""
        return now_ns if self.ended is not None else min(now_ns, max(self.edge_ns, now_ns - REPORT_DELAY_NS))

    def version(self) -> int:
        """The newest version that any rank holds."""
        return max((row.version for row in self.rows.values()), default=-1)

    def steps_per_second(self) -> float:
        """Return the rate of the last ten seconds that ranks have reported; to be called at a steady pace."""
        self._rate.append((self.edge_ns / 1e9, self.version()))
        while self._rate[-1][0] - self._rate[0][0] > RATE_SECONDS:
            self._rate.popleft()
        (first_at, first), (last_at, last) = self._rate[0], self._rate[-1]
        return max(0.0, (last - first) / (last_at - first_at)) if last_at > first_at else 0.0

    def processes(self) -> dict[int, Process]:
        """The process of each rank that has one."""
        return {} if self._core is None else self._core.members.by_rank()

    def standbys(self) -> list[Process]:
        return [] if self._core is None else self._core.members.standbys()

    @property
    def stage(self) -> str:
        return "" if self._core is None else self._core.stage.value

    @property
    def generation(self) -> int:
        return 0 if self._core is None else self._core.generation

    def waiting(self, now_ns: int) -> str:
        """Describe the ranks that the job waits for, and why; empty while it trains, or is over."""
        return "" if self._core is None or self.ended is not None else self._core.waiting(now_ns / 1e9)

    def intact(self) -> int:
        """Ranks whose process lives and holds the state."""
        return len(self._intact_ranks())

    def _intact_ranks(self) -> list[int]:
        return [rank for rank, process in self.processes().items() if not process.replacement and not process.gone]

    def copies(self) -> list[tuple[str, int]]:
        """Each part of the state with its intact holders, the rarest first; plain replication: one part, all of it."""
        intact = set(self._intact_ranks())
        if self._core is None or not self._core.job.shards.divided:
            return [("all parameters", len(intact))]
        parts = [
            (f"part {key}", len(intact.intersection(ranks))) for key, ranks in self._core.job.shards.groups().items()
        ]
        return sorted(parts, key=lambda part: part[1])[:PARTS_LISTED]

    def dead_until_ns(self, failure: FailureReport) -> int | None:
        """Return the time at which another process took the rank that this failure left; None: none has so far."""
        row = self.row(failure.rank)
        if row is None or not failure.process:
            return None
        stamped_ns = row.taken_over_ns(failure.process)
        if stamped_ns is None:  # forgotten, or not read yet: then the time by which every rank had a process
            for recovery in self.report().recoveries:
                if failure.number in recovery.failures and failure.rank in recovery.replaced:
                    seconds = recovery.stages.stop_seconds + recovery.stages.replace_seconds
                    return round((failure.noticed_seconds + seconds) * 1e9)
        return stamped_ns

    def failures(self) -> tuple[FailureReport, ...]:
        return self.report().failures[-LISTED:]

    def recoveries(self) -> tuple[RecoveryReport, ...]:
        return self.report().recoveries[-LISTED:]


def take_trace(job: Job, line: bytes, wall_ns: int, older: Phases | None = None) -> None:
    """Take in a line of `trace.jsonl`; one of the pass from its beginning, into `older`. Drop one that is damaged."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        chunk = _decode_chunk(line)
        if older is not None:
            older.take(chunk, job.origin_ns, wall_ns, job.until)
        else:
            job.take_chunk(chunk, wall_ns)


def take_status(job: Job, line: bytes) -> None:
    """Take in a line of `status.jsonl`. Drop one that is damaged."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        job.take_status(decode_status(line).status)
