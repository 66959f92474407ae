"""A model of one worker process: what relight.training does, without torch.

Modelled, not production: training.py, barrier.py, recovery.py and runtime.py run in threads around torch, so their
order of actions is written down here a second time, as a table of *points*, places where the main thread pauses or
waits. The restore server, which has threads of its own, is modelled too. What is *decided* in a job is decided by the
production controller, which this worker obeys.

A worker is a plain value: it holds no clock, no queue and no closure, so it can be copied and compared. That is what
lets the same model run in virtual time (timed.py) and under a search of all orders (exhaustive.py).

sim/process has its parts; here is the table that joins them.
"""

from collections.abc import Mapping
from typing import ClassVar

from relight.sim.model.process.recovery import Recovery

_HANDLERS = {
    "START": "_on_start",
    "LOADING": "_on_loaded",
    "ENTERED": "_on_begin",
    "WARMUP": "_on_warm",
    "IDLE": "_on_promoted",
    "PROMOTED": "_on_first_recovery",
    "OUTSIDE": "_begin_step",
    "FORWARD": "_run_forward",
    "GRADIENT": "_on_gradient",
    "FIRST_WRITE": "_on_first_write",
    "SECOND": "_on_second",
    "LAST_WRITE": "_on_last_write",
    "COMPARE": "_on_compared",
    "PREPARE": "_on_kept",
    "READY": "_enter_barrier",
    "BARRIER": "_on_barrier",
    "VERDICT": "_recover",
    "DIFFERS": "_recover",
    "OPTIMIZER": "_on_written",
    "EXTRA": "_on_extra",
    "EXTRA_WRITE": "_on_extra_written",
    "END": "_on_end",
    "AFTER_WRITE": "_commit",
    "AFTER_STEP": "_after_step",
    "STOP": "_stand_still",
    "PARKED": "_on_parked",
    "FINISH": "_finish_alone",
    "OBEY": "_obey",
    "COPY": "_on_copied",
    "TAKE_OVER": "_take_over",
    "PRIVATE": "_take_over",
    "ROLLBACK": "_rolled_back",
    "REFORM": "_on_formed",
    "RESTORED": "_on_resume",
    "RESUME": "_open_generation",
    "FAILED": "_supersede",
    "SAVING": "_on_saved",
    "DONE": "_on_done",
    "RELEASED": "_on_released",
    "EXITING": "_exit_well",
    "RAISED": "_exit_failed",
    "STAYS": "_recover",
}


class Worker(Recovery):
    """One process, from its start to its end."""

    __slots__ = ()

    handlers: ClassVar[Mapping[str, str]] = _HANDLERS
