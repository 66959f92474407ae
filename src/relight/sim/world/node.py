"""Messages between the controller and the hosts of a simulated job: two ordered queues for each process.

Modelled, not production: the connections between the controller's server and the agents.
"""

from typing import TYPE_CHECKING

from relight.agent.decisions.host import Exited
from relight.core.protocol import events as ev

if TYPE_CHECKING:
    from relight.sim.world.world import World

NODE = "node-0"


def pass_up(world: "World", process: str) -> None:
    """Bring the next message of a process to the controller."""
    queue = world.up[process]
    if queue:
        world.feed(queue.popleft())


def pass_down(world: "World", process: str) -> None:
    """Bring the next order for a process to its agent."""
    queue = world.down[process]
    if queue:
        world.agent_of(process).obey(world, process, queue.popleft())


def report_exit(world: "World", process: str, status: int) -> None:
    """Let an agent see that a process has ended."""
    evidence = "was killed by SIGKILL" if status < 0 else f"exited with status {status}"
    position = world.workers[process].page.position(counters=world.detailed_pages)
    report = ev.ProcessExited(process=process, exit_status=status, evidence=evidence, position=position, noticed_ns=1)
    world.agent_of(process).feed(world, Exited(report))
