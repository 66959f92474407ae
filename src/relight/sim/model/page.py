"""A simulated position page, with the two slots of rank-private state beside it."""

from collections.abc import Hashable

from relight.core.protocol.position import Phase, Position


class Page:
    """The position page and the two slots of private state. `words` and `slots` are separate, as in the real one."""

    __slots__ = (
        "asked_to_leave",
        "collectives",
        "commits",
        "generation",
        "phase",
        "prepared",
        "progress",
        "rank",
        "slots",
        "stamp_ns",
        "step",
        "torn",
        "version",
        "words",
    )

    def __init__(self) -> None:
        self.generation = 0
        self.rank = -1
        self.step = 0
        self.phase = Phase.STARTING
        self.version = 0
        self.prepared = -1
        self.torn = False
        self.collectives = 0
        self.progress = 0
        self.stamp_ns = 0
        self.commits = 0
        self.asked_to_leave = False
        self.words = [-1, -1]
        self.slots: list[tuple[int, int] | None] = [None, None]

    def copy(self) -> "Page":
        """Return a copy that can take another course."""
        twin = Page.__new__(Page)
        twin.generation, twin.rank, twin.step, twin.phase = self.generation, self.rank, self.step, self.phase
        twin.version, twin.prepared, twin.torn = self.version, self.prepared, self.torn
        twin.collectives, twin.progress, twin.stamp_ns = self.collectives, self.progress, self.stamp_ns
        twin.commits, twin.words, twin.slots = self.commits, self.words.copy(), self.slots.copy()
        twin.asked_to_leave = self.asked_to_leave
        return twin

    def key(self) -> Hashable:
        """A key of all that decisions may depend on; not the counters that only the detector reads."""
        torn, words, slots = self.torn, tuple(self.words), tuple(self.slots)
        return self.generation, self.rank, self.step, self.phase, self.version, self.prepared, torn, words, slots

    def position(self, *, counters: bool) -> Position:
        """As an agent reads it."""
        return Position(
            generation=self.generation,
            rank=self.rank,
            step=self.step,
            phase=self.phase,
            version=self.version,
            prepared=self.prepared,
            torn=self.torn,
            collectives=self.collectives if counters else 0,
            progress=self.progress if counters else 0,
            stamp_ns=self.stamp_ns if counters else 0,
            private_versions=(self.words[0], self.words[1]),
            commits=self.commits if counters else 0,
        )

    def read_private(self, version: int) -> int | None:
        """The private state with which that version starts, if it is here."""
        slot = self.slots[version % 2]
        return slot[1] if slot is not None and slot[0] == version else None

    def inherit(self, version: int, private: int) -> None:
        """agent/processes/readings/page.py: what a predecessor left, unless the process has some of its own by now."""
        if max(self.words) < 0:
            self.slots[version % 2] = (version, private)

    def forget_private(self, version: int) -> None:
        """The slot is about to be overwritten."""
        self.words[version % 2] = -1
        self.slots[version % 2] = None

    def withdraw_private(self, version: int) -> None:
        """Take back the state of an attempt that is undone, or that is not prepared after all."""
        if self.words[version % 2] == version:
            self.forget_private(version)

    def keep_private(self, version: int, private: int) -> None:
        """The payload first, then the word that says that it is there."""
        self.slots[version % 2] = (version, private)
        self.words[version % 2] = version
