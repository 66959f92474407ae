"""Runs the user's script inside a worker process: `python -m relight.training.bootstrap`, started by the agent.

Imports no torch, unless all workers of the job have it preloaded: when that is done, and with which variables in the
environment, is the script's own affair.
"""

import importlib
import importlib.util
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from relight.errors import MissingInterfaceError
from relight.training.ending import end_with, leave, report_end
from relight.training.output import tell
from relight.training.process.leftovers import keep_together
from relight.training.process.stacks import answer_for_stacks
from relight.wire.settings import JobSettings, read_settings

if TYPE_CHECKING:
    from relight.training.process.runtime import Runtime

_GROUP = "relight.after_import"  # of entry points: a function to be called once the module of that name is imported
_JOB = "relight.training.job"  # imports torch


class Extensions(MetaPathFinder):
    """Calls what extends a library as soon as a script imports that library, so that the script need not do it."""

    def __init__(self) -> None:
        self._waiting: dict[str, EntryPoint] = {each.name: each for each in entry_points(group=_GROUP)}

    def install(self) -> None:
        """Watch imports from now on."""
        for name in [name for name in self._waiting if name in sys.modules]:
            self._extend(self._waiting.pop(name))
        sys.meta_path.insert(0, self)

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Find one of these libraries as Python would, and have it extended when it has run."""
        extension = self._waiting.pop(name, None)
        spec = importlib.util.find_spec(name) if extension is not None else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_extend(module: ModuleType) -> None:
            execute(module)
            self._extend(extension)

        loader.exec_module = execute_and_extend
        return spec

    @staticmethod
    def _extend(extension: Any) -> None:
        try:
            extension.load()()
        except Exception as error:  # a script that needs it not is not to fail
            warnings.warn(f"{extension.value} could not be loaded: {type(error).__name__}: {error}", stacklevel=2)


def main() -> None:
    """Run the script named in the job's settings as `__main__`."""
    private_dir = Path(os.environ["RELIGHT_PRIVATE_DIR"])
    settings = read_settings(private_dir)
    answer_for_stacks(private_dir, os.environ["RELIGHT_PROCESS"])
    keep_together(private_dir, os.environ["RELIGHT_PROCESS"])
    sys.argv = [settings.script, *settings.script_arguments]
    try:
        _prepare(settings)
        _run(settings)
        runtime = _joined()
        if runtime is not None and runtime.lifecycle is not None:
            runtime.lifecycle.at_end_of_script()
    except SystemExit as exit_:
        if exit_.code in (None, 0):
            report_end(_joined())
        raise
    except MissingInterfaceError as error:
        tell(f"relight: {error}")
        leave(1)
    except BaseException as error:
        end_with(_joined(), error)
    report_end(_joined())
    leave(0)


def _joined() -> "Runtime | None":
    """Return the runtime that the script's `relight.init` made; None if the script has not called it."""
    job = sys.modules.get(_JOB)
    return job.joined() if job is not None else None


def _prepare(settings: JobSettings) -> None:
    """Import what is to be there before the script runs, and seed the random streams of a proof."""
    if settings.preload:  # a new process in place of one that is forked: with what torch read in the environment there
        importlib.import_module(_JOB)
    if settings.evidence:  # a script without seeds begins alike in each attempt; a replacement, like no other process
        from relight.training.data.rng import seed_everything

        seed_everything(settings.seed, "prove", 0, int(os.environ["RELIGHT_PROCESS"].removeprefix("w")))


def _run(settings: JobSettings) -> None:
    Extensions().install()
    if settings.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(settings.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(settings.script).resolve().parent))
        runpy.run_path(settings.script, run_name="__main__")


if __name__ == "__main__":
    main()
