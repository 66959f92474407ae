"""A job's failures in sentences: what failed, where the time went, what would have made it faster. Pure."""

from collections import Counter
from collections.abc import Iterable

from relight.core.account import verdict
from relight.core.account.report import FailureReport, JobReport, RecoveryReport
from relight.core.detection.stack import main_frames
from relight.timeline.draw.terminal import duration
from relight.timeline.report import describe_writes, plain
from relight.words import count

# A stage is worth a sentence if it took this share of a recovery, and this long.
_SHARE = 0.3
_WORTH_SECONDS = 0.05
_LARGE_COPY_BYTES = 2**24  # of less, the time goes into the steps around the copy, and its rate tells nothing
_SLOW_COPY_BYTES_PER_SECOND = 200e6  # below a slow disk: something else held the copy up
_SEVERAL = 3  # recoveries of which something can be said together
_CALLS = 12  # of a stack
_REPEATED = 3  # failures of one rank that no longer look like chance

_STAGES = {
    "detect": "noticing it",
    "stop": "stopping the healthy ranks",
    "replace": "finding a process for the lost rank",
    "reform": "forming the new process group",
    "finish": "finishing the step that was all but done",
    "copy": "copying the state",
    "digest": "verifying the state",
    "rollback": "rolling back",
    "resume": "comparing notes and beginning again",
}

_OF_RANKS = {  # by kind of failure
    "corruption": "The state of rank {} had changed by itself: test that host's memory and device before you use it "
    "again.",
    "slow": "Rank {} was replaced because it was slow, not because it failed: look at that device, and at what else "
    "runs on its host.",
    "out of memory": "Memory ran out on rank {}: a smaller batch, or fewer processes on that host (a standby needs as "
    "much as a worker), would have prevented it.",
}


def explain(report: JobReport, unfinished: str = "") -> list[str]:
    """Paragraphs, most important first. `unfinished`: how a job without an end stands, such as "is still running"."""
    found = [_so_far(report, unfinished) if unfinished else _outcome(report)]
    found += [_recovery(report, recovery) for recovery in report.recoveries]
    found += [_calls(failure) for failure in report.failures if failure.kind == "hang" and main_frames(failure.stack)]
    unanswered = _unanswered(report)
    if unanswered:
        found.append(unanswered)
    found += _patterns(report)
    if bits := verdict.describe_bits(report) if report.doubts or not report.error else "":
        found.append(f"{verdict.TITLE.capitalize()}: {bits}.")
    return [plain(paragraph) for paragraph in found]


def _outcome(report: JobReport) -> str:
    if report.error:
        first, _, _ = report.error.partition("\n")
        of = f" of {report.until:,}" if report.until else ""
        return f"The job ended early, after {report.steps:,}{of} steps: {first}"
    steps = count(report.steps - report.began_at, "step")
    if report.began_at >= report.until > 0:
        return f"There was nothing left to do: the checkpoint is at step {report.began_at:,}."
    if report.began_at:
        steps += f" from the checkpoint of step {report.began_at:,} on"
    if not report.failures:
        return f"All {steps} are done in {duration(report.wall_seconds)}, and nothing failed."
    share = report.time_lost_seconds / report.wall_seconds if report.wall_seconds else 0.0
    same = report.bits_as_undisturbed == verdict.YES
    return (
        f"All {steps} are done in {duration(report.wall_seconds)}. {count(len(report.failures), 'failure')} cost "
        f"{duration(report.time_lost_seconds)} ({share:.2%} of the time) and {count(report.steps_repeated, 'step')} "
        f"computed again{'; the state at the end is what it would have been without' if same else ''}."
    )


def _so_far(report: JobReport, unfinished: str) -> str:
    of = f" of {report.until:,}" if report.until else ""
    said = f"The job {unfinished}, after {report.steps:,}{of} steps and {duration(report.wall_seconds)}"
    if not report.failures:
        return f"{said}; nothing has failed."
    return (
        f"{said}. So far {count(len(report.failures), 'failure')} cost {duration(report.time_lost_seconds)} and "
        f"{count(report.steps_repeated, 'step')} computed again."
    )


def _recovery(report: JobReport, recovery: RecoveryReport) -> str:
    failures = [failure for failure in report.failures if failure.number in recovery.failures]
    said = [f"Recovery {recovery.number}: {_list(_failure(failure) for failure in failures) or 'something failed'}."]
    guessed = any(failure.estimated for failure in failures if failure.number == min(recovery.failures))
    how = "about {} after the fault, as far as the last signs of progress tell" if guessed else "after {}"
    said.append(f"Training went on {how.format(duration(recovery.stages.total_seconds))}.")
    if recovery.tier != "replica":
        said.append(
            f"No replica had all of the state ({recovery.reason}), so all ranks went back to version "
            f"{recovery.target_version}: {count(recovery.steps_undone, 'finished step')} had to be computed again."
        )
    if recovery.restarts:
        said.append(
            f"{count(recovery.restarts, 'more failure')} struck while it recovered, and each began the recovery again."
        )
    if writes := describe_writes(recovery):
        said.append(f"{writes[0].upper()}{writes[1:]}.")
    said += _unnoticed(recovery, failures)
    said += _slow_stages(report, recovery, failures)
    return " ".join(said)


def _unnoticed(recovery: RecoveryReport, failures: list[FailureReport]) -> list[str]:
    """Describe when a hang began: only its last sign of progress is known."""
    idle = [f for f in failures if f.idle_seconds is not None and f.idle_seconds >= _WORTH_SECONDS]
    if recovery.stages.detect_seconds is not None or not idle:
        return []  # the time to its notice is one of the stages
    longest = max(idle, key=lambda failure: failure.idle_seconds or 0.0)
    return [
        f"Before that, {duration(longest.idle_seconds or 0.0)} had passed since the last sign of progress: "
        f"{_patience(longest.kind)}."
    ]


def _patience(kind: str) -> str:
    if kind == "frozen":
        return "a process that was stopped is given --frozen-timeout-seconds"
    return (
        "a rank without progress is given --hang-timeout-seconds (and --outside-hang-timeout-seconds between two "
        "steps) before it is replaced; if your steps are short, shorter ones are safe"
    )


def _failure(failure: FailureReport) -> str:
    where = f" in {failure.phase} of step {failure.step}" if failure.phase and failure.step >= 0 else ""
    return f"{_who(failure)} was lost{where} ({failure.evidence.rstrip('.') or failure.kind})"


def _who(failure: FailureReport) -> str:
    return f"rank {failure.rank}" if failure.rank >= 0 else (failure.process or "the job")


def _calls(failure: FailureReport) -> str:
    """Say where a rank hung, as its own Python said before it was given up."""
    frames = main_frames(failure.stack)
    left = f"\n    and {len(frames) - _CALLS} more" if len(frames) > _CALLS else ""
    calls = "".join(f"\n    {frame}" for frame in frames[:_CALLS])
    return f"When it was given up, {_who(failure)} was here, innermost call first:{calls}{left}"


def _slow_stages(report: JobReport, recovery: RecoveryReport, failures: list[FailureReport]) -> list[str]:
    """A sentence for each stage that most of the time went into, with what would have shortened it."""
    stages = recovery.stages
    said = []
    for stage, doing in _STAGES.items():
        seconds = getattr(stages, f"{stage}_seconds") or 0.0
        if seconds < _WORTH_SECONDS or seconds < _SHARE * stages.total_seconds:
            continue
        if stage == "stop" and (waited := _storage_seconds(report, failures, seconds)) >= _SHARE * seconds:
            said.append(
                f"{duration(waited)} of it passed until the journal was safe on the disk: the run directory lies on "
                f"slow storage; --run-dir on a local disk is faster."
            )
            continue
        advice = _advice(stage, report, recovery, failures, seconds)
        said.append(f"{duration(seconds)} of it went into {doing}{': ' + advice if advice else ''}.")
    return said


def _storage_seconds(report: JobReport, failures: list[FailureReport], stop_seconds: float) -> float:
    """Return how long the order to stop waited for the disk. It was written when the failures were noticed."""
    noticed = [failure.noticed_seconds for failure in failures]
    if not noticed:
        return 0.0
    begin, end = min(noticed) - 0.001, max(noticed) + stop_seconds
    return sum(wait.seconds for wait in report.storage_waits if begin <= wait.at_seconds <= end)


def _advice(
    stage: str, report: JobReport, recovery: RecoveryReport, failures: list[FailureReport], seconds: float
) -> str:
    kinds = {failure.kind for failure in failures}
    for kind in ("hang", "frozen"):
        if stage == "detect" and kind in kinds:
            return _patience(kind)
    if stage == "replace" and "fresh process" in recovery.replacement_kind:
        more = max(report.standbys + 1, len(recovery.replaced))
        return (
            f"no standby was ready, so a new process had to start Python and torch and build the model; --standby "
            f"{more} keeps one warm"
        )
    if stage == "replace" and recovery.replacement_kind == "standby":
        return (
            f"the standby was still starting, as after a failure shortly before; --standby {report.standbys + 1} keeps "
            f"another one warm"
        )
    if stage == "stop":
        return (
            "a rank pauses once its optimizer step is written and its running collective is broken off; long "
            "work between two steps (evaluation, saving) delays that too"
        )
    if stage == "copy" and recovery.moved_bytes >= _LARGE_COPY_BYTES:
        rate = recovery.moved_bytes / seconds
        slow = ", far below what memory gives: the machine was busy" if rate < _SLOW_COPY_BYTES_PER_SECOND else ""
        return f"{recovery.moved_bytes / 2**20:,.0f} MiB at {rate / 2**20:,.0f} MiB/s{slow}"
    if stage == "reform":
        return (
            f"the communication library connects {report.world_size} ranks with each other; it grows with their number"
        )
    if stage == "finish":
        return "the survivors had every gradient, so they finished the step instead of repeating it"
    return ""


def _unanswered(report: JobReport) -> str:
    """Failures that no recovery answered: standbys', or those that ended the job."""
    answered = {number for recovery in report.recoveries for number in recovery.failures}
    left = [failure for failure in report.failures if failure.number not in answered]
    if not left:
        return ""
    what = _list(_failure(failure) for failure in left)
    return f"Without a recovery: {what}."


def _patterns(report: JobReport) -> list[str]:
    """Return the observations that several failures together allow."""
    said = []
    by_rank = Counter(failure.rank for failure in report.failures if failure.rank >= 0)
    for rank, times in by_rank.most_common(1):
        if times >= _REPEATED and times > len(report.failures) / 2 and len(by_rank) < report.world_size:
            said.append(
                f"{times} of {len(report.failures)} failures are rank {rank}'s: look at what only that rank has (its "
                f"device, its share of the data; logs/rank-{rank}.log)."
            )
    cold = [r for r in report.recoveries if "fresh process" in r.replacement_kind]
    warm = [r for r in report.recoveries if r.replacement_kind == "standby"]
    if cold and warm:
        slower = _mean(cold) - _mean(warm)
        if slower > _WORTH_SECONDS:
            said.append(
                f"{count(len(cold), 'recovery', 'recoveries')} without a warm standby took {duration(slower)} longer "
                f"than those with one, on average."
            )
    if any(failure.kind == "host lost" for failure in report.failures):
        said.append(
            "A host that cannot be reached is given --agent-timeout-seconds to come back before its ranks are "
            "replaced; if your network has no such gaps, less is safe."
        )
    for kind, advice in _OF_RANKS.items():
        if ranks := sorted({failure.rank for failure in report.failures if failure.kind == kind}):
            said.append(advice.format(", ".join(map(str, ranks))))
    said += _most(report)
    if report.cut_collectives:
        said.append(
            f"Outside the protected part of a step, {count(report.cut_collectives, 'collective')} of a rank got cut "
            "short, which gave each rank its own value: put collectives into the block, before optimizer.step()."
        )
    if report.controller_restarts:
        said.append(f"The controller died and was started again {count(report.controller_restarts, 'time')}.")
    return said


def _most(report: JobReport) -> list[str]:
    """Over several recoveries: what took most of the time, and whether it was rather the repeated work."""
    if len(report.recoveries) < _SEVERAL or report.time_lost_seconds < _WORTH_SECONDS:
        return []
    redo = sum(r.stages.redo_seconds for r in report.recoveries if r.steps_repeated)
    if redo > report.time_lost_seconds / 2:
        return [
            f"Most of what the failures cost, {duration(redo)} of {duration(report.time_lost_seconds)}, was computing "
            "the interrupted steps again: only shorter steps lose less."
        ]
    spent = {s: sum(getattr(r.stages, f"{s}_seconds") or 0.0 for r in report.recoveries) for s in _STAGES}
    stage = max(spent, key=spent.__getitem__)
    if spent[stage] < report.time_lost_seconds / 2:
        return []
    return [
        f"Over all {len(report.recoveries)} recoveries most of the time, {duration(spent[stage])} of "
        f"{duration(report.time_lost_seconds)}, went into {_STAGES[stage]}."
    ]


def _mean(recoveries: list[RecoveryReport]) -> float:
    return sum(recovery.stages.total_seconds for recovery in recoveries) / len(recoveries)


def _list(words: Iterable[str]) -> str:
    found = list(words)
    return found[0] if len(found) == 1 else ", ".join(found[:-1]) + f" and {found[-1]}" if found else ""
