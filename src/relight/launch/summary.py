"""The last lines of a job: what it went through, and why it failed if it did."""

import io
import sys
from pathlib import Path

import msgspec

from relight.core.account import verdict
from relight.core.account.report import JobReport, decode_report
from relight.terminal import Screen
from relight.wire.messages import JobEnded
from relight.wire.settings import JobSettings


def sum_up(settings: JobSettings, screen: Screen, ended: JobEnded | None, *, show_report: bool) -> None:
    """Show the end of a job that had started. `ended`: what the controller said last; None: it said nothing."""
    run_dir = Path(settings.run_dir)
    report = _read_report(run_dir)
    if show_report and report is not None and (report.failures or not report.error):
        _show_report(run_dir, screen)  # of a job that never came to training, the error says it all
    if report is not None and report.bits_as_undisturbed and (show_report or report.doubts):
        level = "info" if report.bits_as_undisturbed == verdict.YES else "warning"
        screen.say(f"{verdict.TITLE}: {verdict.describe_bits(report)}", level)
    if ended is not None and ended.error:
        if ended.details:
            screen.say_block(ended.details)
        screen.say(ended.error, "error")
    if ended is None or ended.error:
        screen.say(f"logs: {settings.run_dir}", "error")


def _read_report(run_dir: Path) -> JobReport | None:
    try:
        return decode_report((run_dir / "report.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return None  # the controller has said why there is none


def _show_report(run_dir: Path, screen: Screen) -> None:
    from rich.console import Console

    from relight.timeline.show import print_report, print_timeline

    text = io.StringIO()
    console = Console(file=text, force_terminal=sys.stderr.isatty(), width=None if sys.stderr.isatty() else 120)
    try:
        print_report(run_dir, console)
        print_timeline(run_dir, console)
    except Exception as error:  # a report that cannot be drawn must not hide how the job ended
        screen.say(f"the report cannot be shown ({error!r}); it lies in {run_dir}", "warning")
    screen.show_text(text.getvalue())
