"""The snapshot that people see: where each rank is, how fast, how many failures survived."""

import math
from collections import deque
from itertools import islice

from relight.core.controller import Controller, Stage
from relight.core.protocol.position import Position, usual_step_ns
from relight.wire.messages import RankStatus, Sample, StatusUpdate
from relight.wire.status import PublishStatus, RestoreStatus

_RATE_WINDOW_SECONDS = 10.0
MAX_SHOWN_RANKS = 256  # in a snapshot, which is made twice a second


class StatusBoard:
    """Keeps the newest sample of each process and the job's recent speed."""

    def __init__(self, job: str, controller: Controller) -> None:
        self._job = job
        self._controller = controller
        self._samples: dict[str, Sample] = {}
        self._restoring: dict[int, RestoreStatus] = {}  # by rank
        self._publishing: PublishStatus | None = None
        self._history: deque[tuple[float, int]] = deque()  # (now, newest version of any rank)
        self._newest = 0

    def observe(self, sample: Sample) -> None:
        self._samples[sample.process] = sample
        if sample.position.stamp_ns and sample.position.version > self._newest:
            self._newest = sample.position.version

    def take(self, status: PublishStatus | RestoreStatus) -> None:
        """Take in the progress of a publication or a restore."""
        if isinstance(status, RestoreStatus):
            self._restoring[status.rank] = status
        else:
            self._publishing = status

    def forget(self, process: str) -> None:
        self._samples.pop(process, None)

    def position(self, process: str) -> Position:
        """Return the newest position of `process`."""
        sample = self._samples.get(process)
        return sample.position if sample else Position()

    def committed(self) -> int:
        """The newest version that a rank of this generation has committed, as far as it was seen; -1 for none."""
        core = self._controller
        positions = (self.position(process) for process in core.rank_processes().values())
        return max((at.version for at in positions if at.stamp_ns and at.generation == core.generation), default=-1)

    def idle_seconds(self, host: str) -> float:
        """Return how long no rank outside `host` had made progress, beyond a usual step; infinite if there is none."""
        ranks = self._controller.rank_hosts()
        processes = (name for rank, name in self._controller.rank_processes().items() if ranks[rank] != host)
        samples = [sample for name in processes if (sample := self._samples.get(name)) is not None]
        idle = (s.sampled_ns - s.position.stamp_ns - usual_step_ns(s.position) for s in samples if s.position.stamp_ns)
        return min((max(0, idle_ns) / 1e9 for idle_ns in idle), default=math.inf)

    def update(self, now: float) -> StatusUpdate:
        """The snapshot; called at a steady pace, since the speed is measured between calls."""
        core = self._controller
        ranks = []
        for rank, process in islice(core.rank_processes().items(), MAX_SHOWN_RANKS):
            sample = self._samples.get(process)
            ranks.append(
                RankStatus(
                    rank=rank,
                    process=process,
                    position=sample.position if sample else Position(),
                    rss_bytes=sample.rss_bytes if sample else 0,
                )
            )
        self._history.append((now, self._newest))  # ranks differ by one; a blank one is far behind
        while now - self._history[0][0] > _RATE_WINDOW_SECONDS:
            self._history.popleft()
        return StatusUpdate(
            job=self._job,
            stage=core.stage.value,
            generation=core.generation,
            until=core.job.until,
            failures=core.job_stats.failures.count,
            standbys_ready=core.standbys_ready,
            steps_per_second=self._rate(),
            ranks=tuple(ranks),
            winding_down=core.is_winding_down,
            waiting=core.waiting(now),
            restoring=tuple(status for status in self._restoring.values() if self._is_now(status)),
            publishing=self._publishing,
        )

    def _is_now(self, status: RestoreStatus) -> bool:
        return self._controller.stage is Stage.RESTORING and status.generation == self._controller.generation

    def _rate(self) -> float:
        (first_time, first), (last_time, last) = self._history[0], self._history[-1]
        return max(0.0, (last - first) / (last_time - first_time)) if last_time > first_time else 0.0
