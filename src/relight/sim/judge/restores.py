"""Judge the order to restore: its target, its sources, and the processes that are paused for it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relight.core.protocol.commands import FallbackTier, Restore
from relight.core.protocol.events import Stopped
from relight.sim.model.contents import Violation, part_key
from relight.sim.model.worker.worker import SimulatedWorker

if TYPE_CHECKING:
    from relight.sim.judge.checker import Checker


def check_restore(seen: "Checker", restore: Restore, members: Sequence[SimulatedWorker]) -> None:
    """I2, I5, I7 to I10, I13 to I15, I23 and I24 of one order."""
    _check_all_are_paused(seen, restore, members)
    for worker in members:
        _check_alone(seen, worker)
    _check_sources(seen, restore, members)
    if restore.runs_code:
        _check_code(seen, restore)
    if restore.tier is not FallbackTier.REPLICA:
        _check_fallback(seen, restore, members)
        return
    if seen.falling_back and restore.target != seen.fallbacks[-1][1]:
        raise Violation(f"I15: to {restore.target}, though the fallback to {seen.fallbacks[-1][1]} is not done")
    if restore.target < seen.finished:
        raise Violation(f"I7: back to {restore.target} though version {seen.finished} was finished")
    if restore.target < seen.begun:
        raise Violation(f"I2: back to {restore.target}, though step {seen.begun} was begun")
    apart = any(worker.state.content in seen.wrong.own for worker in members)
    for worker in members:
        _check_reachable(seen, restore, worker, may_follow=apart)
    seen.followers = frozenset(w.rank for w in members if w.rank in restore.targets and not seen.is_lost(w))
    _check_followed(seen, restore, members)


def _check_fallback(seen: "Checker", restore: Restore, members: Sequence[SimulatedWorker]) -> None:
    """I15, and the only exception to I7: versions are undone if replicas cannot help, and as few as possible."""
    intact = {worker.rank % seen.parts for worker in members if not worker.machine.blank and not worker.page.torn}
    trusted = _trusted(restore, members)
    if trusted is not None and not seen.wrong.flipped:
        raise Violation(f"I15: fallback to the {restore.tier}, because states differ, which they do not")
    if trusted is not None and restore.target > trusted:
        raise Violation(f"I15: back to version {restore.target}, but replicas agreed last at {trusted}")
    sound = intact == set(range(seen.parts)) and trusted is None
    if sound and not seen.falling_back and not seen.private_may_be_lost():
        raise Violation(f"I15: fallback to the {restore.tier}, though every part of the state is held by a rank")
    floor = seen.fallbacks[-1][1] if seen.falling_back else seen.finished
    floor = floor if trusted is None else min(floor, trusted)
    whole = restore.tier is FallbackTier.CHECKPOINT  # all of it is of one history, undone or not
    if restore.target > floor and not whole:
        raise Violation(f"I15: back to version {restore.target}, though all had gone back to {floor}")
    known = not {"agent", "host lost"} & seen.disturbed  # else with a page it is lost who finished what
    if known and not seen.falling_back and restore.undone != max(0, seen.finished - restore.target):
        said = f"{restore.undone} versions are said to be undone"
        raise Violation(f"I15: {said}, from {seen.finished} back to {restore.target}")
    better = [version for version in complete_snapshots(seen, members) if restore.target < version <= floor]
    if better or (restore.tier is FallbackTier.CHECKPOINT and complete_snapshots(seen, members, restore.target)):
        raise Violation(f"I15: back to {restore.target} by the {restore.tier}, though {better} are in memory")
    seen.fallbacks += ((restore.generation, restore.target),)
    if restore.target < seen.kept[0]:
        seen.kept = -1, ()
    seen.falling_back = True
    seen.finished = seen.begun = restore.target


def _trusted(restore: Restore, members: Sequence[SimulatedWorker]) -> int | None:
    """The newest version before which no bit can have flipped that was found; None: none was."""
    if restore.distrust < 0:
        return None
    reports = [worker.last_report for worker in members]
    return min(restore.distrust - 1, max(r.agreed for r in reports if isinstance(r, Stopped)))


def complete_snapshots(seen: "Checker", members: Sequence[SimulatedWorker], only: int = -1) -> list[int]:
    """Versions of which every rank's snapshot was reported by those that are paused."""
    holders: dict[int, set[int]] = {}
    for worker in members:
        report = worker.last_report
        for snapshot in report.snapshots if isinstance(report, Stopped) else ():
            holders.setdefault(snapshot.version, set()).add(snapshot.rank)
    return [v for v, ranks in holders.items() if len(ranks) == seen.world_size and only in (-1, v)]


def _check_sources(seen: "Checker", restore: Restore, members: Sequence[SimulatedWorker]) -> None:
    """I14: no rank copies from a process of a host that was given up."""
    known = {worker.name for worker in members}
    strangers = [source.address for source in restore.sources if source.address not in known]
    if strangers:
        raise Violation(f"I14: the state is to be copied from {strangers}, which hold no rank")
    served = {source.shard for source in restore.sources}
    for rank in restore.targets:
        if part_key(rank, seen.parts) not in served:
            raise Violation(f"I5: rank {rank} is to copy {part_key(rank, seen.parts)}, which no source holds")
    held = [(source, source.rank if source.of < 0 else source.of) for source in restore.sources]
    wrong = [source for source, rank in held if source.shard != part_key(rank, seen.parts)]
    if wrong:
        raise Violation(f"I4: rank {wrong[0].rank} is said to hold {wrong[0].shard}")


def _check_reachable(seen: "Checker", restore: Restore, worker: SimulatedWorker, *, may_follow: bool) -> None:
    """I5, I8: blank ranks copy, and those that may follow; others are there, or hold the gradient that is missing."""
    version = worker.state.version
    prepared = worker.last_report.prepared if isinstance(worker.last_report, Stopped) else -1
    is_lost = seen.is_lost(worker)
    if worker.page.torn and not is_lost:
        raise Violation(f"I13: rank {worker.rank} is paused inside a write")
    if (worker.rank in restore.targets) is not is_lost and (is_lost or not may_follow):
        raise Violation(f"I8: rank {worker.rank}, blank: {is_lost}, and the targets are {restore.targets}")
    if not is_lost and restore.target not in (version, prepared + 1 if prepared == version else version):
        raise Violation(f"I5: rank {worker.rank} is to reach {restore.target} from {version}, prepared {prepared}")


def _check_followed(seen: "Checker", restore: Restore, members: Sequence[SimulatedWorker]) -> None:
    """I23: no rank copies one that went on alone while another one holds the right bits, and all copy the same bits."""
    if not restore.targets or not seen.pattern.shares or seen.wrong.flipped:
        return
    sources = {source.rank for source in restore.sources}
    held = [w for w in members if w.state.version == restore.target and not seen.is_lost(w)]
    for part in range(seen.parts):
        here = [w for w in held if w.rank % seen.parts == part]
        served = [w for w in here if w.rank in sources]
        sure = [w for w in here if w.state.content not in seen.wrong.own and not w.machine.is_standby]
        if sure and any(w.state.content in seen.wrong.own for w in served):
            raise Violation(f"I23: ranks {[w.rank for w in sure]} hold the right bits, and others are copied")
        if len({w.state.content for w in served}) > 1:
            raise Violation(f"I23: ranks {[w.rank for w in served]} are copied, and hold different bits")


def _check_code(seen: "Checker", restore: Restore) -> None:
    """I24: no replacement runs code between two steps that its rank has run to the end."""
    ended = [w.name for w in seen.workers.values() if w.rank in restore.targets and w.page.step >= restore.target]
    if ended:
        raise Violation(f"I24: code before step {restore.target} is to be run again, though {ended} had run it")


def _check_all_are_paused(seen: "Checker", restore: Restore, members: Sequence[SimulatedWorker]) -> None:
    """Rule 5: the decision rests on reports of this generation, from processes that do not move."""
    if len(members) != seen.world_size:
        raise Violation(f"I9: a decision with {len(members)} of {seen.world_size} ranks")
    for worker in members:
        if worker.alive and worker.reported_in != restore.generation:
            raise Violation(
                f"I9: a decision in generation {restore.generation} while {worker.name} is in {worker.point} "
                f"and last stood still in {worker.reported_in}"
            )


def _check_alone(seen: "Checker", worker: SimulatedWorker) -> None:
    for other in seen.workers.values():
        if other is not worker and other.rank == worker.rank and other.alive and other.name not in seen.fenced:
            raise Violation(f"I10: rank {worker.rank} was given to {worker.name} while {other.name} lives")
