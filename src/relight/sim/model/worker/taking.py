"""A simulated worker takes the target version: from another rank, from a snapshot, or from a checkpoint."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from relight.core.protocol.commands import FallbackTier, Restore
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.sim.model.contents import derived_private, part_key
from relight.sim.model.fallback_tiers import FallbackTiers, Saved
from relight.sim.model.network import Copying
from relight.sim.model.worker.writes import drop_pre_images

if TYPE_CHECKING:
    from relight.sim.model.worker.worker import SimulatedWorker as Worker


def _copy(worker: "Worker", action: act.Action) -> happened.Event | None:  # noqa: ARG001
    restore = order_of(worker)
    if restore.tier is FallbackTier.CHECKPOINT:
        worker.world.checker.reads(worker, _lower(worker).disk.complete[restore.target])
    worker.world.checker.overwrites(worker)
    worker.page.torn = True
    return _ask(worker, restore)


def _take_results(worker: "Worker", action: act.Action) -> happened.Event | None:  # noqa: ARG001
    return _ask(worker, order_of(worker))


def _ask(worker: "Worker", restore: Restore) -> happened.Event | None:
    if worker.machine.is_superseded or not restore.sources:
        return happened.RestoreFailed("cancelled")
    source = worker.world.choose_source(worker, restore)
    if not source and worker.world.parts > 1:
        return happened.RestoreFailed("no source serves its part")
    worker.copying = Copying(source, restore.generation, restore.target)
    worker.world.asked(worker)
    worker.go_to("COPY")
    return None


def _on_copied(worker: "Worker") -> None:
    assert worker.copying is not None
    if worker.copying.failed or worker.copying.state is None:
        fail(worker, worker.copying.failed)
    elif worker.rank in order_of(worker).given:
        worker.feed(happened.ResultsTaken())
    else:
        worker.go_to("TAKE_OVER")


def take_over(worker: "Worker") -> None:
    """All of it is copied: take it for the state of this rank, with the private state from beside the page."""
    restore, copying = order_of(worker), worker.copying
    assert copying is not None
    assert copying.state is not None
    target, lower = restore.target, worker.lower
    if copying.saved is not None:
        worker.feed(_take_back(worker, copying.saved))
        return
    if lower is not None and restore.tier is FallbackTier.CHECKPOINT:
        worker.feed(_take_back(worker, lower.disk.complete[target][worker.rank]._replace(state=copying.state)))
        return
    if worker.rank in restore.derived:
        worker.page.keep_private(target, _derived(worker, target))
    private = worker.page.read_private(target)
    if private is None and worker.world.several_hosts and worker.point != "PRIVATE":
        worker.go_to("PRIVATE")
    elif private is None:
        lack_private(worker)
    else:
        worker.world.checker.wrong.takes_private(worker.rank, target, private)
        worker.state, worker.private, worker.copying = copying.state, private, None
        worker.shared = copying.results if restore.runs_code else 0
        worker.feed(_taken(worker))


def _take_back(worker: "Worker", saved: Saved) -> happened.StateTaken:
    """Take a snapshot or a piece of a checkpoint for the state of this rank."""
    restore = order_of(worker)
    if restore.tier is FallbackTier.BUDDY:
        worker.world.checker.keeps(worker, [saved])
    private = _derived(worker, restore.target) if worker.rank in restore.derived else saved.private
    worker.state, worker.private, worker.copying = saved.state, private, None
    worker.page.slots[restore.target % 2] = (restore.target, private)
    return _taken(worker)


def _taken(worker: "Worker") -> happened.StateTaken:
    worker.next_private = worker.private  # between two steps they are the same
    return happened.StateTaken(worker.state.version, worker.state.lineage, worker.world.until)


def _derived(worker: "Worker", version: int) -> int:
    return derived_private(worker.rank, version, worker.world.pattern, known=worker.world.derivable)


def _claim_version(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    target = order_of(worker).target
    worker.page.words[target % 2] = target
    worker.page.torn = False
    drop_pre_images(worker)
    worker.page.version = worker.state.version


# --- below replicas -----------------------------------------------------------------------------------------------
def _discard_undone(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    _lower(worker).discard_after(order_of(worker).target)
    worker.page.torn = True
    worker.staged = -1
    worker.page.words = [-1, -1]


def _read_checkpoint(worker: "Worker", action: act.Action) -> happened.StateTaken:  # noqa: ARG001
    pieces = _lower(worker).disk.complete[order_of(worker).target]
    worker.world.checker.reads(worker, pieces)
    return _take_back(worker, pieces[worker.rank])


def _recall_snapshot(worker: "Worker", action: act.Action) -> happened.Event:  # noqa: ARG001
    saved = _lower(worker).kept_of(worker.rank, order_of(worker).target)
    return happened.SnapshotMissing() if saved is None else _take_back(worker, saved)


def _fetch_snapshot(worker: "Worker", action: act.Action) -> happened.Event | None:  # noqa: ARG001
    restore = order_of(worker)
    own = [source for source in restore.sources if source.of == worker.rank]
    part = part_key(worker.rank, worker.world.parts)
    found = own or [source for source in restore.sources if source.shard == part]
    if not found or worker.machine.is_superseded:
        return happened.RestoreFailed("no source has a snapshot of its part")
    worker.copying = Copying(found[0].address, restore.generation, restore.target, found[0].of)
    worker.world.asked(worker)
    worker.go_to("COPY")
    return None


# --- failures, and what is waited for ---
def fail(worker: "Worker", evidence: str) -> None:
    """The restore failed."""
    worker.copying = None
    worker.feed(happened.RestoreFailed(evidence))


def lack_private(worker: "Worker") -> None:
    """The rank-private state of the target is nowhere."""
    version = order_of(worker).target
    fail(worker, f"the rank-private state of version {version} is not beside this rank's page")


def _has_copied(worker: "Worker") -> bool:
    return worker.copying is not None and worker.copying.over


def _has_private(worker: "Worker") -> bool:
    return worker.page.read_private(order_of(worker).target) is not None or worker.machine.is_superseded


def order_of(worker: "Worker") -> Restore:
    """The Restore that is being carried out."""
    order = worker.machine.order
    assert isinstance(order, Restore)
    return order


def _lower(worker: "Worker") -> FallbackTiers:
    assert worker.lower is not None
    return worker.lower


READY: dict[str, Callable[["Worker"], bool]] = {
    "COPY": _has_copied,
    "PRIVATE": _has_private,
}
POINTS: dict[str, Callable[["Worker"], None]] = {
    "COPY": _on_copied,
    "TAKE_OVER": take_over,
    "PRIVATE": take_over,
}
CARRY_OUTS: dict[type[act.Action], Callable[..., happened.Event | None]] = {
    act.Copy: _copy,
    act.TakeResults: _take_results,
    act.ClaimVersion: _claim_version,
    act.DiscardUndone: _discard_undone,
    act.ReadCheckpoint: _read_checkpoint,
    act.RecallSnapshot: _recall_snapshot,
    act.FetchSnapshot: _fetch_snapshot,
}
