"""A verdict on a job's bits, in words: those of an undisturbed run or not. Pure: from what the report holds."""

from collections.abc import Sequence

from relight.core.account.report import DoubtReport, JobReport

YES = "yes"
NOT_KNOWN = "not known"
TITLE = "bits as undisturbed"
_LISTED = 3


def verdict_of(doubts: Sequence[DoubtReport], *, vouched: bool) -> str:
    """The verdict on a job whose ranks ended with equal digests. `vouched`: every rank gave its number of doubts."""
    return YES if vouched and not doubts else NOT_KNOWN


def describe_bits(report: JobReport) -> str:
    """The words after "bits as undisturbed: "; empty before there is a verdict."""
    if report.bits_as_undisturbed == YES:
        return YES
    if report.doubts:
        return f"{NOT_KNOWN}, because {describe_doubts(report.doubts)}"
    if report.error:
        return f"{NOT_KNOWN}, because the job ended with an error"
    if report.bits_as_undisturbed:
        return f"{NOT_KNOWN}, because the relight that ran it did not look for doubts"
    return ""


def describe_doubts(doubts: Sequence[DoubtReport]) -> str:
    """The reasons in one clause, each once, with who gave it first."""
    by_reason: dict[str, list[DoubtReport]] = {}
    for doubt in doubts:
        by_reason.setdefault(doubt.reason, []).append(doubt)
    said = [f"{_where(alike)}: {reason}" for reason, alike in by_reason.items()]
    left = len(said) - _LISTED
    return "; and ".join(said[:_LISTED]) + (f"; and {left} more" if left > 0 else "")


def _where(alike: Sequence[DoubtReport]) -> str:
    ranks = sorted({doubt.rank for doubt in alike})
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"{who} in step {alike[0].step}"
