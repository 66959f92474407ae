"""Looks at the processes of a host, and reports their positions, states and phases."""

import asyncio
import contextlib
import time

from relight.agent.connection.session import ControllerSession
from relight.agent.decisions.sampling import SamplingSchedule
from relight.agent.processes.process import Process
from relight.agent.traces import TraceReporter
from relight.agent.workers import Workers
from relight.wire.messages import Pace, Sample, Samples

_STOPPED = "T"  # process state


class Sampler:
    """Reports positions and process states, and the phases that workers have recorded."""

    def __init__(self, workers: Workers, session: ControllerSession, traces: TraceReporter) -> None:
        self._workers = workers
        self._session = session
        self._traces = traces
        self._schedule = SamplingSchedule()
        self._child_changed = asyncio.Event()

    def wake(self) -> None:
        """Look now: the kernel says that a child was stopped, or continued, or is gone."""
        self._child_changed.set()

    def set_pace(self, pace: Pace) -> None:
        """Report at the pace that the controller asks for."""
        self._schedule.set_pace(pace)
        self._traces.wanted = pace.trace

    async def run(self) -> None:
        """Sample as long as the connection lasts."""
        self._schedule.begin()
        while True:
            self._child_changed.clear()
            samples = tuple(sample for process in self._workers.live() if (sample := _sample(process)) is not None)
            now = time.monotonic()
            any_stopped = any(sample.state == _STOPPED for sample in samples)
            if (
                self._schedule.is_due(now, any_stopped=any_stopped)
                and self._session.mention(Samples(samples=samples), if_idle=True)
                and self._schedule.note_sent(now)
            ):
                for process in self._workers.live():
                    self._traces.report(process)
            has_others = any(not process.is_child for process in self._workers.live())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._schedule.seconds_to_next_look(now, has_others=has_others)):
                    await self._child_changed.wait()


def _sample(process: Process) -> Sample | None:
    """Return what there is to see of a process; None if it is gone."""
    reading = process.probe.read()
    if reading is None:
        return None
    return Sample(
        process=process.name,
        position=process.page.position(),
        state=reading.state,
        run_delay_ns=reading.run_delay_ns,
        rss_bytes=reading.rss_bytes,
        sampled_ns=time.monotonic_ns(),
    )
