"""How long a rank works by itself in a phase: what it waits for others is not its own doing.

All ranks of a step take the same time, that of the slowest. In backward, DDP launches each reduction as soon as its
gradients are there and waits for all of them at the end, so a rank's own work ends with the last launch. Where a script
or a wrapper (FSDP2, tensor parallelism) waits in between, the process group says for how long.
"""


class WorkClock:
    """Of one phase at a time. Times are monotonic nanoseconds."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, now_ns: int) -> None:
        """A phase begins."""
        self._since_ns = now_ns
        self._waited_ns = 0
        self._launched_ns = 0
        self._waited_before_launch_ns = 0

    def launched(self, now_ns: int) -> None:
        """A collective was launched."""
        self._launched_ns = now_ns
        self._waited_before_launch_ns = self._waited_ns

    def waited(self, nanoseconds: int) -> None:
        """For a collective."""
        self._waited_ns += nanoseconds

    def done_ns(self, now_ns: int, *, until_launch: bool) -> int:
        """Its own work in the phase that ends; only up to the last launch, if there was one, in such a phase."""
        if until_launch and self._launched_ns:
            return max(0, self._launched_ns - self._since_ns - self._waited_before_launch_ns)
        return max(0, now_ns - self._since_ns - self._waited_ns)
