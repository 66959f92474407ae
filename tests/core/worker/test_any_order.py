"""One worker under orders and events that come in any order: what must hold of each of its decisions.

The simulator searches whole jobs; here one rank meets controllers that send what they like, late, twice, or of another
generation, while its main thread does anything that it could do at that place. A life takes milliseconds.
"""

import random
from typing import Any

import pytest

from relight.core.protocol import commands as order
from relight.core.worker import actions as act
from relight.core.worker import events as ev
from relight.core.worker.recovery import FOLLOWED
from relight.core.worker.states import State
from relight.core.worker.worker import RankStatus, Worker
from relight.sim.planted import workers as planted

RANK, UNTIL = 1, 12
SOURCE = order.Source(rank=0, address="here")
LIVES, EVENTS = 400, 150
REPLICA, BUDDY, CHECKPOINT = order.FallbackTier
TAKES = (act.Copy, act.RecallSnapshot, act.FetchSnapshot, act.ReadCheckpoint)


class Life:
    """A worker, a main thread that does what it may do, and orders. `live` checks every decision."""

    def __init__(self, seed: int, kind: type[Worker] = Worker) -> None:
        self.choose = random.Random(seed)
        self.worker = kind(RANK, is_standby=seed % 2 > 0, until=UNTIL)
        self.is_offered = False  # a step that is not entered yet
        self.is_ready = False  # the gradients of the step under way
        self.reported: RankStatus | None = None
        self.opened = 1
        self.sound = -1
        self.surprise = -1  # the version whose step did more after its barrier than was learnt
        self.last: act.Actions = ()
        if self.worker.is_standby:
            self.feed(ev.StandbyWarm(), order.Assign(why="", process="w1", rank=RANK, generation=2), ev.Ordered())
            self.feed(ev.StepWanted())
            return
        self.feed(order.Assign(why="", process="w1", rank=RANK, generation=1), ev.Ordered(), ev.ScriptEntered())
        is_lost = seed % 4 == 0
        self.feed(order.Stop(why="", generation=2) if is_lost else order.Begin(why="", generation=1))
        assert self.worker.is_ready
        self.feed(ev.Ordered())

    def live(self) -> None:
        for _ in range(EVENTS):
            if self.worker.state in (State.RELEASED, State.ENDING):
                return
            happens = self.main_thread()
            self.feed(self.any_order() if not happens or self.choose.random() < 0.3 else self.choose.choice(happens))

    # --- what may come ------------------------------------------------------------------------------------------------
    def any_order(self) -> Any:
        worker, choose = self.worker, self.choose
        generation = max(2, worker.newest - choose.choice((0, 0, 0, 0, 1, 2)))
        target = max(0, worker.version + choose.choice((0, 0, 0, 1, -1)))
        if self.reported is not None and self.reported.prepared >= 0 and choose.random() < 0.5:
            target = worker.version + 1
        kind = choose.choice(("stop", *["restore"] * 3, "resume", "resume", "save", "wind down", "release"))
        if kind == "stop":
            return order.Stop(why="", generation=worker.newest + choose.choice((1, 1, 1, 2, 0, -1)))
        if kind == "restore":
            copies = worker.blank or worker.torn or choose.random() < 0.2
            return order.Restore(
                why="",
                generation=generation,
                target=target,
                attempt=choose.randrange(3),
                sources=(SOURCE,),
                targets=(RANK,) if copies and choose.random() < 0.9 else choose.choice(((), (2,))),
                tier=choose.choice((BUDDY, CHECKPOINT, *[REPLICA] * 4)),
                undone=choose.randrange(2),
            )
        if kind == "save":
            return order.Save(why="", generation=generation, target=target, rank=0, writers=())
        if kind == "wind down":
            return order.WindDown(why="", generation=generation)
        if kind == "release" and worker.state is State.DONE:
            return order.Release(why="", generation=generation)
        return order.Resume(why="", generation=generation)

    def main_thread(self) -> list[Any]:
        worker, closed = self.worker, self.worker.closed
        happens: list[Any] = [ev.Ordered()] if worker.is_ready and worker.state in Worker.table[ev.Ordered] else []
        left = [ev.StepLeft(), ev.StepLeft(can_be_undone=False, torn_by="a buffer")]
        match worker.state:
            case State.OUTSIDE:
                happens += [ev.StepEntered()] * 4 if self.is_offered else [ev.StepWanted()]
                happens += [ev.CollectiveBroke()]
            case State.IN_STEP:
                happens += [ev.PrivateKept() if self.is_ready else ev.GradientsReady()] * 4
                happens += [] if self.is_ready else [ev.StatesAgree(), ev.StatesDiffer(), ev.StepUndone()]
                happens += [ev.Interrupted(), *left] if closed else []
            case State.AT_BARRIER:
                happens += [ev.BarrierPassed(), ev.BarrierPassed(winds_down=True), ev.BarrierPutOff()]
                happens += [ev.CollectiveBroke()]
                happens += [ev.Interrupted()] * 2 if closed else []
            case State.WRITING:
                happens += [ev.StepFinished(f"{worker.version + 1}"), ev.StepFinished("", surprise="more came")]
                happens += [ev.CutShort("cut"), ev.StepLeft(), ev.Interrupted()] if closed and not worker.order else []
            case State.ORDERED:
                happens += [ev.StepLeft(), *left]
            case State.COPYING if isinstance(worker.order, order.Restore):
                happens += [ev.StateTaken(worker.order.target, "of it", UNTIL)] * 3 + [ev.RestoreFailed("lost")]
                happens += [ev.SnapshotMissing()] if act.RecallSnapshot() in self.last else []
            case State.FORMING:
                happens += [ev.GroupsFormed()] * 3 + [ev.RestoreFailed("lost")]
            case State.SAVING:
                happens += [ev.PartSaved(path="p"), ev.PartSaved(error="full")]
        fails = worker.state in (State.OUTSIDE, State.IN_STEP, State.AT_BARRIER, State.WRITING)
        return happens + [ev.ScriptFailed(saves=True)] * (fails and self.choose.random() < 0.01)

    # --- what must hold -----------------------------------------------------------------------------------------------
    def feed(self, *events: Any) -> None:
        for event in events:
            worker, before, twin = self.worker, self.worker.copy(), self.worker.copy()
            actions = worker.handle(event)
            assert (twin.handle(event), twin) == (actions, worker), "every driver sees the same"
            if isinstance(event, order.WorkerCommand):
                assert actions in ((), (act.CloseGeneration(),)), "the link thread decides nothing else"
            self.check_step(before, event, actions)
            self.check_doubts(before, event, actions)
            self.check_recovery(before, event, actions)
            self.is_offered = act.OfferStep() in actions or (self.is_offered and worker.state is State.OUTSIDE)
            self.is_ready = worker.state is State.IN_STEP and (act.KeepPrivate() in actions or self.is_ready)
            if isinstance(event, ev.StepUndone):
                self.feed(ev.StepWanted())
            self.last = actions

    def check_step(self, before: Worker, event: Any, actions: act.Actions) -> None:
        worker = self.worker
        assert worker.prepared in (-1, worker.version)
        assert (act.Commit() in actions) == isinstance(event, ev.StepFinished)
        assert (act.ConfirmVersion() in actions) == (act.BeginWrite() in actions)
        if act.Commit() in actions:
            assert before.passed
            assert worker.version == before.version + 1
        elif not isinstance(event, ev.StateTaken):
            assert worker.version == before.version
        if act.BeginWrite() in actions:
            self.check_write(before, event)
        if act.OfferStep() in actions:
            assert (worker.closed, worker.torn, worker.blank, worker.passed) == (False,) * 4
            assert worker.version < worker.goal
        if act.ReportDone() in actions:
            assert not worker.closed
            assert worker.version >= worker.goal
        if act.Release() in actions:
            assert not worker.closed
            assert order.Release in worker.orders

    def check_write(self, before: Worker, event: Any) -> None:
        """All are prepared, or the order of that very generation counts on what this rank has reported."""
        assert before.prepared == before.version
        if isinstance(event, ev.BarrierPassed):
            return
        ordered, reported = self.worker.order, self.reported
        assert isinstance(event, ev.Ordered)
        assert ordered is not None
        assert reported is not None
        assert (ordered.generation, ordered.target) == (reported.generation, reported.prepared + 1)

    def check_doubts(self, before: Worker, event: Any, actions: act.Actions) -> None:
        worker = self.worker
        has_doubt = any(isinstance(action, act.Doubt) for action in actions)
        if isinstance(event, ev.StepFinished) and event.surprise:
            self.surprise = worker.version
            assert has_doubt == before.closed, "a failure struck inside of it, perhaps"
            assert act.KeepPrivateAnew() in actions
        elif act.LeaveGroups() in actions and worker.order is not None:
            goes_on = worker.torn and worker.torn_by != FOLLOWED and worker.order.target == worker.version + 1
            assert has_doubt == (goes_on or worker.order.target == self.surprise)
        else:
            assert not has_doubt
        self.sound = worker.version + isinstance(event, ev.StatesAgree) if _vouches(event, actions) else self.sound
        assert worker.status().sound == self.sound

    def check_recovery(self, before: Worker, event: Any, actions: act.Actions) -> None:
        worker, ordered = self.worker, self.worker.order
        if act.ReportStatus() in actions:
            self.reported = status = worker.status()
            assert (status.generation, status.version) == (worker.newest, worker.version)
            assert (status.blank, status.prepared in (-1, worker.version)) == (worker.blank, True)
            assert worker.blank or status.torn == (worker.torn or before.passed), (
                "a write is not undone past the barrier"
            )
            assert act.RollBack() not in actions, "the decision may count on what is written"
        if act.RollBack() in actions:
            assert (worker.passed, before.passed) == (False, False)
        if act.Offer() in actions:
            assert ordered is not None
            assert (worker.version, worker.torn, worker.blank) == (ordered.target, False, False)
            assert act.RollBack() not in actions or actions.index(act.RollBack()) < actions.index(act.Offer())
        if any(isinstance(action, TAKES) for action in actions):
            assert isinstance(ordered, order.Restore)
            assert worker.state is State.COPYING
            assert worker.blank == (before.blank or ordered.tier is not REPLICA)
        if isinstance(event, ev.StateTaken):
            assert act.ClaimVersion() in actions
            assert worker.prepared == -1
        elif act.AwaitGroups() in actions:
            assert act.RollBack() in actions
        if act.ReportRestored() in actions:
            assert ordered is not None
            assert (worker.version, worker.torn, worker.blank) == (ordered.target, False, False)
        if act.OpenGeneration() in actions:
            assert worker.generation == worker.newest > self.opened
            assert (worker.closed, worker.orders[order.Resume].generation) == (False, worker.generation)
            self.opened = worker.generation
        if act.SavePart() in actions:
            assert ordered is not None
            assert not worker.blank
            assert worker.torn or (act.RollBack() in actions and worker.version == ordered.target)


def _vouches(event: Any, actions: act.Actions) -> bool:
    """Return whether states were compared just now: in a step, or before all begin to train, perhaps again."""
    return isinstance(event, ev.StatesAgree) or any(isinstance(action, act.AssignBuddies) for action in actions)


def live_all(kind: type[Worker], seeds: range) -> None:
    for seed in seeds:
        Life(seed, kind).live()


@pytest.mark.parametrize("first", range(0, LIVES, 100))
def test_what_must_hold_of_every_decision(first: int) -> None:
    live_all(Worker, range(first, first + 100))


BUGS = [kind for kind in vars(planted).values() if isinstance(kind, type) and issubclass(kind, Worker)]


@pytest.mark.parametrize("bug", [kind for kind in BUGS if kind is not Worker], ids=lambda kind: kind.__name__)
def test_every_planted_bug_of_a_worker_shows(bug: type[Worker]) -> None:
    with pytest.raises(AssertionError):
        live_all(bug, range(LIVES))
