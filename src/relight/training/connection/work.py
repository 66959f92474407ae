"""The time that a rank works by itself in a phase, without its waits for other ranks.

All ranks of a step take the same time, that of the slowest. In backward, DDP launches each reduction as soon as its
gradients are there and waits for all of them at the end, so a rank's own work ends with the last launch. Where a script
or a wrapper (FSDP2, tensor parallelism) waits in between, the process group says for how long.
"""


class WorkClock:
    """Times one phase after the other. Times are monotonic nanoseconds."""

    __slots__ = ("_launched_ns", "_since_ns", "_waited_before_launch_ns", "_waited_ns")

    def __init__(self) -> None:
        self._since_ns = 0
        self._waited_ns = 0
        self._launched_ns = 0
        self._waited_before_launch_ns = 0

    def launched(self, now_ns: int) -> None:
        """A collective was launched."""
        self._launched_ns = now_ns
        self._waited_before_launch_ns = self._waited_ns

    def waited(self, nanoseconds: int) -> None:
        """A wait for a collective took so long."""
        self._waited_ns += nanoseconds

    def turn(self, now_ns: int, *, until_launch: bool) -> int:
        """A phase ends, and another begins: the rank's own work in the one that ends.

        With `until_launch` only up to the last launch, if there was one.
        """
        if until_launch and self._launched_ns:
            done_ns = self._launched_ns - self._since_ns - self._waited_before_launch_ns
        else:
            done_ns = now_ns - self._since_ns - self._waited_ns
        self._since_ns = now_ns
        self._waited_ns = self._launched_ns = self._waited_before_launch_ns = 0
        return done_ns if done_ns > 0 else 0
