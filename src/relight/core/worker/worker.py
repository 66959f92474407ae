"""One worker of a job, as far as decisions depend on it: a value without threads, clock or tensors.

`handle(event)` returns the actions to carry out, in order; `core/worker/table.py` has, for each event and state, the
function that decides. Two drivers carry actions out: `training/worker` around a real script, and `sim/model` in virtual
time. A driver asks `is_ready` while it waits, and hands in `Ordered` once that is so.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import msgspec

from relight.core.protocol.commands import Assign, Begin, Release, Restore, Resume, Save
from relight.core.worker.actions import Actions
from relight.core.worker.events import Event
from relight.core.worker.states import State
from relight.core.worker.table import TABLE


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a paused rank; see `core.events.Stopped`."""

    generation: int
    step: int
    version: int
    lineage: str
    prepared: int
    torn: bool
    torn_by: str
    blank: bool
    agreed: int
    sound: int
    wrote: bool
    alone: bool
    at_collective: int
    gives: int
    comes: bool


class Worker:
    """See the module. Attributes are public: drivers read them, and set those of a step in flight."""

    table: ClassVar[Mapping[type, Mapping[State, Callable[..., Actions]]]] = TABLE

    def __init__(self, rank: int, *, is_standby: bool, until: int = 0, cap: int = 0) -> None:
        self.state = State.STARTING
        self.rank = rank
        self.is_standby = is_standby  # it holds no rank, or has not trained with it yet
        # --- orders, as the link thread receives them
        self.newest = 0  # generation of the newest Stop or Assign
        self.closed = False  # a newer generation than the main thread's was opened
        self.go_alone = False  # the newest Stop wants no rank to wait in a collective between two steps
        self.wind_down_in = 0  # the generation in which all ranks are to pause; they agree at a barrier on when
        self.orders: dict[type, Any] = {}  # the newest of each kind
        # --- the state of the rank
        self.version = 0  # optimizer steps applied
        self.lineage = ""  # hash chain over all committed steps: a step number alone is not a version
        self.blank = is_standby  # it holds nothing: a replacement before its copy is complete
        self.torn = False  # it was interrupted where the step can neither be finished nor undone
        self.torn_by = ""  # what in the step did that, for people
        self.alone = False  # code after the newest step has this rank's own value of a collective that was cut
        self.at_collective = 0  # code after the newest step waits in this collective, from 1, for all other ranks
        self.gives = (
            -1
        )  # results that it has of collectives in the code after the newest step, which is over; -1: not all
        self.comes = False  # the step in flight is an epoch's last, and a replacement can run the code after it
        self.runs_code = False  # this replacement runs the code after the newest step, before it takes another one
        self.agreed = -1  # the newest version of which it is known that all replicas held the same bits
        self.sound = -1  # the newest version to which only such replicas contributed, as far as is known here
        self.history = 0  # the generation that last undid versions
        self.began = -1  # the version with which this generation began to train
        # --- the step in flight
        self.started = -1  # newest step that was started
        self.attempt = 0  # how often it was started before
        self.begun_before = 0  # steps below this one were started before, if a recovery went back over them
        self.prepared = -1  # the step at whose barrier this rank waits
        self.passed = False  # its barrier was passed, and it is not committed yet
        self.wrote = False  # it had begun to write, whether that is undone or not
        self.commits = 0  # by this process
        self.surprise = (-1, "")  # the newest version whose step did more after its barrier than was learnt, and what
        # --- the end
        self.until = until
        self.cap = cap  # the version with which the job ends in any case; 0: there is none
        self.last: int | None = None  # the version with which it ends for now, if all ranks agreed on that
        self.left: int | None = None  # the version with which the script has left the loop, here or on other ranks
        self.has_failed = False  # the script
        # --- a recovery
        self.generation = 0  # the one in which the main thread works
        self.reported = 0  # the generation in which this rank reported its status
        self.order: Restore | Save | None = None  # the decision that is being carried out
        self.was_there = False  # it held the target version when it began to go down
        self.first_after_recovery = False  # no step was committed since

    def handle(self, event: Event) -> Actions:
        """Take in an event. Raises KeyError if nothing is to be done with it in this state: a bug of the driver."""
        return self.table[type(event)][self.state](self, event)

    def copy(self) -> Self:
        """Return an equal worker that shares nothing that changes."""
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        twin.orders = self.orders.copy()
        return twin

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # it changes

    # --- what it holds ------------------------------------------------------------------------------------------------
    @property
    def goal(self) -> int:
        """The number of steps to be committed before this process leaves the loop."""
        goal = self.until if self.last is None else min(self.until, self.last)
        if self.left is not None:
            goal = min(goal, self.left)
        return min(goal, self.cap) if self.cap else goal

    @property
    def may_be_left(self) -> bool:
        """True if other ranks may have left the loop after the step that was finished last, and this one not know.

        A replacement has not run the code after that step. All ranks must say the same.
        """
        return self.first_after_recovery and self.version < (min(self.until, self.cap) if self.cap else self.until)

    @property
    def winding_down(self) -> bool:
        """True if the next step that all ranks finish is to be the last one for now: in this generation."""
        return self.wind_down_in == self.generation > 0

    @property
    def is_intact(self) -> bool:
        """True if it holds a version, or can undo its way back to one."""
        return not (self.blank or self.torn or self.passed)

    def status(self) -> RankStatus:
        """Return the status that this rank reports."""
        return RankStatus(
            generation=self.reported,
            step=self.started,
            version=self.version,
            lineage=self.lineage,
            prepared=self.prepared if self.prepared == self.version else -1,
            torn=self.torn and not self.blank,
            torn_by=self.torn_by if self.torn and not self.blank else "",
            blank=self.blank,
            agreed=self.agreed,
            sound=self.sound,
            wrote=self.wrote,
            alone=self.alone and not self.blank,
            at_collective=self.at_collective,
            gives=self.gives if self.is_intact else -1,
            comes=self.comes and self.prepared == self.version and not self.blank,
        )

    def compares(self, every: int, *, first: bool) -> bool:
        """Return whether states are compared before the barrier of this step. All ranks must say the same.

        After a recovery they know the version from which it began, but only of 0 that it was the job's first.

        Args:
            every: steps from one comparison to the next; 0: none.
            first: the job's second step is to look at what the first one made: a script whose ranks differ does so at
                once.
        """
        return (first and self._is_number(1)) or bool(every and self.version % every == 0)

    @property
    def is_first(self) -> bool:
        """True if this step is the job's first. All ranks must say the same."""
        return self._is_number(0)

    def _is_number(self, number: int) -> bool:
        return (self.began == 0 or self.generation == 1) and self.version == self.began + number

    # --- orders -------------------------------------------------------------------------------------------------------
    def order_of(self, kind: type, generation: int) -> Any:
        """The newest order of this kind, if it is of this generation."""
        order = self.orders.get(kind)
        return order if order is not None and order.generation == generation else None

    @property
    def is_superseded(self) -> bool:
        """True if a newer generation was opened than that of the decision in hand."""
        return self.order is not None and self.newest > self.order.generation

    @property
    def is_ready(self) -> bool:
        """True if an order is here that the main thread waits for in this state."""
        match self.state:
            case State.PARKED:
                reported = self.reported
                ordered = self.order_of(Restore, reported) or self.order_of(Save, reported)
                return ordered is not None or self.newest > reported
            case State.RESTORED:
                return self.is_superseded or (
                    self.order is not None and self.order_of(Resume, self.order.generation) is not None
                )
            case State.COPYING | State.FORMING | State.SAVING | State.FAILED:
                return self.is_superseded
            case State.HELD:
                return self.newest > self.generation
            case State.DONE:
                return self.closed or Release in self.orders
            case State.ENTERED:
                return self.closed or Begin in self.orders
            case State.STARTING | State.IDLE:
                return Assign in self.orders
        return self.closed
