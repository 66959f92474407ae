"""Commands of the simulated controller, carried out as its server does: each becomes messages for processes."""

from typing import TYPE_CHECKING

from relight.core.protocol import commands as cmd
from relight.wire.messages import CopyPrivate, TakePrivate

if TYPE_CHECKING:
    from relight.sim.world.world import World


def carry_out(world: "World", command: cmd.Command) -> None:
    """Carry out one command. Audiences are looked up when it goes out."""
    world.checker.commanded(command, tuple(world.controller.rank_processes().values()))
    match command:
        case cmd.Spawn():
            world.spawned.add(command.process)
            world.host_of[command.process] = command.agent
            world.tell(command.process, command)
        case cmd.Kill():
            world.tell(command.process, command)
        case cmd.Assign():
            _open_store(world, command.generation)
            world.tell(command.process, command)
        case cmd.Begin() | cmd.Stop():
            _open_store(world, command.generation)
            _tell_members(world, command)
        case cmd.Restore():
            for rank in command.targets:
                _hand_over_private_state(world, rank, command.target)
            _tell_members(world, command)
        case cmd.Resume() | cmd.Save() | cmd.WindDown() | cmd.Release():
            _tell_members(world, command)
        case cmd.EndJob():
            world.end = command
            world.checker.final(command, world.controller.report())
        case cmd.OrderHost() | cmd.CancelHost():
            world.supply(command)
        case cmd.Notice() | cmd.ReleaseHost() | cmd.RefuseDrain():
            pass


def _hand_over_private_state(world: "World", rank: int, version: int) -> None:
    """Ask for private state beside each dead holder's page, whose host may be another one, or lost."""
    target = world.controller.rank_processes()[rank]
    for source in world.controller.predecessors.get(rank, ()):
        if source in world.fenced:
            continue
        if world.host_of[source] == world.host_of[target]:
            world.tell(target, CopyPrivate(source=source, target=target, version=version))
        else:
            world.tell(source, TakePrivate(source=source, target=target, version=version))


def _open_store(world: "World", generation: int) -> None:
    world.store_generation = max(world.store_generation, generation)


def _tell_members(
    world: "World", command: cmd.Begin | cmd.Stop | cmd.Restore | cmd.Resume | cmd.Save | cmd.WindDown | cmd.Release
) -> None:
    for name in world.controller.rank_processes().values():
        world.tell(name, command)
