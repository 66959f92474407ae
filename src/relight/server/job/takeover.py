"""Facts that a controller takes from the journal of a predecessor that died."""

import collections
import datetime
import itertools
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from relight.core.controller import Controller, ControllerSettings
from relight.core.protocol.commands import EndJob
from relight.core.replay import replay
from relight.server.job.clock import JobClock
from relight.server.records.journal import Journal, JournalLine, records


@dataclass(frozen=True, kw_only=True)
class Predecessor:
    """The state in which a dead controller left the job."""

    core: Controller
    clock: JobClock
    failure: EndJob | None  # the core failed when it replayed the journal, as it did then
    has_recorded_end: bool  # the journal says that the job has ended


def read_predecessor(journal: Journal, settings: ControllerSettings) -> Predecessor | None:
    """Replay the journal of an earlier controller; None if there was none.

    Raises OSError, or msgspec.DecodeError with the number of the line that is not understood.
    """
    lines = journal.found()
    first = next(lines, None)
    if first is None:
        return None
    passed = _Observed(itertools.chain([first], lines))
    failure: EndJob | None = None
    try:
        core = replay(settings, records(passed))
    except msgspec.DecodeError:
        raise
    except Exception as error:  # the driver ended the job then, and does so again
        text = f"the controller failed ({error!r}); this is a defect in relight"
        failure = EndJob(error=text, details=traceback.format_exc(), why=text)
        core = Controller(settings)
        collections.deque(passed, maxlen=0)
    written = datetime.datetime.fromisoformat(passed.wall).timestamp() if passed.wall else time.time()
    now = max(passed.last, passed.dated + time.time() - written)
    if failure is None and core.ended is None and journal.incomplete:
        text = (
            "the controller died while its journal could not be written, so what the job has done since is not "
            "known. Resume from your last checkpoint once there is room on the disk"
        )
        core.job_stats.ended(text, now)
        core.job.ended = EndJob(error=text, details="", why=text)
    clock = JobClock(now, started_wall=written - passed.dated)
    return Predecessor(core=core, clock=clock, failure=failure, has_recorded_end=passed.has_end)


class _Observed:
    """Passes lines on and remembers when the newest was written, and whether one of them is the job's end."""

    def __init__(self, lines: Iterator[JournalLine]) -> None:
        self._lines = lines
        self.last = 0.0  # `now` of the newest
        self.dated, self.wall = 0.0, ""  # `now` of the newest that has a wall time, and that time
        self.has_end = False

    def __iter__(self) -> Iterator[JournalLine]:
        for line in self._lines:
            self.last = line.now
            self.has_end |= isinstance(line.command, EndJob)
            if line.wall:
                self.dated, self.wall = line.now, line.wall
            yield line
