"""Planned faults, carried out by the worker itself at the exact place that the plan names (`relight chaos`)."""

import os
import signal
import time
from collections.abc import Callable

from relight.chaos.plan import planned_for_standby, planned_in_recovery, planned_in_step
from relight.core.protocol.fault import RECOVERY_POINTS, STEP_POINTS, Action, Fault, Plan, Point
from relight.training.connection.page import PositionPage

SLOW_SECONDS = 0.2  # in each step


class PlannedFault(RuntimeError):
    """The exception that `raise` faults put into the script."""


class Faults:
    """Looks faults up at each point, and strikes. Without a plan a look costs one attribute test."""

    def __init__(
        self,
        plan: Plan,
        page: PositionPage,
        standby: int | None,
        cut: Callable[[], None],
        announce: Callable[[Fault], None],
        flip: Callable[[Action], None],
    ) -> None:
        self.active = bool(plan.faults) or plan.rate_per_step > 0
        self._plan = plan
        self._page = page
        self._standby = standby
        self._cut = cut
        self._announce = announce
        self._flip = flip
        self._slow_at: Point | None = None
        self.rank = -1
        self.step = 0
        self.attempt = 0
        self.recovery = 0  # number of the recovery under way, counted as generations are: the first is 1

    def strike(self, point: Point) -> None:
        """Carry out the fault planned for here and now, if any."""
        if not self.active:
            return
        fault = self._find(point)
        if fault is not None:
            self._carry_out(fault)
        if point is self._slow_at:
            time.sleep(SLOW_SECONDS)

    def _find(self, point: Point) -> Fault | None:
        if point in STEP_POINTS:
            return planned_in_step(self._plan, rank=self.rank, point=point, step=self.step, attempt=self.attempt)
        if point in RECOVERY_POINTS:
            return planned_in_recovery(self._plan, rank=self.rank, point=point, recovery=self.recovery)
        return None if self._standby is None else planned_for_standby(self._plan, standby=self._standby, point=point)

    def _carry_out(self, fault: Fault) -> None:
        self._announce(fault)
        self._page.put("fault_ns", time.monotonic_ns())
        if fault.action is Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action is Action.SEGFAULT:
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fault.action is Action.FREEZE:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action is Action.EXIT:
            os._exit(0)
        elif fault.action is Action.LOOP:
            while True:
                pass
        elif fault.action is Action.BLOCK:
            os.read(os.pipe()[0], 1)
        elif fault.action is Action.SLOW:
            self._slow_at = fault.point
        elif fault.action is Action.CUT:
            self._cut()
        elif fault.action is Action.RAISE:
            raise PlannedFault(f"planned fault in {fault.point} of step {self.step}")
        else:
            self._flip(fault.action)
