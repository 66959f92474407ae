"""Writes the files that describe the whole job: report.json at its end, coverage.json of a divided state."""

import functools
from pathlib import Path

import msgspec

from relight.chaos.plan import describe_fault
from relight.core.account.report import JobReport, encode_report
from relight.core.controller import Controller
from relight.core.replay import replay
from relight.server.job.job import Job
from relight.server.records.journal import records
from relight.wire.versions import installed_versions


class ReportFiles:
    """Never raises: a file that cannot be written is an alarm to the observers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._run_dir = Path(job.settings.run_dir)

    def write_coverage(self) -> None:
        """Write which losses a divided state survives, for programs."""
        if self._job.core.coverage is not None:
            text = msgspec.json.format(msgspec.json.encode(self._job.core.coverage), indent=2)
            self._write(self._run_dir / "coverage.json", "the coverage", text + b"\n")

    def write_report(self, error: str) -> None:
        """Write the report of a job that has ended; `error`: why, if it failed."""
        report = self._full_report()
        idle = [fault for fault in self._job.settings.plan.faults if fault not in self._job.core.faults_struck]
        unused = [f'planned fault did not occur: "{describe_fault(fault)}"' for fault in idle]
        for notice in unused:
            self._job.observers.tell("warning", notice)
        report = msgspec.structs.replace(
            report,
            job=self._job.settings.job,
            started_wall=self._job.clock.started_wall,
            published=self._job.publications.report(),
            storage_waits=tuple(self._job.journal.storage_waits),
            notices=(*report.notices, *unused),
            error=error,
            versions={**installed_versions(), **report.versions},
        )
        self._write(self._run_dir / "report.json", "the report", encode_report(report))

    def _full_report(self) -> JobReport:
        """Report on all failures, also where the core has kept only the newest of them."""
        report = self._job.core.report()
        if not self._job.core.job_stats.forgot:
            return report
        try:
            remember_all = functools.partial(Controller, full_account=True)
            return replay(self._job.core.settings, records(self._job.journal.so_far()), remember_all).report()
        except Exception as error:  # no error here may prevent the end of the job
            count = self._job.core.job_stats.failures.count
            text = f"only the newest of {count} failures are listed: the journal cannot be read ({error})"
            return msgspec.structs.replace(report, notices=(*report.notices, text))

    def _write(self, path: Path, what: str, text: bytes) -> None:
        """Write the whole file or nothing."""
        try:
            draft = path.with_suffix(".tmp")
            draft.write_bytes(text)
            draft.replace(path)
        except OSError as error:
            self._job.observers.alarm(f"{what} {path} cannot be written: {error.strerror or error}")
