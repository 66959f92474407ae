"""A host that is cut off from all others, and may still reach the storage: the controller there must not act.

While another host is heard, nothing is asked. Else Slurm is, before each renewal of the Lease: if it does not answer,
or has taken this host out of the job, this is the side that is lost, and the other hosts go on.
"""

import os
from collections.abc import Callable

from relight.cluster.allocation import doubt
from relight.server.network.agents import Agents


class Isolation:
    """Judges whether this host is the one that is lost."""

    def __init__(self, give_way: Callable[[str], None], *, begins: bool) -> None:
        """`give_way` ends this controller, and says why. `begins`: it is the job's first one, and waits for hosts."""
        self.agents: Agents | None = None  # once there is a server
        self._give_way = give_way
        self._awaits_first = begins
        self._has_heard = False

    def doubt(self) -> str:
        """Return why this host may not hold the Lease; empty if it may. Called in another thread."""
        if sum(agent.connected for agent in tuple(self.agents or ())) > 1:
            self._has_heard, self._awaits_first = True, False
            return ""
        if self._awaits_first:
            return ""
        reason = doubt(os.environ)
        if reason and self._has_heard:
            self._give_way(f"no other host is heard, and {reason}")
        return reason
