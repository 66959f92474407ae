"""Process groups that break as real ones do: a collective completes on some members and is lost on others. And copies.

Measured on gloo (docs/decisions/0001): after a kill, survivors end on different sides of a collective in 5 to 13 % of
the cases. Here every combination is possible; the driver of the simulation chooses, by chance or one after another.
"""

from collections.abc import Hashable

from relight.sim.model.contents import State, Violation
from relight.sim.model.fallback_tiers import Saved


class Operation:
    """One collective. `outcome` says for each rank whether it completed; a rank that is not in it still waits."""

    __slots__ = ("entered", "lacking", "outcome", "what")

    def __init__(self, what: Hashable) -> None:
        self.what = what
        self.entered: dict[int, int] = {}
        self.outcome: dict[int, bool] = {}
        self.lacking = False  # some rank's part was never sent: its connections were cut before

    def copy(self) -> "Operation":
        """Return a copy that can take another course."""
        twin = Operation(self.what)
        twin.entered, twin.outcome, twin.lacking = self.entered.copy(), self.outcome.copy(), self.lacking
        return twin

    def key(self) -> Hashable:
        """A key of all that the future of this operation depends on."""
        return self.what, self.lacking, tuple(sorted(self.entered.items())), tuple(sorted(self.outcome.items()))


class Group:
    """The formed process group of one generation. Every rank enters the same operations in the same order."""

    __slots__ = ("count", "generation", "gone", "lost", "operations", "size")

    def __init__(self, generation: int, size: int) -> None:
        self.generation = generation
        self.size = size
        self.operations: dict[int, Operation] = {}  # by number; only those that some rank may still wait in
        self.count = [0] * size  # operations that each rank has entered
        self.gone = 0  # ranks that are dead or cut off: nothing of them arrives any more; one bit each
        self.lost = 0  # ranks that lost data on its way to them: they complete nothing any more

    def copy(self) -> "Group":
        """Return a copy that can take another course."""
        twin = Group(self.generation, self.size)
        twin.operations = {number: operation.copy() for number, operation in self.operations.items()}
        twin.count = self.count.copy()
        twin.gone, twin.lost = self.gone, self.lost
        return twin

    def key(self) -> Hashable:
        """A key of all that the future of this group depends on."""
        operations = tuple([(number, o.key()) for number, o in self.operations.items() if len(o.outcome) < self.size])
        return self.generation, self.gone, self.lost, tuple(self.count), operations

    def enter(self, rank: int, what: Hashable, contribution: int) -> int:
        """Rank `rank` brings its part; returns the operation's number. Raises Violation if it brings another kind."""
        number = self.count[rank]
        self.count[rank] += 1
        operation = self.operations.get(number)
        if operation is None:
            operation = self.operations[number] = Operation(what)
            self.operations.pop(number - 3, None)
        if what != operation.what:
            raise Violation(f"I4: rank {rank} brings {what} to a collective of {operation.what}")
        operation.entered[rank] = contribution
        operation.lacking |= bool(self.gone >> rank & 1)
        return number

    def waiting(self) -> list[tuple[int, int, Operation]]:
        """(rank, number, operation) of everyone who waits for the outcome of something."""
        return [
            (rank, number, operation)
            for number, operation in self.operations.items()
            for rank in operation.entered
            if rank not in operation.outcome
        ]

    def can_complete(self, rank: int, operation: Operation) -> bool:
        """Everyone's data was sent, and this rank lost none of it."""
        return len(operation.entered) == self.size and not operation.lacking and not self.lost >> rank & 1

    def can_break(self) -> bool:
        """Some rank's connections ended."""
        return self.gone != 0

    def leave(self, rank: int) -> bool:
        """A process died or its connections were cut. False if that was so before."""
        if self.gone >> rank & 1:
            return False
        self.gone |= 1 << rank
        return True


class Rendezvous:
    """The store keys of one generation: a group is formed once every rank has come, and each has connected."""

    __slots__ = ("absent", "connected", "group", "present")

    def __init__(self, generation: int, size: int) -> None:
        self.group = Group(generation, size)
        self.present: set[int] = set()
        self.absent: set[int] = set()  # came, and died or was stopped before it was through
        self.connected: set[int] = set()

    def copy(self) -> "Rendezvous":
        """Return a copy that can take another course."""
        twin = Rendezvous.__new__(Rendezvous)
        twin.group = self.group.copy()
        twin.present, twin.absent, twin.connected = self.present.copy(), self.absent.copy(), self.connected.copy()
        return twin

    def key(self) -> Hashable:
        """A key of all that the future of this rendezvous depends on."""
        return self.group.key(), tuple(sorted(self.present)), tuple(sorted(self.absent)), tuple(sorted(self.connected))

    @property
    def complete(self) -> bool:
        """Every rank has come. With one gone since, some get through and the others wait until they are told."""
        return len(self.present) == self.group.size

    def join(self, rank: int) -> None:
        """A member publishes its address. Raises Violation if another one did so under this number."""
        if rank in self.present:
            raise Violation(f"I4: rank {rank} comes to generation {self.group.generation} twice")
        self.present.add(rank)

    def leave(self, rank: int) -> bool:
        """A member died, or was told to stop. True if its connections broke with that."""
        if rank not in self.present:
            return False
        self.absent.add(rank)
        return self.group.leave(rank)


class Copying:
    """A copy on its way into a target, from a source's restore server."""

    __slots__ = ("failed", "generation", "of", "results", "saved", "sending", "source", "state", "version")

    def __init__(self, source: str, generation: int, version: int, of: int = -1) -> None:
        self.source = source  # a process
        self.generation = generation
        self.version = version
        self.of = of  # the rank whose snapshot is meant; -1: the source's own state, as it stands
        self.sending = False
        self.state: State | None = None
        self.results = 0  # of the collectives after that state which the source has completed
        self.saved: Saved | None = None  # the snapshot, if one was meant
        self.failed = ""

    @property
    def over(self) -> bool:
        """True if the target need not wait any more."""
        return self.state is not None or bool(self.failed)

    def copy(self) -> "Copying":
        """Return a copy that can take another course."""
        twin = Copying(self.source, self.generation, self.version, self.of)
        twin.sending, twin.state, twin.failed = self.sending, self.state, self.failed
        twin.results, twin.saved = self.results, self.saved
        return twin

    def key(self) -> Hashable:
        """A key of all that the future of this copy depends on."""
        return self.source, self.generation, self.version, self.sending, self.state, self.results, self.failed
