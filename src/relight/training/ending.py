"""The end of a worker's script, reported to the controller before the process ends.

The traceback of an uncaught exception goes to the rank's log file only; the terminal shows it once, for the whole job,
if it turns out to be a bug.
"""

import atexit
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from relight.core.protocol.events import WorkerFailed, WorkerReleased
from relight.core.protocol.position import Phase
from relight.core.worker.events import ScriptFailed
from relight.core.worker.states import State
from relight.errors import RelightError, UsageError
from relight.script_files import is_script_file
from relight.training.output import flush, tell
from relight.training.process.holdings import Lifecycle
from relight.training.process.leftovers import end_children, expect_ends_of_children, keep_together
from relight.words import described

if TYPE_CHECKING:  # its home imports torch, which a script may do without, or import later
    from relight.training.process.runtime import Runtime

FILE_ONLY = "\x1e"  # agent.output writes such lines to the log file, not to the terminal
_STARTER = Path(__file__).with_name("bootstrap.py")


def end_with(runtime: "Runtime | None", error: BaseException) -> NoReturn:
    """Report that the script failed, and end, unless this process has state that a last checkpoint may need."""
    if runtime is not None and isinstance(error, Exception):
        runtime.await_cause()
    holder = _holder(runtime, error)
    _report(runtime, error, stands=holder is not None)
    if holder is not None:
        holder.hold_for_save()
    leave(1)


def report_end(runtime: "Runtime | None") -> None:
    """Report that the script has run to its end."""
    expect_ends_of_children()
    if runtime is not None:
        runtime.link.send(WorkerReleased(process=runtime.process))
        runtime.link.close()


def leave(status: int) -> NoReturn:
    """End at once: gloo's and DDP's destructors may wait for dead peers."""
    end_children()
    flush()
    os._exit(status)


def hook(runtime: "Runtime") -> None:
    """See the script's end from within, in a Python that relight did not start itself (`--no-python`).

    As the interpreter ends it does not say with which status; so `sys.exit` is listened to.
    """
    keep_together(Path(os.environ["RELIGHT_PRIVATE_DIR"]), runtime.process)
    own, leave_with = os.getpid(), sys.exit
    statuses: list[object] = []

    def on_sys_exit(status: object = None, /) -> NoReturn:
        statuses.append(status)
        leave_with(status)  # type: ignore[arg-type]

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != own:  # forked by the script
            sys.__excepthook__(kind, error, trace)
            return
        end_with(runtime, error)

    def on_exit() -> None:
        if os.getpid() != own or (statuses and statuses[-1] not in (None, 0)):
            return
        try:
            if runtime.lifecycle is not None and not statuses:
                runtime.lifecycle.at_end_of_script()
        except BaseException as error:
            end_with(runtime, error)
        report_end(runtime)

    sys.exit, sys.excepthook = on_sys_exit, on_exception
    atexit.register(on_exit)


def _holder(runtime: "Runtime | None", error: BaseException) -> Lifecycle | None:
    """Return the loop that holds whole state which a last checkpoint may need; None if there is none."""
    if runtime is None or not isinstance(error, Exception) or isinstance(error, RelightError):
        return None
    lifecycle = runtime.lifecycle
    if lifecycle is None:
        return None
    runtime.handle(ScriptFailed(saves=lifecycle.saves and not runtime.page.is_torn))
    return lifecycle if runtime.worker.state is State.HELD else None


def _report(runtime: "Runtime | None", error: BaseException, *, stands: bool) -> None:
    trace = "".join(traceback.format_exception(error, chain=True))
    trace = _without_our_frames(trace, mistake=isinstance(error, UsageError))
    for line in trace.splitlines():
        tell(FILE_ONLY + line)
    if runtime is None:
        tell(trace)
        return
    runtime.link.send(
        WorkerFailed(
            process=runtime.process,
            rank=runtime.rank,
            kind="usage" if isinstance(error, RelightError) else "exception",
            step=runtime.faults.step,
            phase=runtime.page.phase.name,
            summary=described(error)[:500],
            traceback=trace,
            place=_place(error),
            noticed_ns=time.monotonic_ns(),
            stands=stands,
            after_undone=runtime.worker.attempt > 0 and runtime.page.phase is Phase.OUTSIDE,
        ),
        report=True,  # an agent that is restarted must hear of it: this process may live on
    )


def _place(error: BaseException) -> str:
    """Return the last line of the traceback that is not in an installed package, as FILE:LINE."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if is_script_file(f.filename)] or frames
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""


def _without_our_frames(trace: str, *, mistake: bool) -> str:
    """Drop the frames of runpy and of what started it, and all of ours if the script is to be mended."""
    ours = str(Path(__file__).parent.parent if mistake else _STARTER)
    kept, skipping = [], False
    for line in trace.splitlines(keepends=True):
        if line.startswith("  File "):
            skipping = "<frozen runpy>" in line or ours in line
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "".join(kept)
