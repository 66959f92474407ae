"""Process groups of a simulated job: how members form them, and how each collective ends on each rank."""

from typing import TYPE_CHECKING

from relight.sim.model.network import Group, Rendezvous

if TYPE_CHECKING:
    from relight.sim.world.world import World


def find_group(world: "World", generation: int) -> Group:
    """Return the group of a generation. The first one is formed from the start, without a rendezvous."""
    meeting = world.meetings.get(generation)
    if meeting is not None:
        return meeting.group
    if generation not in world.groups:
        world.groups[generation] = Group(generation, world.world_size)
    return world.groups[generation]


def find_rendezvous(world: "World", generation: int) -> Rendezvous | None:
    """Return the rendezvous of a generation. None: the store has a newer generation, and answers with an error."""
    if generation in world.meetings:
        return world.meetings[generation]
    if generation != world.store_generation:
        return None
    meeting = world.meetings[generation] = Rendezvous(generation, world.world_size)
    return meeting


def enter(world: "World", group: Group, number: int) -> None:
    """Plan outcomes once every rank has entered a collective, or one of them is gone."""
    operation = group.operations[number]
    if len(operation.entered) == world.world_size or group.can_break():
        _plan_outcomes(world, group)


def leave(world: "World", group: Group, rank: int) -> None:
    """Break the connections of a rank."""
    if group.leave(rank):
        world.lose(group, rank)
        _plan_outcomes(world, group)


def _plan_outcomes(world: "World", group: Group) -> None:
    for rank, number, operation in group.waiting():
        if group.can_complete(rank, operation):
            world.plan(("settle", group.generation, number, rank, True))
        elif group.can_break():
            world.plan(("settle", group.generation, number, rank, False))


def settle(world: "World", generation: int, number: int, rank: int, completes: bool) -> None:
    """End a collective on one rank."""
    group = find_group(world, generation)
    operation = group.operations.get(number)
    if operation is not None and rank not in operation.outcome:
        operation.outcome[rank] = completes and group.can_complete(rank, operation)
        poke_rank(world, rank)


def join(world: "World", meeting: Rendezvous) -> None:
    """Plan connections once every rank has come."""
    if meeting.complete:
        for rank in sorted(meeting.present):
            world.plan(("connect", meeting.group.generation, rank))


def connect(world: "World", generation: int, rank: int) -> None:
    """Finish forming the group on one rank."""
    meeting = world.meetings[generation]
    if rank not in meeting.absent:
        meeting.connected.add(rank)
        poke_rank(world, rank)


def poke_rank(world: "World", rank: int) -> None:
    """Let the main thread of a rank see a change."""
    for name, worker in list(world.workers.items()):
        if worker.rank == rank and worker.alive:
            world.own(name).poke()
