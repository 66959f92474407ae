"""Runs the user's script inside a worker process: `python -m relight.training.bootstrap`, started by the agent.

It reports an uncaught exception to the controller before the process ends. The traceback goes to the rank's log
file only; the terminal shows it once, for the whole job, if it turns out to be a bug.
"""

import multiprocessing
import os
import runpy
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from relight.core.events import WorkerFailed, WorkerReleased
from relight.errors import RelightError, UsageError
from relight.training import job
from relight.training.stacks import answer_for_stacks
from relight.wire.settings import JobSettings, read_settings

FILE_ONLY = "\x1e"  # agent.output writes such lines to the log file, not to the terminal


def main() -> None:
    """Run the script named in the job's settings as `__main__`."""
    private_dir = Path(os.environ["RELIGHT_PRIVATE_DIR"])
    settings = read_settings(private_dir)
    answer_for_stacks(private_dir, os.environ["RELIGHT_PROCESS"])
    sys.argv = [settings.script, *settings.script_arguments]
    try:
        _run(settings)
        if job._runtime is not None and job._runtime.at_end is not None:
            job._runtime.at_end()
    except SystemExit as exit_:
        if exit_.code in (None, 0):
            _say_goodbye()
        raise
    except BaseException as error:
        stay = _staying(error)
        _report(error, stands=stay is not None)
        if stay is not None:
            stay()
        _leave(1)
    _say_goodbye()
    _leave(0)


def _run(settings: JobSettings) -> None:
    if settings.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(settings.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(settings.script).resolve().parent)
        runpy.run_path(settings.script, run_name="__main__")


def _staying(error: BaseException) -> Callable[[], None] | None:
    """What to do instead of ending, if this process has whole state that a last checkpoint may need."""
    runtime = job._runtime
    if runtime is None or not isinstance(error, Exception) or isinstance(error, RelightError):
        return None
    return None if runtime.page.is_torn or runtime.torn else runtime.stay


def _report(error: BaseException, *, stands: bool) -> None:
    trace = "".join(traceback.format_exception(error, chain=True))
    trace = _without_our_frames(trace, mistake=isinstance(error, UsageError))
    for line in trace.splitlines():
        print(FILE_ONLY + line, file=sys.stderr, flush=True)
    runtime = job._runtime
    if runtime is None:
        print(trace, file=sys.stderr, flush=True)
        return
    runtime.link.send(
        WorkerFailed(
            process=runtime.process,
            rank=runtime.rank,
            kind="usage" if isinstance(error, RelightError) else "exception",
            step=runtime.faults.step,
            phase=runtime.page.phase.name,
            summary=f"{type(error).__name__}: {error}".splitlines()[0][:500],
            traceback=trace,
            place=_place(error),
            noticed_ns=time.monotonic_ns(),
            stands=stands,
        ),
        report=True,  # an agent that is restarted must hear of it: this process may live on
    )


def _place(error: BaseException) -> str:
    """The last line of the traceback that is not in an installed package: where to begin to look."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _is_installed(f.filename)] or frames
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""


def _is_installed(path: str) -> bool:
    """Of Python, a package, or relight itself."""
    homes = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(__file__).parent.parent))
    return path.startswith((*homes, "<frozen"))


def _without_our_frames(trace: str, *, mistake: bool) -> str:
    """Drop the frames of runpy and of this module, and all of ours if the script is to be mended."""
    ours = str(Path(__file__).parent.parent if mistake else __file__)
    kept, skipping = [], False
    for line in trace.splitlines(keepends=True):
        if line.startswith("  File "):
            skipping = "<frozen runpy>" in line or ours in line
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "".join(kept)


def _say_goodbye() -> None:
    runtime = job._runtime
    if runtime is not None:
        runtime.link.send(WorkerReleased(process=runtime.process))
        runtime.link.close()


def _leave(status: int) -> None:
    """End at once: gloo's and DDP's destructors may wait for peers that are gone."""
    for child in multiprocessing.active_children():
        if child.daemon:  # data loading processes: an ordinary exit of the interpreter would end them too
            child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
