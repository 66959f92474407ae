"""The fallback tiers of a simulated job: snapshots in the memory of other ranks, and checkpoints on its disk."""

from typing import TYPE_CHECKING

from relight.core.protocol.commands import Save
from relight.sim.model.contents import derived_private
from relight.sim.model.fallback_tiers import Saved
from relight.sim.model.worker.worker import SimulatedWorker
from relight.sim.world import groups

if TYPE_CHECKING:
    from relight.sim.world.world import World


def continue_in_background(world: "World", process: str, what: str, version: int, generation: int) -> None:
    """Let a copy, a fetch or a write beside the main thread continue; of a frozen process, once it thaws."""
    worker = world.workers[process]
    if not worker.alive or worker.lower is None:
        return
    if worker.frozen:
        worker.stalled += (("background", process, what, version, generation),)
    else:
        worker.lower.go_on(what, version, generation)


def find_snapshot(world: "World", worker: SimulatedWorker, rank: int, version: int) -> Saved | None:
    """Look for a snapshot in the memory of the process that holds that rank."""
    holder = world.workers.get(world.controller.rank_processes().get(rank, ""))
    if holder is None or not holder.alive or holder.frozen or not world.reaches(worker.name, holder.name):
        return None
    return holder.lower.kept_of(rank, version) if holder.lower is not None else None


def save(world: "World", worker: SimulatedWorker, order: Save) -> None:
    """Write a rank's piece of the last checkpoint, and, on the rank that completes it, those of lost ranks."""
    if worker.holds_nothing or worker.lower is None:
        return
    pieces = {worker.rank: worker.private}
    if worker.rank == order.rank:
        for rank in order.absent:
            names = world.controller.predecessors.get(rank, ())
            left = [world.workers[name].page.read_private(order.target) for name in names if name in world.workers]
            known = [private for private in left if private is not None]
            if rank in order.derived:
                pieces[rank] = derived_private(rank, order.target, world.pattern, known=world.derivable)
            elif known:  # else it waits for it in vain
                pieces[rank] = known[-1]
                world.checker.wrong.takes_private(rank, order.target, known[-1])
    for rank, private in pieces.items():
        saved = Saved(rank, worker.state, private, worker.machine.history)
        world.checker.saves(saved, order)
        world.disk.write(saved, ("last", order.generation))
    if world.is_saved(order):
        groups.poke_rank(world, order.rank)
