"""Process groups that break as real ones do: a collective completes on some members and is lost on others.

Measured on gloo (docs/PROTOCOL.md): after a kill, survivors end on different sides of a collective in 5 to 13 % of
the cases. Here it is a coin for each survivor, so that every combination is met.
"""

from collections.abc import Callable, Hashable
from functools import partial

from tests.core.simulated_clock import Clock, Violation

NOTICE_SECONDS = (0.0001, 0.02)  # until a member finds its collective complete, or its connection reset
STORE_TIMEOUT_SECONDS = 60.0  # a peer never published its address
CONNECT_TIMEOUT_SECONDS = 300.0  # it did, and never connected
FROZEN_PEER_SECONDS = 2.0  # between two looks whether a frozen peer has woken up


class Operation:
    """One collective. `outcome` says for each rank whether it completed; a rank that is not in it still waits."""

    def __init__(self, what: Hashable) -> None:
        self.what = what
        self.entered: dict[int, str] = {}
        self.outcome: dict[int, bool] = {}
        self._wakers: dict[int, Callable[[], None]] = {}
        self._underway: set[int] = set()

    def enter(self, rank: int, what: Hashable, contribution: str, wake: Callable[[], None]) -> None:
        if what != self.what:
            raise Violation(f"I4: rank {rank} brings {what} to a collective of {self.what}")
        self.entered[rank] = contribution
        self._wakers[rank] = wake

    def judge(self, clock: Clock, size: int, lost: set[int], gone: set[int]) -> None:
        """Settle whoever can be settled now."""
        complete = len(self.entered) == size
        hopeless = any(rank not in self.entered for rank in gone)
        for rank in sorted(self.entered):
            if rank in self.outcome or rank in self._underway:
                continue
            if complete or hopeless or rank in lost:
                self._underway.add(rank)
                done = complete and rank not in lost
                clock.after(clock.between(*NOTICE_SECONDS), partial(self._settle, rank, done, lost))

    def _settle(self, rank: int, done: bool, lost: set[int]) -> None:
        self.outcome[rank] = done and rank not in lost
        self._wakers[rank]()


class Group:
    """The formed process group of one generation."""

    def __init__(self, clock: Clock, generation: int, size: int) -> None:
        self.generation = generation
        self._clock = clock
        self._size = size
        self._operations: list[Operation] = []
        self._entered: dict[int, int] = {}  # operations that each rank has entered
        self._gone: set[int] = set()  # dead, or cut off: enters nothing any more
        self._lost: set[int] = set()  # has lost data that was on its way: completes nothing any more

    def enter(self, rank: int, what: Hashable, contribution: str, wake: Callable[[], None]) -> Operation:
        index = self._entered.get(rank, 0)
        self._entered[rank] = index + 1
        if index == len(self._operations):
            self._operations.append(Operation(what))
        operation = self._operations[index]
        operation.enter(rank, what, contribution, wake)
        self._judge()
        return operation

    def leave(self, rank: int) -> None:
        """The process died, or its connections were cut; each other member may have lost what was on its way."""
        if rank in self._gone:
            return
        self._gone.add(rank)
        self._lost.add(rank)
        for other in range(self._size):
            if other != rank and self._clock.coin():
                self._lost.add(other)
        self._judge()

    def _judge(self) -> None:
        for operation in self._operations[-2:]:  # nobody waits in an older one
            operation.judge(self._clock, self._size, self._lost, self._gone)


class Forming:
    """One member's attempt to form the group of a generation; runs beside its main thread."""

    def __init__(self, rank: int, is_frozen: Callable[[], bool], wake: Callable[[], None]) -> None:
        self.rank = rank
        self.is_frozen = is_frozen
        self.wake = wake
        self.group: Group | None = None
        self.waits_for_frozen: bool | None = None  # None: met no frozen peer yet


class Rendezvous:
    """The store keys of one generation: a group is formed once every rank has come."""

    def __init__(self, clock: Clock, generation: int, size: int) -> None:
        self._clock = clock
        self._size = size
        self._group = Group(clock, generation, size)
        self._present: dict[int, Forming] = {}
        self._absent: set[int] = set()  # came, and died or was stopped before it was done

    @property
    def complete(self) -> bool:
        return len(self._present) == self._size

    def join(self, forming: Forming) -> None:
        if forming.rank in self._present:
            raise Violation(f"I4: rank {forming.rank} comes to generation {self._group.generation} twice")
        self._present[forming.rank] = forming
        if self.complete:
            for rank in range(self._size):
                self._clock.after(self._clock.between(0.005, 0.03), partial(self._connect, self._present[rank]))

    def leave(self, rank: int) -> None:
        if rank in self._present:
            self._absent.add(rank)
            self._group.leave(rank)

    def _connect(self, member: Forming) -> None:
        """With a peer gone, some members are through already and the others wait for a connection that never comes."""
        if member.rank in self._absent or (self._absent and self._clock.coin()):
            return
        if member.is_frozen() or self._is_held_up(member):
            self._clock.after(FROZEN_PEER_SECONDS, partial(self._connect, member))
            return
        member.group = self._group
        member.wake()

    def _is_held_up(self, member: Forming) -> bool:
        """A frozen peer's kernel still answers, so some get through; the others wait for as long as it is frozen."""
        if not any(peer.is_frozen() for peer in self._present.values()):
            return False
        if member.waits_for_frozen is None:
            member.waits_for_frozen = self._clock.coin()
        return member.waits_for_frozen
