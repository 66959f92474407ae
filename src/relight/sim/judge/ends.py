"""Judge the end of a job: whether it finished with the right bits, or had to end."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from relight.core.account.report import JobReport
from relight.core.account.verdict import YES
from relight.core.protocol.commands import EndJob
from relight.core.protocol.events import Stopped, TrainingDone
from relight.core.protocol.fault import Action
from relight.core.recovery.shards import Shards
from relight.sim.judge.restores import complete_snapshots
from relight.sim.model.contents import State, Violation, digest_of, part_key
from relight.sim.model.worker.worker import SimulatedWorker

if TYPE_CHECKING:
    from relight.sim.judge.checker import Checker

# Where a bit may flip of what was just copied.
_AFTER_A_COPY = ("TAKE_OVER", "PRIVATE", "ROLLBACK", "REFORM")


def check_end(seen: "Checker", end: EndJob, report: JobReport) -> None:
    """The job has ended; was that its right end?"""
    quiet = not seen.faults and not seen.disturbed
    if quiet and seen.generation > 1 and not any(f.rank < 0 for f in report.failures):
        raise Violation(f"L3: generation {seen.generation} though nothing ever happened")
    if not end.error:
        members = _those_who_are_done(seen)
        _check_completed(seen, members)
        _check_report(seen, report, [worker.state for worker in members])
        _check_verdict(seen, report, members)
    elif _is_torn_at_the_end(seen, end.error):
        pass  # it had to end anyway, and what a last checkpoint would need was torn
    elif any(text in end.error for text in ("every replica", "no intact replica", "every copy is lost")):
        _check_all_lost(seen, end)
    elif not _is_excused(seen, end.error):
        raise Violation(f"L1: the job ended without need: {end.error}")


def _those_who_are_done(seen: "Checker") -> list[SimulatedWorker]:
    """The workers, in rank order, that reported last that all steps are done. By now they have ended."""
    done = [(w.last_report.generation, w) for w in seen.workers.values() if isinstance(w.last_report, TrainingDone)]
    last = max((generation for generation, _ in done), default=0)
    return sorted((worker for generation, worker in done if generation == last), key=lambda worker: worker.rank)


def _check_completed(seen: "Checker", members: Sequence[SimulatedWorker]) -> None:
    """I12: the end is that of the run that nothing disturbed."""
    if len(members) != seen.world_size:
        raise Violation(f"I12: the job ended well, and {len(members)} ranks had done all steps")
    held: dict[int, int] = {}  # content of each part
    for worker in members:
        seen.check_content(worker, "ends with")
        if held.setdefault(worker.rank % seen.parts, worker.state.content) != worker.state.content:
            raise Violation(f"I12: rank {worker.rank} ends with another content than those who hold the same part")
        if worker.state.applied != tuple(range(seen.until)):
            raise Violation(f"I2: rank {worker.rank} applied the steps {worker.state.applied}")


def _check_report(seen: "Checker", report: JobReport, states: Sequence[State]) -> None:
    """The report must say what happened. `states`: by rank, which are right, but for flipped bits."""
    if (report.final_version, report.until, report.error) != (seen.until, seen.asked, ""):
        raise Violation(f"I12: the report says version {report.final_version} of {report.until}: {report.error}")
    ranks = range(seen.world_size)
    keys = [part_key(rank, seen.parts) for rank in ranks]
    digests = [digest_of(state, rank, seen.parts) for rank, state in enumerate(states)]
    if report.final_state_digest != Shards(keys).digest(digests):
        raise Violation(f"I12: the report has the digest {report.final_state_digest}")
    answered = sorted(number for recovery in report.recoveries for number in recovery.failures)
    if answered != [failure.number for failure in report.failures]:
        raise Violation(f"I12: failures {answered} were answered, of {len(report.failures)}")


def _check_verdict(seen: "Checker", report: JobReport, members: Sequence[SimulatedWorker]) -> None:
    """I20: what the report says about the bits."""
    privates = seen.privates[seen.until]
    wrong = [w.rank for w in members if w.state != seen.states[seen.until] or w.private != privates[w.rank]]
    flipped = [seen.workers[name].rank for action, name, _ in seen.faults if action is Action.FLIP_PARAMETER]
    if report.bits_as_undisturbed == YES and wrong:
        found = {failure.rank for failure in report.failures if failure.kind == "corruption"}
        if found.issuperset(flipped):  # else a bit has flipped that no comparison showed
            raise Violation(f"I20: ranks {wrong} end with other bits than an undisturbed run, which the report denies")
    if report.bits_as_undisturbed != YES and not wrong and not (seen.wrong.doubted or flipped):
        raise Violation(f"I20: the bits are {report.bits_as_undisturbed}, which no rank has doubted: {report.doubts}")


def _check_all_lost(seen: "Checker", end: EndJob) -> None:
    holders = [
        worker
        for worker in seen.workers.values()
        if worker.healthy and worker.page.rank >= 0 and not seen.is_lost(worker) and worker.name not in seen.fenced
    ]
    of_private = seen.falling_back and seen.private_may_be_lost()  # that is why they were going back
    if {worker.rank % seen.parts for worker in holders} == set(range(seen.parts)) and not of_private:
        names = ", ".join(worker.name for worker in holders)
        raise Violation(f"L1: {names} hold all of the state, but: {end.error}")
    kept, places = seen.kept
    living = {worker.name for worker in seen.workers.values() if worker.healthy and worker.name not in seen.fenced}
    if places and all(living & set(holders) for holders in places):
        raise Violation(f"L1: of version {kept} every rank's snapshot had a holder that lives, but: {end.error}")
    members = seen.members()
    visible = [set(w.last_report.checkpoints) for w in members if isinstance(w.last_report, Stopped)]
    if len(visible) == seen.world_size and set.intersection(*visible) and not seen.wrong.flipped:
        raise Violation(f"L1: all ranks see checkpoints {sorted(set.intersection(*visible))}, but: {end.error}")
    below = complete_snapshots(seen, members) if len(members) == seen.world_size else []
    if below:
        raise Violation(f"L1: snapshots of versions {below} are in memory, but: {end.error}")


def _is_torn_at_the_end(seen: "Checker", error: str) -> bool:
    """Return whether the script's own bug ends the job, and some survivor was torn by a surprise when it did."""
    why, unsaved, _ = error.partition("No last checkpoint was written: ")
    torn = any(w.alive and not w.machine.blank and seen.is_lost(w) for w in seen.members())
    return bool(unsaved) and torn and "times in the same place" in why and _is_excused(seen, why)


def _is_excused(seen: "Checker", error: str) -> bool:
    """Return whether these faults must end a job in this way."""
    unsaved = error.partition("No last checkpoint was written: ")[2]
    if unsaved.startswith(("it was not done within", "not all of it is there")):
        return _could_not_save(seen, error)
    if unsaved and not seen.disturbed and all(kind is Action.RAISE for kind, _, _ in seen.faults):
        # Who raised stays and keeps its state, so nothing of it is missing.
        return unsaved.startswith(("no step was finished yet", "that of step"))
    return next((excuses(seen, error) for words, excuses in _EXCUSES.items() if words in error), False)


def _struck(seen: "Checker") -> Iterator[tuple[Action, SimulatedWorker]]:
    return ((kind, seen.workers[name]) for kind, name, _ in seen.faults)


def _could_not_save(seen: "Checker", _error: str) -> bool:
    """A rank that cannot write reports it, or is known to be dead; unless it hung after it had answered Stop."""
    reports = [worker.last_report for worker in seen.workers.values() if worker.hung]
    hangs = any(isinstance(r, Stopped) and r.generation == seen.generation for r in reports)
    torn = any(worker.surprised for worker in seen.workers.values())
    return hangs or torn or seen.private_may_be_lost()


def _struck_when_done(seen: "Checker", error: str) -> bool:
    late = [worker for _, worker in _struck(seen) if worker.state.version == seen.until]
    return any(f"rank {worker.rank} " in error for worker in late)


def _left_while_loading(seen: "Checker", _error: str) -> bool:
    points, kinds = {point for _, _, point in seen.faults}, {kind for kind, _, _ in seen.faults}
    return bool({"START", "LOADING", "ENTERED"} & points and {Action.EXIT, Action.RAISE} & kinds)


def _looped_at_first(seen: "Checker", _error: str) -> bool:
    return any(kind is Action.LOOP and worker.state.version == 0 for kind, worker in _struck(seen))


def _lost_private_state(seen: "Checker", _error: str) -> bool:
    """Private state dies with the process and its agent."""
    return seen.private_may_be_lost()


def _had_no_majority(seen: "Checker", error: str) -> bool:
    kinds = [kind for kind, _, _ in seen.faults]
    alone = len(kinds) == 1 and not seen.disturbed and seen.world_size >= 3 * seen.parts
    # After the first step the script is taken for the cause.
    return Action.FLIP_PARAMETER in kinds and (not alone or "of version 1 " in error)


def _copied_other_bits(seen: "Checker", _error: str) -> bool:
    return any(kind is Action.FLIP_PARAMETER and point in _AFTER_A_COPY for kind, _, point in seen.faults)


def _lost_a_host(seen: "Checker", _error: str) -> bool:
    return "host lost" in seen.disturbed


def _started_in_vain(seen: "Checker", _error: str) -> bool:
    """Counts a worker that died before its agent, itself lost, could report what it had started."""
    return len(seen.faults) + ("agent" in seen.disturbed) > 3


def _struck_again(seen: "Checker", _error: str) -> bool:
    again = [worker.rank for kind, worker in _struck(seen) if kind in (Action.LOOP, Action.RAISE)]
    return len(again) > len(set(again)) or "blackhole" in seen.disturbed


_EXCUSES: dict[str, Callable[["Checker", str], bool]] = {  # by words of the error, of which the first decide
    "training finished, but": _struck_when_done,
    "before its first step": _left_while_loading,
    "did not reach its first step": _looped_at_first,
    "private state": _lost_private_state,
    "differs between": _had_no_majority,
    "halting rather than training": _copied_other_bits,
    "was lost before the first step": _lost_a_host,
    "was lost before its scripts had ended": _lost_a_host,
    "starts have failed": _started_in_vain,
    "times in the same place": _struck_again,
}
