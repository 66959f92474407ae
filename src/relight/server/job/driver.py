"""Drives the core: event -> journal -> core -> commands -> journal -> carry out -> timer."""

import asyncio
import traceback
from collections.abc import Callable, Sequence

from relight.core.protocol.commands import Command, EndJob
from relight.core.protocol.events import Event
from relight.server.job.faults import ControllerFault
from relight.server.job.job import Job
from relight.server.job.job_end import JobEnd
from relight.server.job.orders import Orders


class Driver:
    """Gives the core one event at a time, in the order of the journal, until the job has ended."""

    def __init__(self, job: Job, orders: Orders, end: JobEnd, fault: ControllerFault) -> None:
        self._job = job
        self._orders = orders
        self._end = end
        self._fault = fault
        self._timer: asyncio.TimerHandle | None = None  # for the core's next deadline
        self._timer_deadline: float | None = None

    def feed(self, event: Event) -> None:
        """Give one event to the core and carry out the commands that it returns."""
        if self._end.command is not None:
            return
        now = self._job.clock.now()
        self._job.journal.event(now, event)
        self._fault.pass_by("event", event)
        self._obey(lambda: self._job.core.handle(event, now), now)

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _expire(self) -> None:
        self._timer = None
        deadline, now = self._job.core.next_deadline(), self._job.clock.now()
        if self._end.command is not None or deadline is None:
            return
        if now < deadline:  # the event loop's clock is a little coarser than the job's
            self._arm_timer(now)
            return
        self._job.journal.expiry(now)
        self._obey(lambda: self._job.core.expire(now), now)

    def _obey(self, decide: Callable[[], Sequence[Command]], now: float) -> None:
        try:
            commands = decide()
            refused = self._job.journal.commands(now, commands)
            if refused:
                commands = (EndJob(error=refused, details="", why=refused),)
            for command in commands:
                self._fault.pass_by("orders", command)
            for command in commands:
                self._orders.carry_out(command)
                self._fault.pass_by("sent", command)
        except Exception as error:  # a defect must not leave a job without a controller
            text = f"the controller failed ({error!r}); this is a defect in relight"
            self._end.begin(EndJob(error=text, details=traceback.format_exc(), why=text))
        self._arm_timer(now)

    def _arm_timer(self, now: float) -> None:
        deadline = self._job.core.next_deadline() if self._end.command is None else None
        if deadline == self._timer_deadline and self._timer is not None:
            return  # as after most reports
        self.stop()
        self._timer_deadline = deadline
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - now), self._expire)
