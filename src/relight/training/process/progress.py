"""Where this rank stands: the version of its state, how it came about, and what it was decided to do next."""

from dataclasses import dataclass

import xxhash

from relight.core.commands import Restore, Save
from relight.training.process.runtime import RankStatus


@dataclass
class Progress:
    """Owned by the main thread."""

    lineage: str  # hash chain over all committed steps: a step number alone is not a version (PROTOCOL.md, rule 13)
    version: int = 0  # optimizer steps applied
    commits: int = 0  # optimizer steps applied by this process
    until: int = 0
    cap: int = 0  # the version with which the job ends in any case; 0: there is none
    last: int | None = None  # the version with which the job ends for now, if all ranks agreed on that at a barrier
    started: int = -1  # newest step that was started
    attempt: int = 0  # how often the step after `version` was started before
    begun_before: int = 0  # steps below this one were started before, if a recovery went back over them
    history: int = 0  # the generation that last undid versions, going back to a fallback tier
    began: int = -1  # the version with which this generation began to train
    agreed: int = -1  # the newest version of which it is known that all replicas held the same bits
    passed: bool = False  # the barrier of the step under way was passed
    wrote: bool = False  # the step under way, or the one that was interrupted, had begun to write
    stepped: bool = False  # some step of this process had an optimizer step
    warming: bool = False  # a standby's rehearsal
    restore: Restore | Save | None = None  # a decision that is not carried out yet
    finish_started_ns: int = 0  # when this rank began to finish a step by itself
    resumed_ns: int = 0
    forward_ns: int = 0
    first_after_recovery: bool = False

    @property
    def goal(self) -> int:
        """How many steps are to be committed before this process leaves the loop."""
        goal = self.until if self.last is None else min(self.until, self.last)
        return min(goal, self.cap) if self.cap else goal

    def advance(self, world_size: int) -> None:
        """One more step is committed."""
        self.lineage = xxhash.xxh3_64_hexdigest(f"{self.lineage}/{self.version}/{world_size}".encode())
        self.version += 1

    def status(self, *, prepared: bool = False, blank: bool = False) -> RankStatus:
        """What to report after Stop."""
        return RankStatus(
            step=self.started,
            version=self.version,
            lineage=self.lineage,
            prepared=self.version if prepared else -1,
            blank=blank,
            agreed=self.agreed,
            wrote=self.wrote,
        )
