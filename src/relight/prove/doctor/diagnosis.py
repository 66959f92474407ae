"""The diagnosis of `relight doctor`, from the records of one short job; and in sentences. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from relight.core.account.report import JobReport
from relight.core.protocol.events import BitsDoubted, Event, TrainingEntered, WorkerFailed, WorkerNotice
from relight.wire.records.examined import Examined, Protected
from relight.words import count

NOTHING = "nothing to change"
CHANGE = "something to change"
REFUSED = "refused"
FAILED = "failed"
STATUSES = {NOTHING: 0, CHANGE: 1, REFUSED: 2, FAILED: 2}
_MOST_SHOWN = 12
_PLACE = re.compile(r"\S+:\d+\b")
_ENDED = re.compile(r"rank (\d+) .* before its first step$")
_OF_RANK = re.compile(r"^rank \d+: ")
FOUR_LINES = """\
  job = relight.init()                      # instead of dist.init_process_group(...)
  training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
  for step in training.steps(until=10_000): # instead of: for batch in loader
      with step as batch:                   # around forward, backward and optimizer.step()"""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to change."""

    text: str
    place: str = ""  # "train.py:31", if it is known
    ranks: tuple[int, ...] = ()


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `relight doctor --json`."""

    format: int = 1
    script: str
    ranks: int
    steps: int = 0  # that were computed
    verdict: str
    protected: tuple[Protected, ...] = ()
    has_data: bool = False  # the position in the data is protected too
    carried: tuple[str, ...] = ()  # variables of the script that go on from step to step, with their lines
    findings: tuple[Finding, ...] = ()
    remarks: tuple[str, ...] = ()  # about this host: nothing in the script to change
    traceback: str = ""  # of a script that was refused, or failed by itself


def without_relight(script: str, ranks: int) -> Diagnosis:
    """Diagnose a script that trains without relight; it was not run."""
    text = (
        f"{Path(script).name} does not use relight: neither it nor a file beside it that it imports names relight. "
        f"With `import relight`, four lines change:\n{FOUR_LINES}"
    )
    return Diagnosis(script=script, ranks=ranks, verdict=REFUSED, findings=(Finding(text=text),))


def diagnose(
    script: str,
    ranks: int,
    report: JobReport,
    events: Sequence[Event],
    examined: Sequence[Examined],
    printed: Mapping[int, str],
) -> Diagnosis:
    """Diagnose a script that was run. `events`: of the job's journal; `printed`: the last lines of each rank."""
    remarks = tuple(dict.fromkeys(text for one in examined for text in one.of_machine))
    failures = [event for event in events if isinstance(event, WorkerFailed)]
    first = examined[0] if examined else None
    found = Diagnosis(
        script=script,
        ranks=ranks,
        steps=report.steps,
        verdict=NOTHING,
        protected=first.protected if first else (),
        has_data=first.has_data if first else False,
        carried=tuple(dict.fromkeys(name for one in examined for name in one.carried)),
        remarks=remarks,
    )
    findings = _warnings(events, examined, remarks)
    if not report.error:
        return msgspec.structs.replace(found, verdict=CHANGE if findings else NOTHING, findings=findings)
    entered = any(isinstance(event, TrainingEntered) for event in events)
    reasons, verdict, trace = _reasons(report, failures, printed, entered=entered)
    return msgspec.structs.replace(found, verdict=verdict, findings=(*reasons, *findings), traceback=trace)


def explain_diagnosis(found: Diagnosis) -> list[str]:
    """The diagnosis in lines."""
    said = []
    if found.verdict == FAILED and found.traceback:
        said += ["The script failed by itself:", found.traceback.rstrip()]
    if found.protected:
        beside = " and the position in the data" if found.has_data else ""
        said.append(f"Protected, besides random streams{beside}:")
        said += [f"  {_describe(one)}" for one in found.protected]
    if found.carried:
        left = len(found.carried) - _MOST_SHOWN
        more = f", and {left} more" if left > 0 else ""
        said.append(f"Carried from step to step: {', '.join(found.carried[:_MOST_SHOWN])}{more}")
    said += [f"About this host: {text}" for text in found.remarks]
    if found.findings:
        said.append(f"{'To change' if found.verdict == CHANGE else 'Why'}:")
        said += [f"  {number}. {_say(each)}" for number, each in enumerate(found.findings, 1)]
    return [*said, _conclude(found)]


def _conclude(found: Diagnosis) -> str:
    if found.verdict == REFUSED:
        return "REFUSED: relight does not train this script as it is."
    if found.verdict == FAILED:
        return "FAILED: the script does not come through its first steps."
    unseen = (
        f"Not seen: what the script does for the first time after {count(found.steps, 'step')} (--steps), files that "
        "it writes by itself, and failures; `relight prove` tries those."
    )
    if found.verdict == CHANGE:
        return f"SOMETHING TO CHANGE: the script trains, but its bits after a failure may not be known. {unseen}"
    return f"NOTHING TO CHANGE in {count(found.steps, 'step')} on {count(found.ranks, 'rank')}. {unseen}"


def _reasons(
    report: JobReport, failures: Sequence[WorkerFailed], printed: Mapping[int, str], *, entered: bool
) -> tuple[tuple[Finding, ...], str, str]:
    """Return why the job ended early, the verdict, and the traceback to show."""
    own = [failure for failure in failures if failure.kind != "usage"]
    refused = [failure for failure in failures if failure.kind == "usage"]
    if refused:  # other ranks may have failed because one was
        return tuple(_merge(_of_failure(one) for one in refused)), REFUSED, refused[0].traceback
    if own:
        return tuple(_merge(_of_failure(one) for one in own[:1])), FAILED, own[0].traceback
    if not entered and "must call relight.init()" in report.error:
        text = "the script came to its end and took no step from training.steps(). Its loop is to be:\n" + FOUR_LINES
        return (Finding(text=text),), REFUSED, ""
    if report.failures:
        lost = report.failures[0]
        text = f"rank {lost.rank} was lost in step {lost.step}, in {lost.phase} ({lost.kind}): {lost.evidence}"
        return (Finding(text=text),), FAILED, lost.stack
    verdict = REFUSED if report.error.startswith("the state of version") else FAILED
    ended = _ENDED.match(report.error)  # before relight.init(), so no worker has told why
    return (Finding(text=report.error),), verdict, printed.get(int(ended[1]), "") if ended else ""


def _of_failure(failure: WorkerFailed) -> Finding:
    """The whole message, of which the summary is the beginning; it has one line as a rule."""
    lines = failure.traceback.rstrip().splitlines()
    text = lines[-1] if lines and failure.summary[:200] in lines[-1] else failure.summary
    return Finding(
        text=re.sub(r"^(relight\.errors\.)?UsageError: ", "", text), place=failure.place, ranks=(failure.rank,)
    )


def _warnings(events: Iterable[Event], examined: Sequence[Examined], remarks: Sequence[str]) -> tuple[Finding, ...]:
    said = [(event.rank, event.text) for event in events if isinstance(event, WorkerNotice)]
    said = [(rank, text) for rank, text in said if text not in remarks]
    risks = [(event.rank, event.reason) for event in events if isinstance(event, BitsDoubted)]
    risks += [(one.rank, one.risk) for one in examined if one.risk]
    said += [
        (rank, f"after a failure the bits would not be known, because {why}")
        for rank, why in risks
        if not any(why in text for _, text in said)
    ]
    return tuple(_merge(Finding(text=_OF_RANK.sub("", text), ranks=(rank,)) for rank, text in said))


def _merge(findings: Iterable[Finding]) -> list[Finding]:
    """Each once, with all ranks of which it holds."""
    ranks: dict[tuple[str, str], set[int]] = {}
    for each in findings:
        ranks.setdefault((each.text, each.place), set()).update(each.ranks)
    return [Finding(text=text, place=place, ranks=tuple(sorted(of))) for (text, place), of in ranks.items()]


def _say(each: Finding) -> str:
    """A place is named in front, unless the text begins with one, which is nearer."""
    text = each.text if not each.place or _PLACE.match(each.text) else f"{each.place}: {each.text}"
    if not each.ranks:
        return text
    return f"{text} (rank{'s' if len(each.ranks) > 1 else ''} {', '.join(map(str, each.ranks))})"


def _describe(one: Protected) -> str:
    size = f", {count(one.tensors, 'tensor')}, {one.nbytes:,} bytes" if one.tensors else ""
    return f"{one.name}: {one.kind}{size}"
