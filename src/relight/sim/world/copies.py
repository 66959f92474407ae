"""Copies of state from one simulated worker to another: requested, sent, arrived."""

from typing import TYPE_CHECKING

from relight.core.protocol.commands import Restore
from relight.sim.model.contents import Violation, part_key
from relight.sim.model.network import Copying
from relight.sim.model.worker.worker import SimulatedWorker

if TYPE_CHECKING:
    from relight.sim.world.world import World


def spread_source(world: "World", target: SimulatedWorker, restore: Restore) -> str:
    """Spread targets over sources of their part, as `choose_sources` of transfer/restore/fabric.py."""
    held = [source for source in restore.sources if source.shard == part_key(target.rank, world.parts)]
    return held[target.rank % len(held)].address if held else ""


def request(world: "World", target: SimulatedWorker) -> None:
    """Ask the source, which may not be able to answer yet."""
    copying = target.copying
    assert copying is not None
    if not world.reaches(target.name, copying.source):  # nothing of the source arrives
        return
    source = world.workers.get(copying.source)
    if source is None or not source.alive:
        copying.failed = "the source ended"
    elif source.machine.newest > copying.generation:
        copying.failed = "generation is closed"
    elif not copying.sending and not source.frozen:
        is_offered = source.offer is not None and source.offer[0] == copying.generation
        if copying.of < 0 and is_offered and source.offer is not None and source.offer[1].version != copying.version:
            raise Violation(f"I4: {source.name} serves {source.offer[1].version}, not {copying.version}")
        if copying.of >= 0 or is_offered:  # snapshots are served at any time
            copying.sending = True
            world.plan(("arrive", target.name))
    target.poke()


def request_again(world: "World", source: SimulatedWorker) -> None:
    """Ask again for every copy from a source that serves other things now."""
    for name, target in list(world.workers.items()):
        copying = target.copying
        if copying is not None and copying.source == source.name and not copying.over:
            world.asked(world.own(name))


def arrive(world: "World", process: str) -> None:
    """End a copy that was sent."""
    target = world.own(process)
    copying = target.copying
    if copying is None or not copying.sending or copying.over:
        return
    source = world.workers[copying.source]
    if source.frozen or target.frozen:
        world.plan(("arrive", process))
    elif copying.of >= 0:
        _hand_over_snapshot(source, copying)
        target.poke()
    elif source.offer is not None:
        _, copying.state, copying.results = source.offer
        target.poke()


def _hand_over_snapshot(source: SimulatedWorker, copying: Copying) -> None:
    assert source.lower is not None
    copying.saved = source.lower.kept_of(copying.of, copying.version)
    if copying.saved is None:
        copying.failed = "the snapshot is gone"
    else:
        copying.state = copying.saved.state
