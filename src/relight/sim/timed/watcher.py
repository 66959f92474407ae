"""Samples of a timed job's processes, and the production detector that judges them."""

from typing import TYPE_CHECKING

from relight.core.detection.detector import Detector, DetectorSettings
from relight.core.detection.sampling import Sample
from relight.sim.model.schedule import SAMPLE_SECONDS
from relight.sim.timed.hosts import Host

if TYPE_CHECKING:
    from relight.sim.timed.job import SimulatedJob

SPARSE_SAMPLE_SECONDS = 2.0  # later on, where only long waits are left: the detector counts no longer gap
_SPARSE_AFTER = 40
DETECTOR = DetectorSettings(
    hang_timeout_seconds=10.0,
    outside_hang_timeout_seconds=600.0,
    startup_timeout_seconds=600.0,
    frozen_timeout_seconds=1.0,
)


class Watcher:
    """Samples from the first call of `watch` on: without hangs there is nothing to see."""

    def __init__(self, job: "SimulatedJob", detector_kind: type[Detector]) -> None:
        self._job = job
        self._kind = detector_kind
        self._samples = 0
        self.restart()

    def restart(self) -> None:
        """Begin anew, with a controller's successor."""
        self._detector = self._kind(DETECTOR)
        if self._job.schedule.sample_seconds > SAMPLE_SECONDS:
            self._detector.expect(self._job.schedule.sample_seconds)

    def watch(self) -> None:
        """Begin to sample."""
        if not self._samples:
            self.sample()

    def sample(self) -> None:
        """Take samples, and feed what the detector makes of them."""
        job = self._job
        if job.end is not None:
            return
        self._samples += 1
        pace = job.schedule.sample_seconds
        heard = [host.name for host in job.hosts]
        if pace > SAMPLE_SECONDS:  # each host at a moment of its own
            job.after(pace / len(heard), ("sample",))
            heard = [heard[self._samples % len(heard)]]
        else:
            job.after(pace if self._samples < _SPARSE_AFTER else SPARSE_SAMPLE_SECONDS, ("sample",))
        heard = [name for name in heard if self._is_heard(job.hosts.called(name))]
        if job.controller_life.is_away or job.now < job.controller_life.asleep_until or not heard:
            return
        now_ns = int(job.now * 1e9)
        samples = [
            Sample(
                process=worker.name,
                position=worker.page.position(counters=True),
                state="T" if worker.frozen and not worker.hung else "R" if worker.hung else "S",
                run_delay_ns=0,
                rss_bytes=0,
                sampled_ns=now_ns,
            )
            for worker in job.workers.values()
            if worker.alive and job.host_of[worker.name] in heard and worker.name not in job.fenced
        ]
        for event in self._detector.observe(samples, job.controller.rank_processes(), job.now):
            job.feed(event)

    def _is_heard(self, host: Host) -> bool:
        return host.known and self._job.now >= host.silent_until["up"]
