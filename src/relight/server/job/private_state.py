"""Moves rank-private state of dead processes to a replacement, or to the writer of a checkpoint."""

from relight.core.protocol.commands import FallbackTier, Restore, Save
from relight.server.job.job import Job
from relight.wire.messages import PrivateState, StoreSet, private_key


class PrivateStates:
    """Asks the agents of dead processes for what those left in their pages, and passes it on."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def hand_over(self, restore: Restore) -> None:
        """Have the private state of each lost rank copied to its new process, before that restores."""
        if restore.tier is not FallbackTier.REPLICA:
            return  # it comes with the other state, of an older version than any page has
        holders = self._job.core.rank_processes()
        for rank in restore.targets:
            self._job.agents.copy_private(self._job.core.predecessors.get(rank, ()), holders[rank], restore.target)

    def collect(self, save: Save) -> None:
        """Have the private state of each absent rank sent here, for the last checkpoint."""
        for rank in sorted(set(save.absent) - set(save.derived)):
            holders = self._job.core.predecessors.get(rank, ())
            self._job.agents.take_private(holders, self._job.core.rank_processes()[save.rank], save.target)

    def pass_on(self, state: PrivateState) -> None:
        """Deliver what an agent sent: to the writer of the last checkpoint through the store, or to another host."""
        save = self._job.core.saving_order
        if save is None:
            self._job.agents.pass_on(state)
            return
        rank = next((rank for rank, names in self._job.core.predecessors.items() if state.source in names), None)
        if rank is not None and state.version == save.target:
            self._job.store.set(
                state.source, StoreSet(generation=save.generation, key=private_key(rank), value=state.payload)
            )
