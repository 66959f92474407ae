"""Judges samples: suspects hung and frozen processes, and names slow ranks."""

from relight.core.detection.detector import Detector, DetectorSettings
from relight.core.detection.stragglers import Stragglers
from relight.core.protocol.events import CommunicationStalled, Event, ProcessSuspected
from relight.server.job.driver import Driver
from relight.server.job.job import Job
from relight.server.sessions.stack_capture import StackCaptures
from relight.wire.messages import Sample, StackTaken
from relight.wire.settings import part_of


class HealthMonitor:
    """Feeds samples to the detectors, and what they find to the core."""

    def __init__(self, job: Job, driver: Driver) -> None:
        self._job = job
        self._driver = driver
        self._detector = Detector(part_of(DetectorSettings, job.settings))
        self._stragglers = Stragglers(job.settings.slow_factor, job.settings.slow_window_seconds)
        self._captures = StackCaptures(job.agents.ask_for_stack, driver.feed)

    def expect(self, sample_seconds: float) -> None:
        """Expect the next sample of each agent after this time."""
        self._detector.expect(sample_seconds)

    def observe(self, samples: tuple[Sample, ...]) -> None:
        """Take in the samples of one agent."""
        for sample in samples:
            self._job.board.observe(sample)
        members, now = self._job.core.rank_processes(), self._job.clock.now()
        for event in self._detector.observe(samples, members, now):
            self._suspect(event)
        for slow in self._stragglers.observe(samples, members, self._job.core.rank_hosts, now):
            self._driver.feed(slow)

    def take_stack(self, answer: StackTaken) -> None:
        """Take in the stack of a suspected process."""
        self._captures.take(answer)

    def _suspect(self, event: Event) -> None:
        """Capture stacks before a hang is reported. A frozen process cannot write its own."""
        if isinstance(event, ProcessSuspected) and event.kind == "hang":
            process = self._job.core.members.processes.get(event.process)
            rank = None if process is None else process.rank
            self._captures.begin(event, {event.process: "it" if rank is None else f"rank {rank}"})
        elif isinstance(event, CommunicationStalled):
            self._captures.begin(event, {p: f"rank {rank}" for rank, p in self._job.core.rank_processes().items()})
        else:
            self._driver.feed(event)
