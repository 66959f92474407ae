"""A worker's decisions, with what its driver remembers of the step under way and of a recovery."""

import xxhash

from relight.core.worker.worker import Worker


class Progress(Worker):
    """Owned by the main thread, but for orders, which the link thread hands in."""

    def __init__(self, rank: int, *, is_standby: bool, cap: int) -> None:
        super().__init__(rank, is_standby=is_standby, cap=cap)
        self.stepped = False  # some step of this process had an optimizer step
        self.warming = False  # a standby's rehearsal
        self.finish_started_ns = 0  # when this rank began to finish a step by itself
        self.resumed_ns = 0
        self.forward_ns = 0

    def next_lineage(self, world_size: int) -> str:
        """The lineage once one more step is committed."""
        return xxhash.xxh3_64_hexdigest(f"{self.lineage}/{self.version}/{world_size}".encode())
