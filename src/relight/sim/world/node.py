"""The node of a simulated job: it starts, kills and reaps processes, and passes messages on.

Modelled, not production: the shells between core and workers (server.py, agent.py) in the form of two ordered queues
for each process, and of the few things that they do with an order.
"""

from typing import TYPE_CHECKING

import msgspec

from relight.core.protocol import events as ev
from relight.core.protocol.commands import Kill, Spawn, WorkerCommand

if TYPE_CHECKING:
    from relight.sim.world.world import World

NODE = "node-0"


class CopyPrivate(msgspec.Struct, frozen=True):
    """To a node: put the private state of that version, from beside this dead process's page, beside the new one's."""

    source: str
    version: int


class TakePrivate(msgspec.Struct, frozen=True):
    """To the node of a dead process: send its private state of that version to another node, for `target`."""

    target: str
    version: int


class PrivateState(msgspec.Struct, frozen=True):
    """Private state of another node, by way of the controller."""

    version: int
    payload: int


NodeOrder = Spawn | Kill | CopyPrivate | TakePrivate | PrivateState  # what a node does itself


def pass_up(world: "World", process: str) -> None:
    """Bring the next message of a process to the controller."""
    queue = world.up[process]
    if queue:
        world.feed(queue.popleft())


def pass_down(world: "World", process: str) -> None:
    """Bring the next order for a process to its node."""
    queue = world.down[process]
    if queue:
        deliver(world, process, queue.popleft())


def deliver(world: "World", process: str, message: NodeOrder | WorkerCommand) -> None:
    """Carry out an order for the node, or pass on one for the worker."""
    if isinstance(message, Spawn):
        if process not in world.workers:
            worker = world.workers[process] = world.worker_kind(world, process, message.rank)
            world.send(worker, ev.ProcessStarted(process=process, pid=1))
            worker.begin()
        return
    if process not in world.workers:
        return
    worker = world.own(process)
    match message:
        case Kill():
            worker.die(-9)
        case CopyPrivate():
            source = world.workers.get(message.source)
            payload = source.page.read_private(message.version) if source is not None else None
            if payload is not None:
                worker.page.inherit(message.version, payload)
        case TakePrivate():
            payload = worker.page.read_private(message.version)
            if payload is not None:
                world.tell(message.target, PrivateState(message.version, payload))
        case PrivateState():
            worker.page.inherit(message.version, message.payload)
            worker.poke()
        case _:
            worker.receive(message)


def report_exit(world: "World", process: str, status: int) -> None:
    """Report that a process has ended."""
    worker = world.workers[process]
    evidence = "was killed by SIGKILL" if status < 0 else f"exited with status {status}"
    position = worker.page.position(counters=world.detailed_pages)
    world.send(
        worker,
        ev.ProcessExited(process=process, exit_status=status, evidence=evidence, position=position, noticed_ns=1),
    )
