"""Small all-reduces of all ranks: rows of integers, added up."""

from relight.core.protocol.fault import Point
from relight.errors import StepInterrupted, UsageError
from relight.training.process.runtime import Runtime

_AT_BARRIER = Point.BARRIER  # looked up once: each look-up in an enumeration takes 0.1 us


class Sums:
    """Adds up rows of all ranks of a generation."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def add_up(self, row: list[int], *, strike: bool = False) -> list[int] | None:
        """Everybody's rows, summed up; None if a failure elsewhere broke it. `strike` once this rank's is said."""
        runtime = self._runtime
        formed = runtime.groups.all[0].formed
        if runtime.closed or formed is None:
            return None
        over = runtime.groups.waits.begin()
        try:
            runtime.protection.count_collective()
            wait = formed.sum_over_ranks(row)
            if strike:
                runtime.faults.strike(_AT_BARRIER)
            return wait()
        except (RuntimeError, StepInterrupted) as error:
            if not runtime.protection.await_verdict(str(error)[:200]):
                raise
            return None
        finally:
            over()

    def of(self, row: list[int]) -> list[int]:
        """Everybody's rows, summed up. Raises StepInterrupted if a failure elsewhere broke it."""
        if (sums := self.add_up(row)) is None:
            raise StepInterrupted("the generation was closed before this rank was prepared")
        return sums

    def refuse_other_steps(self, ranks: int, versions: int) -> None:
        """Raises UsageError unless all ranks are at this one's step."""
        runtime = self._runtime
        version = runtime.worker.version
        if (ranks, versions) != (runtime.world_size, runtime.world_size * version):
            raise UsageError(
                f"rank {runtime.rank} is at step {version}, but the step numbers of all ranks add up to {versions} "
                f"instead of {runtime.world_size * version}: some rank runs another number of steps or collectives"
            )
