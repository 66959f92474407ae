"""The barrier in front of the first write of a step: passing it proves that every rank is prepared."""

import time
from collections.abc import Callable

import torch

from relight.core.fault import Point
from relight.core.position import Phase
from relight.errors import StepInterrupted, UsageError
from relight.training.corruption import Ballot, differ, differing_tensors
from relight.training.group import Inner
from relight.training.progress import Progress
from relight.training.runtime import Runtime
from relight.training.snapshots import Snapshots
from relight.training.state import TrackedState


class Barrier:
    """Called in front of every write; only the first one of a step waits."""

    def __init__(
        self,
        runtime: Runtime,
        progress: Progress,
        prepare: Callable[[], None],
        passed: Callable[[], None],
        state: TrackedState,
        shard: Callable[[], str],
        snapshots: Snapshots,
    ) -> None:
        """`prepare` is called in front of the barrier, `passed` between it and the write.

        `shard` says which part of the state this rank holds.
        """
        self._runtime = runtime
        self._progress = progress
        self._prepare = prepare
        self._passed = passed
        self._state = state
        self._shard = shard
        self._ballot = Ballot(runtime.settings.verify_every, state.digest, shard)
        self._snapshots = snapshots

    def before_write(self) -> None:
        """Returns when the write may begin. Raises StepInterrupted if this step is to be repeated."""
        progress, runtime = self._progress, self._runtime
        if progress.wrote:
            return
        if not progress.warming:
            self._pass(runtime)
        progress.wrote = True

    def _pass(self, runtime: Runtime) -> None:
        page = runtime.page
        if runtime.device.type == "cuda":
            # A host that has only launched the collectives is not prepared (docs/PROTOCOL.md, C1 to C3).
            torch.cuda.synchronize(runtime.device)
        if runtime.closed:
            raise StepInterrupted("the generation was closed before this rank was prepared")
        self._prepare()
        page.put("prepared", self._progress.version)
        runtime.faults.strike(Point.BEFORE_BARRIER)
        page.stamp(Phase.BARRIER)
        if not self._complete_fence(runtime):
            self._await_decision(runtime)
        self._passed()
        page.put("torn", 1)
        page.stamp(Phase.OPTIMIZER)
        runtime.faults.strike(Point.OPTIMIZER)

    def _complete_fence(self, runtime: Runtime) -> bool:
        """One small all-reduce: it completes only once every rank has entered it, prepared. False if it broke."""
        version = self._progress.version
        vote = self._snapshots.vote()
        ballot = self._ballot.entries(version, runtime.rank, runtime.world_size, first=self._is_behind_first_step)
        inner = runtime.groups[0].inner
        if runtime.closed or inner is None:
            return False
        over = runtime.waits.begin()
        try:
            runtime.count_collective()
            wait = inner.fence([1, version, runtime.winding_down, *vote, *ballot])
            runtime.faults.strike(Point.BARRIER)
            ranks, versions, winding_down, *sums = wait()
        except (RuntimeError, StepInterrupted) as error:
            if not runtime.await_verdict(str(error)[:200]):
                raise
            return False
        finally:
            over()
        votes, digests = sums[: len(vote)], sums[len(vote) :]
        if (ranks, versions) != (runtime.world_size, runtime.world_size * version):
            raise UsageError(
                f"rank {runtime.rank} is at step {version}, but the step numbers of all ranks add up to {versions} "
                f"instead of {runtime.world_size * version}: some rank runs another number of steps or collectives"
            )
        if differ(digests, runtime.world_size):
            runtime.page.put("prepared", -1)  # these gradients come from a state that is wrong somewhere
            runtime.await_replacement(version, digests[: runtime.world_size], self._name_differing(inner))
            raise StepInterrupted("a rank's state was corrupted: this step is repeated without it")
        if digests:
            self._progress.agreed = version
        if winding_down:
            self._progress.last = version + 1
        if votes:
            self._snapshots.count(votes[0])
        return True

    @property
    def _is_behind_first_step(self) -> bool:
        """Whether what the job's first step made is to be compared: a script whose ranks differ does so at once.

        All ranks must say the same. Behind a recovery they know the version from which it went on, but only of 0 that
        it was the job's first.
        """
        progress, runtime = self._progress, self._runtime
        is_first = progress.began == 0 or runtime.generation == 1
        return runtime.world_size > 1 and is_first and progress.version == progress.began + 1

    def _name_differing(self, inner: Inner) -> tuple[str, ...]:
        """Which tensors, for the message."""
        runtime, state = self._runtime, self._state

        def add_up(row: list[int]) -> list[int]:
            return inner.fence(row)()

        over = runtime.waits.begin()
        try:
            own, shard = state.digests_by_tensor(), self._shard()
            return differing_tensors(own, shard, runtime.rank, runtime.world_size, add_up)
        except (RuntimeError, StepInterrupted):
            return ()
        finally:
            over()

    def _await_decision(self, runtime: Runtime) -> None:
        """The barrier broke. Others may have passed it, so whether the step is finished is not for this rank to say."""
        progress = self._progress
        progress.restore = runtime.report_standing(progress.standing(prepared=True))
        if progress.restore.target != progress.version + 1:
            raise StepInterrupted("it was decided to repeat this step")
        progress.finish_started_ns = time.monotonic_ns()
        runtime.faults.strike(Point.FINISH)
