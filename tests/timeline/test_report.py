import io

import msgspec
import pytest
from rich.console import Console

from relight.core.account.report import DoubtReport, JobReport, PublishReport, decode_report, encode_report
from relight.timeline.report import describe_recovery, describe_writes, render_report
from tests.timeline import jobs


def printed(report: JobReport, width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(render_report(report))
    return console.export_text()


def test_a_report_survives_the_file() -> None:
    for make in (jobs.plain, jobs.rolled_back, jobs.taken_over):
        report = make()[0]
        assert decode_report(encode_report(report)) == report


def test_a_failure_knows_when_it_struck() -> None:
    (failure,) = jobs.rolled_back()[0].failures
    assert failure.struck_seconds == pytest.approx(0.730)
    assert msgspec.structs.replace(failure, detect_seconds=None).struck_seconds == 0.742


def test_the_report_says_what_failed_and_how_it_was_recovered() -> None:
    text = printed(jobs.rolled_back()[0])
    for part in (
        "killed by SIGKILL",
        "FORWARD",
        "742 ms",
        "12.0 ms",
        "back, step",
        "standby",
        "3.0 MiB",
        "10 of 10",
        "70.0 ms (6.67% of the job)",
        "0123456789abcdef",
        "python 3.11.9",
    ):
        assert part in text


def test_stages_that_took_no_time_have_no_column() -> None:
    lines = printed(jobs.rolled_back()[0]).splitlines()
    header = lines[lines.index(next(line for line in lines if line.startswith("Seconds"))) + 1].split()
    assert header == ["#", "detect", "stop", "replace", "copy", "resume", "redo", "total"]


def test_several_recoveries_have_a_median() -> None:
    report = jobs.rolled_back()[0]
    one = report.recoveries[0]
    more = tuple(
        msgspec.structs.replace(
            one,
            number=number,
            stages=msgspec.structs.replace(one.stages, total_seconds=number / 10, detect_seconds=None),
        )
        for number in (1, 2, 3)
    )
    text = printed(msgspec.structs.replace(report, recoveries=more))
    median = next(line for line in text.splitlines() if line.startswith("median"))
    assert median.split()[1] == "–"
    assert median.split()[-1] == "0.200"


def test_an_empty_report() -> None:
    text = printed(JobReport(job="nothing"))
    assert "Job nothing: 0 steps in 0. Nothing failed." in text
    assert "Failures" not in text


def test_a_failed_job_says_why_first() -> None:
    text = printed(JobReport(job="j", steps=4, error="no standby is left"))
    assert text.startswith("Job j: ended with an error after 4 steps.\nno standby is left")
    assert "Nothing failed" not in text


def test_nothing_a_script_printed_can_command_the_terminal() -> None:
    report = jobs.rolled_back()[0]
    evil = msgspec.structs.replace(report.failures[0], evidence="\x1b[2J[bold]boo[/bold]\x07", kind="[red]")
    text = printed(msgspec.structs.replace(report, failures=(evil,), notices=("\x9bnotice",), error="\x1b]0;title"))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\x9b" not in text
    assert "[bold]boo[/bold]" in text
    assert "[red]" in text


def test_the_report_fits_a_narrow_terminal() -> None:
    report = msgspec.structs.replace(jobs.rolled_back()[0], notices=("a notice " * 20,))
    assert max(len(line) for line in printed(report, width=72).splitlines()) <= 72


def test_a_recovery_in_a_sentence() -> None:
    report = jobs.taken_over()[0]
    assert describe_recovery(report, report.recoveries[0]) == (
        "Recovery 1 of 1, 60.0 ms: rank 2 (w2): killed in OPTIMIZER of step 7; forward to version 8; "
        "rank 2 taken over by a standby."
    )


def test_what_was_published_is_in_the_totals() -> None:
    published = PublishReport(updates=3, updates_bytes=3 * 2**20, updates_seconds=0.2, engines={"b": 10, "a[red]": 8})
    report = msgspec.structs.replace(jobs.plain()[0], published=published)
    assert "3 versions (3.0 MiB); a[red] has 8, b has 10" in printed(report)
    assert decode_report(encode_report(report)) == report
    assert "published" not in printed(jobs.plain()[0])


def test_steps_before_a_checkpoint_are_not_this_jobs() -> None:
    resumed = JobReport(job="j", steps=60, until=60, began_at=40, wall_seconds=9)
    assert "20 steps in 9" in printed(resumed)
    assert "from step 40 to step 60" in printed(resumed)


@pytest.mark.parametrize("until", [60, 30])
def test_a_job_that_was_finished_already_says_so(until: int) -> None:
    text = printed(JobReport(job="j", steps=60, until=until, began_at=60, wall_seconds=9))
    assert f"nothing left to do: the checkpoint is at step 60, and {until} were asked for" in text
    assert "60 of 30" not in text
    assert "steps in" not in text


def test_it_says_whether_the_bits_are_known() -> None:
    report = jobs.rolled_back()[0]
    assert "bits as undisturbed" not in printed(report)  # of an older relight
    assert "bits as undisturbed  yes" in printed(msgspec.structs.replace(report, bits_as_undisturbed="yes"))
    doubt = DoubtReport(rank=1, process="w1", step=7, reason="a collective was cut short")
    doubted = printed(msgspec.structs.replace(report, bits_as_undisturbed="not known", doubts=(doubt,)))
    assert "bits as undisturbed  not known, because rank 1 in step 7: a collective was cut short" in doubted
    failed = printed(msgspec.structs.replace(report, error="every replica is lost"))
    assert "bits as undisturbed  not known, because the job ended with an error" in failed


def test_what_became_of_what_survivors_had_written() -> None:
    report = jobs.rolled_back()[0]
    (recovery,) = report.recoveries
    assert describe_writes(recovery) == ""
    wrote = msgspec.structs.replace(recovery, wrote=(0, 2))
    assert describe_writes(wrote) == "ranks 0, 2 had begun to write: it was undone"
    assert describe_writes(msgspec.structs.replace(wrote, decision="forward")).endswith("it was finished")
    torn = msgspec.structs.replace(recovery, wrote=(0, 2), torn=(2,))
    assert describe_writes(torn) == (
        "a write of rank 2 was cut short, and what it held was replaced; rank 0 had begun to write: it was undone"
    )
    assert "it was undone" in printed(msgspec.structs.replace(report, recoveries=(wrote,)), width=160)
