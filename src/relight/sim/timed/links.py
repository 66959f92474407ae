"""Connections between the ranks of a timed job: when data passes, when it is delayed, and when it vanishes."""

from typing import TYPE_CHECKING

from relight.sim.model.network import Group
from relight.sim.timed.hosts import FOR_EVER
from relight.sim.world import copies, groups

if TYPE_CHECKING:
    from relight.sim.timed.job import SimulatedJob
    from relight.sim.world.world import Action


class Links:
    """Lets actions of process groups and copies happen, as far as the network between the processes allows."""

    def __init__(self, job: "SimulatedJob") -> None:
        self._job = job
        self._blackholes: set[int] = set()  # groups whose data vanishes
        self._held_up: dict[tuple[int, int], bool] = {}  # whether a rank's connections wait for a frozen peer

    def lose_data(self, generation: int) -> None:
        """Let the data that ranks of this group send to each other vanish; no connection ends."""
        self._blackholes.add(generation)
        self._job.watcher.watch()

    def lose(self, group: Group, rank: int) -> None:
        """Draw which ranks have lost data, now that `rank` has left."""
        group.lost |= 1 << rank
        for other in range(self._job.world_size):
            if other != rank and self._job.chance() < 0.5:
                group.lost |= 1 << other

    def settle(self, generation: int, number: int, rank: int, completes: bool) -> None:
        """End a collective on one rank, unless its data is on no way to it."""
        is_gone = self._job.group(generation).gone >> rank & 1
        if generation in self._blackholes and not is_gone:
            return
        action = ("settle", generation, number, rank, completes)
        if is_gone or not self._waits_for_group(generation, rank, action):
            groups.settle(self._job, generation, number, rank, completes)

    def _waits_for_group(self, generation: int, rank: int, action: "Action") -> bool:
        """Return whether data between this rank and others of its group does not pass; then the action comes later."""
        job = self._job
        if not job.several_hosts:
            return False
        members = [w for w in job.workers.values() if generation in (w.group_generation, w.meeting_generation)]
        mine = [w.name for w in members if w.rank == rank]
        others = [w.name for w in members if w.rank != rank]
        apart = max((job.hosts.apart_from_any(name, others) for name in mine), default=0.0)
        self._postpone(apart, action)
        return apart > 0.0

    def _postpone(self, until: float, action: "Action") -> None:
        if 0.0 < until < FOR_EVER:
            self._job.after(until - self._job.now + self._job.shortly(), action)

    def connect(self, generation: int, rank: int) -> None:
        """Finish forming the group on one rank, unless one of the others does not answer."""
        job, action = self._job, ("connect", generation, rank)
        meeting = job.meetings[generation]
        if self._waits_for_group(generation, rank, action):
            return
        if meeting.absent and job.chance() < 0.5:
            return  # the others wait for a connection that never comes
        frozen = [w for w in job.workers.values() if w.rank in meeting.present and w.alive and w.frozen]
        if frozen and (generation, rank) not in self._held_up:  # a frozen peer's kernel still answers some
            self._held_up[generation, rank] = job.chance() < 0.5
        if any(w.rank == rank for w in frozen) or (frozen and self._held_up[generation, rank]):
            job.after(2.0, action)
            return
        groups.connect(job, generation, rank)

    def arrive(self, process: str) -> None:
        """End a copy, unless one of its ends is frozen or cut off."""
        job = self._job
        target = job.workers[process]
        copying = target.copying
        if copying is not None and (target.frozen or job.workers[copying.source].frozen):
            if target.alive and not copying.over:
                job.after(0.5, ("arrive", process))
            return
        if copying is not None and (apart := job.hosts.apart_until(process, copying.source)):
            self._postpone(apart, ("arrive", process))
            return
        copies.arrive(job, process)
