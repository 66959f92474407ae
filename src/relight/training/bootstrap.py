"""Runs the user's script inside a worker process: `python -m relight.training.bootstrap`, started by the agent."""

import os
import runpy
import sys
from pathlib import Path

from relight.training.data.rng import seed_everything
from relight.training.ending import end_with, leave, report_end
from relight.training.job import joined
from relight.training.process.leftovers import keep_together
from relight.training.process.stacks import answer_for_stacks
from relight.wire.settings import JobSettings, read_settings


def main() -> None:
    """Run the script named in the job's settings as `__main__`."""
    private_dir = Path(os.environ["RELIGHT_PRIVATE_DIR"])
    settings = read_settings(private_dir)
    answer_for_stacks(private_dir, os.environ["RELIGHT_PROCESS"])
    keep_together(private_dir, os.environ["RELIGHT_PROCESS"])
    if settings.evidence:  # a script without seeds begins alike in each attempt; a replacement, like no other process
        seed_everything(settings.seed, "prove", 0, int(os.environ["RELIGHT_PROCESS"].removeprefix("w")))
    sys.argv = [settings.script, *settings.script_arguments]
    try:
        _run(settings)
        runtime = joined()
        if runtime is not None and runtime.lifecycle is not None:
            runtime.lifecycle.at_end_of_script()
    except SystemExit as exit_:
        if exit_.code in (None, 0):
            report_end(joined())
        raise
    except BaseException as error:
        end_with(joined(), error)
    report_end(joined())
    leave(0)


def _run(settings: JobSettings) -> None:
    if settings.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(settings.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(settings.script).resolve().parent))
        runpy.run_path(settings.script, run_name="__main__")


if __name__ == "__main__":
    main()
