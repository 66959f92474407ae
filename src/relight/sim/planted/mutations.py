"""Bugs planted into the rule, the controller, the detector and the worker: the simulation must find each.

Each is a published variant, that loses in docs/PROTOCOL.md, that this project once had, or that is easily written;
sim/planted has them. Nothing in production code knows of them: they replace a function or override a method. For those
in the worker, it is the model of the worker that is changed.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from relight.core.detection.detector import Detector
from relight.core.protocol.fault import Action
from relight.core.protocol.gathering import HOLD_SECONDS
from relight.core.recovery.decision import decide
from relight.core.worker.worker import Worker
from relight.sim.model.contents import Violation
from relight.sim.model.schedule import Schedule, random_schedule
from relight.sim.model.worker.worker import SimulatedWorker
from relight.sim.planted import (
    agreeing,
    controllers,
    detectors,
    executions,
    fallbacks,
    rules,
    sharing,
    supplies,
    workers,
)
from relight.sim.timed.job import Parts, SimulatedJob


@dataclass(frozen=True)
class Gatherer:
    """The time for which an agent lets reports of its ranks wait for each other."""

    hold_seconds: float = HOLD_SECONDS


class GathersForEver(Gatherer):
    """The reports of a host's ranks wait for a rank that hangs, so the controller blames all of them."""


@dataclass(frozen=True)
class Mutation:
    """A variant. Some of the first `within` random schedules must break an invariant; 0: they would be too many, and
    the recorded schedule must do.

    `actions`, `points`, `hosts`, `supply`, `fallback`, `flips`, `writes` and `shapes` narrow the schedules down, for
    bugs that need two rare faults at once.
    """

    name: str
    within: int
    rule: rules.Rule = decide
    controller: type | tuple[type, ...] = ()  # parts of the controller, or the controller
    decisions: type[Worker] = Worker  # of the worker
    worker: type[SimulatedWorker] = SimulatedWorker  # how it carries them out
    detector: type[Detector] = Detector
    agent: Gatherer = Gatherer()
    actions: tuple[Action, ...] = ()
    points: tuple[str, ...] = ()
    hosts: bool | None = None
    supply: bool | None = None
    fallback: bool = False
    flips: bool = False
    writes: bool | None = None
    shapes: tuple[str, ...] = ()  # of the steps, instead of random ones

    @property
    def what(self) -> str:
        """The defect in words."""
        if parts := self._controller_parts():
            return (parts[0].__doc__ or "").strip()
        variants: tuple[tuple[type, type], ...] = (
            (self.decisions, Worker),
            (self.worker, SimulatedWorker),
            (self.detector, Detector),
        )
        for kind, original in variants:
            if kind is not original:
                return (kind.__doc__ or "").strip()
        if type(self.agent) is not Gatherer:
            return (self.agent.__doc__ or "").strip()
        return (self.rule.__doc__ or "").strip()

    @contextmanager
    def planted(self) -> Iterator[Parts]:
        """The parts to build a simulated job from, while this lasts."""
        with rules.planted_rule(self.rule):
            build = controllers.controller_with(*self._controller_parts())
            deciding = type("Planted", (self.worker,), {"decisions": self.decisions, "__slots__": ()})
            yield Parts(build, deciding, self.detector, self.agent.hold_seconds)

    def _controller_parts(self) -> tuple[type, ...]:
        return self.controller if isinstance(self.controller, tuple) else (self.controller,)

    def breaks(self, schedule: Schedule) -> Violation | None:
        """The invariant that the variant breaks in this schedule."""
        with self.planted() as parts:
            try:
                SimulatedJob(schedule, parts).run()
            except Violation as violation:
                return violation
        return None

    def schedule(self, seed: int) -> Schedule:
        """The random schedule of this seed."""
        schedule = self._schedule(seed)
        return msgspec.structs.replace(schedule, shapes=self.shapes) if self.shapes else schedule

    def _schedule(self, seed: int) -> Schedule:
        if not self.points:
            return random_schedule(
                seed,
                hosts=self.hosts or self.supply,
                supply=self.supply,
                fallback=self.fallback,
                flips=self.flips,
                writes=self.writes,
            )
        return random_schedule(
            seed,
            faults=3,
            actions=self.actions,
            points=self.points,
            fallback=self.fallback,
            flips=self.flips,
            writes=self.writes,
        )

    def hunt(self, first: int = 0) -> tuple[int, Violation] | None:
        """The number of random schedules that it took, and what broke."""
        for count in range(1, self.within + 1):
            violation = self.breaks(self.schedule(first + count - 1))
            if violation is not None:
                return count, violation
        return None


_KILLS = (Action.KILL,)
# Where a second death finds ranks on their way down.
_WHILE_SHARING = ("BARRIER", "AFTER_STEP", "SHARE", "OUTSIDE", "OPTIMIZER")
# Code between two steps calls a collective, which a death cuts short.
_sharing = functools.partial(Mutation, within=200, actions=_KILLS, points=_WHILE_SHARING, shapes=("shared-after",))
# The same, and ranks can wait in that collective.
_waiting = functools.partial(Mutation, within=500, actions=_KILLS, points=_WHILE_SHARING, shapes=("waits-after",))
# A step changes a buffer for the first time, on some ranks.
_agreeing = functools.partial(
    Mutation,
    within=200,
    actions=_KILLS,
    points=("READY", "BARRIER", "AGREE"),
    shapes=("one", "new-buffer", "one", "new-buffers"),
)
_WHILE_FALLING_BACK = ("OUTSIDE", "FORWARD", "READY", "OBEY", "COPY", "ROLLBACK", "REFORM", "RESTORED", "RESUME")
MUTATIONS = (
    Mutation("dead-ranks-tag", 100, controller=controllers.DecidesFromTheDeadRanksTag),
    Mutation("newest-of-survivors", 500, rule=rules.newest_of_the_survivors),
    Mutation("forward-if-any", 100, rule=rules.forward_if_any_is_prepared),
    Mutation("forward-if-most", 200, rule=rules.forward_if_most_are_prepared),
    Mutation("always-back", 500, rule=rules.always_back),
    Mutation("prepared-not-asked", 500, rule=rules.prepared_is_not_asked_for),
    Mutation("private-ignored", 200, rule=rules.private_state_is_forgotten),
    Mutation("copies-over-intact", 50, rule=rules.one_source_and_the_rest_copies),
    Mutation("before-all-are-paused", 50, controller=controllers.DecidesBeforeAllArePaused),
    Mutation("stale-positions", 500, controller=controllers.DecidesFromStalePositions),
    Mutation("generation-twice", 50, controller=controllers.UsesAGenerationTwice),
    Mutation("old-stopped", 5000, controller=controllers.BelievesOldReports),
    Mutation("old-restored", 20000, controller=controllers.BelievesOldRestores),
    Mutation("old-done", 50000, controller=controllers.BelievesOldEnds),
    Mutation("resumes-without-last", 200, controller=controllers.ResumesWithoutTheLast),
    Mutation("rank-given-too-soon", 1000, controller=controllers.GivesARankAwayTooSoon),
    Mutation("restored-replacement-forgotten", 10000, controller=controllers.ForgetsRestoredReplacements),
    Mutation("predecessors-forgotten", 3000, controller=controllers.ForgetsThePredecessors),
    Mutation("page-of-the-dying-not-read", 1000, controller=controllers.WaitsForTheMemoryOfTheDead),
    Mutation("frozen-at-the-end", 600, controller=controllers.IgnoresFrozenProcessesAtTheEnd),
    Mutation("broken-collective-ignored", 600, controller=controllers.IgnoresBrokenCollectives),
    Mutation(
        "slow-restore-blames-all",
        5000,
        controller=controllers.BlamesEveryoneForASlowRestore,
        actions=(Action.KILL, Action.LOOP),
        points=("READY", "BARRIER", "ROLLBACK", "REFORM"),
    ),
    Mutation("stop-deadline-without-effect", 6000, controller=controllers.ComparesTheStopDeadlineInAnotherWay),
    Mutation("nothing-said-again", 2000, controller=controllers.SaysNothingAgain),
    Mutation("unknown-ends-alike", 2000, controller=controllers.TakesUnknownEndsForAlike),
    Mutation("blames-who-stops-later", 2000, detector=detectors.BlamesWhoStopsLater),
    Mutation(
        "finishing-is-training",
        5000,
        detector=detectors.TakesFinishingForTraining,
        actions=(Action.LOOP,),
        points=("READY", "BARRIER", "FINISH", "OPTIMIZER", "AFTER_WRITE"),
    ),
    Mutation("done-do-not-count", 5000, detector=detectors.DoesNotCountTheDone),
    Mutation(
        "all-parked",
        5000,
        detector=detectors.ForgetsThoseWhoAreAllParked,
        actions=(Action.KILL, Action.LOOP),
        points=("FORWARD", "RESUME", "RESUME"),
    ),
    Mutation(
        "oversleeps",
        2000,
        controller=controllers.Oversleeps,
        actions=(Action.KILL, Action.LOOP),
        points=("FORWARD", "ROLLBACK", "REFORM"),
    ),
    Mutation(
        "wakes-just-after",
        20000,
        controller=controllers.TakesAShortSleepForNone,
        actions=(Action.LOOP, Action.FREEZE, Action.KILL),
        points=("OBEY",),
        fallback=True,
    ),
    Mutation("restart-reuses-generation", 2000, controller=controllers.ReusesAGenerationAfterItsRestart),
    Mutation("restart-says-nothing", 2000, controller=controllers.SaysNothingAfterItsRestart),
    Mutation("blames-the-bereft", 10000, detector=detectors.BlamesTheBereft, hosts=True),
    Mutation("compares-out-of-sight", 5000, detector=detectors.ComparesWithWhoIsOutOfSight, hosts=True),
    Mutation("agents-look-alike", 20000, controller=controllers.TakesAnotherAgentForTheSame),
    Mutation(
        "killed-once-at-the-end",
        20000,
        controller=fallbacks.SaysOnceThatTheLastIsToDie,
        actions=(Action.FREEZE,),
        points=("RELEASED",),
    ),
    Mutation("starts-on-spares", 200, controller=controllers.StartsOnSpares, hosts=True),
    Mutation("drains-in-the-middle", 200, controller=controllers.DrainsInTheMiddleOfAStep, hosts=True),
    Mutation("faulty-is-lost", 500, controller=controllers.TakesAFaultForALoss, hosts=True),
    Mutation("given-back-for-ever", 200, controller=controllers.GivesMachinesBackForEver, hosts=True),
    Mutation("given-back-too-soon", 5000, controller=controllers.GivesHostsBackTooSoon, hosts=True),
    Mutation("orders-again-and-again", 100, controller=supplies.ForgetsWhatIsOnOrder, supply=True),
    Mutation("forgets-who-came", 100, controller=supplies.ForgetsOrderedHosts, supply=True),
    Mutation("cancelled-hosts-join", 500, controller=supplies.TakesHostsWhoseOrderIsOver, supply=True),
    Mutation("orders-outlive-job", 100, controller=supplies.LeavesOrdersAtTheEnd, supply=True),
    Mutation("refusal-ends-job", 100, controller=supplies.EndsWhenRefused, supply=True),
    Mutation("failed-host-again-at-once", 500, controller=supplies.OrdersAtOnceAfterAFailedHost, supply=True),
    Mutation("order-names-repeat", 500, controller=supplies.UsesNamesAgain, supply=True),
    Mutation("pages-outlive-agents", 1000, controller=controllers.TrustsThePagesOfALostAgent, hosts=True),
    Mutation("last-host-at-the-end", 1000, controller=controllers.WaitsForTheLostAtTheEnd, hosts=True),
    Mutation("placed-on-lost-host", 200, controller=controllers.PlacesOnALostHost, hosts=True),
    Mutation("zombies-are-sources", 200, controller=controllers.CopiesFromZombies, hosts=True),
    Mutation("lost-private-derived", 200, controller=controllers.DerivesWhateverIsLost, hosts=True),
    Mutation("lost-host-is-awaited", 200, controller=controllers.WaitsForALostHost, hosts=True),
    Mutation("gathers-for-ever", 5000, agent=GathersForEver(hold_seconds=10_000.0)),
    Mutation("parts-forgotten", 1000, controller=(fallbacks.ForgetsTheParts, fallbacks.DecidesWithoutTheParts)),
    Mutation("fallback-forgotten", 20000, controller=fallbacks.ForgetsThatItWentDown, fallback=True),
    Mutation("living-for-snapshots", 20000, controller=fallbacks.TakesTheLivingForSnapshots, hosts=True, fallback=True),
    Mutation("keeps-to-the-buddies", 20000, controller=fallbacks.KeepsToTheBuddies, hosts=True, fallback=True),
    Mutation(
        "undone-private-counts",
        100000,
        controller=fallbacks.TakesWhatIsUndoneForPrivateState,
        hosts=True,
        fallback=True,
    ),
    Mutation("thrown-away-private-not-missed", 0, controller=fallbacks.ForgetsWhoThrewItsPrivateStateAway),
    Mutation(
        "recalled-taken-for-copy",
        60000,
        controller=fallbacks.TakesARecalledSnapshotForACopy,
        hosts=True,
        fallback=True,
        flips=True,
    ),
    Mutation("saves-with-what-is-gone", 0, controller=controllers.SavesWithWhatWentWithTheAgent),
    Mutation("buddies-of-those-left", 5000, controller=fallbacks.NamesBuddiesOfThoseWhoAreLeft, fallback=True),
    Mutation("saved-is-said-once", 100000, worker=executions.SaysOnceThatItHasSaved, hosts=True, fallback=True),
    Mutation("only-snapshot-overwritten", 20000, worker=executions.OverwritesTheOnlySnapshot, fallback=True),
    Mutation("kept-taken-for-established", 0, worker=executions.TakesKeptForEstablished),
    Mutation(
        "what-to-keep-forgotten",
        10000,
        worker=executions.ForgetsWhatToKeep,
        actions=(Action.CUT, Action.KILL),
        points=("AFTER_STEP", "FORWARD", "OUTSIDE"),
        fallback=True,
    ),
    Mutation(
        "undone-snapshots-kept",
        20000,
        worker=executions.KeepsWhatIsUndone,
        actions=_KILLS,
        points=_WHILE_FALLING_BACK,
        fallback=True,
    ),
    Mutation(
        "histories-mixed",
        20000,
        worker=executions.MixesHistoriesOnDisk,
        actions=_KILLS,
        points=_WHILE_FALLING_BACK,
        fallback=True,
    ),
    Mutation(
        "newest-kept",
        50000,
        controller=fallbacks.KeepsTheNewest,
        actions=(Action.CUT, Action.KILL),
        points=("AFTER_STEP",),
        fallback=True,
    ),
    Mutation("wrong-gradient-applied", 1000, worker=executions.ComparesInTheBarrier, flips=True),
    Mutation("copies-vote", 1000, controller=fallbacks.CountsCopiesAsVotes, flips=True),
    Mutation("earlier-copies-vote", 20000, controller=fallbacks.CountsEarlierCopiesAsVotes, flips=True),
    Mutation(
        "one-is-a-majority",
        5000,
        controller=fallbacks.TakesOneRankForAMajority,
        actions=_KILLS,
        points=("FORWARD", "RESTORED", "OBEY"),
        flips=True,
    ),
    Mutation("trusts-the-newest", 500, controller=fallbacks.TrustsWhatIsNewest, fallback=True, flips=True),
    Mutation("first-is-right", 100, controller=fallbacks.BlamesTheFirst, flips=True),
    Mutation("differences-ignored", 500, controller=fallbacks.IgnoresDifferences, flips=True),
    Mutation("compares-seldom-heard", 10000, detector=detectors.ComparesThoughSeldomHeard, hosts=True),
    Mutation("slow-samples-are-none", 5000, detector=detectors.TakesSlowSamplingForBlindness, hosts=True),
    Mutation("blamed-by-an-old-sample", 0, detector=detectors.BlamesByAnOldSample),
    Mutation("private-not-claimed", 200, decisions=workers.DoesNotClaimPrivateState),
    Mutation("private-kept-too-late", 200, worker=executions.KeepsPrivateStateTooLate),
    Mutation("write-interrupted", 200, decisions=workers.StopsInsideTheWrite),
    Mutation("no-barrier", 50, decisions=workers.HasNoBarrier),
    Mutation("restored-in-place", 500, worker=executions.RestoresInPlace),
    Mutation("published-a-step-early", 50, worker=executions.PublishesEarly),
    Mutation("published-before-all-hold-it", 50, decisions=workers.PublishesItsOwnStep),
    Mutation("stop-answered-in-the-write", 500, decisions=workers.AnswersStopAtOnce),
    Mutation("old-orders-obeyed", 500, decisions=workers.ObeysOldOrders),
    Mutation("rendezvous-without-generation", 500, worker=executions.MeetsWithoutGeneration),
    Mutation("preparation-forgotten", 500, decisions=workers.ForgetsItsPreparation),
    Mutation("repeated-with-another-batch", 200, worker=executions.RepeatsWithAnotherBatch),
    Mutation("begin-lost", 20000, decisions=workers.WaitsForBeginOnly),
    Mutation("leaves-alone", 100, decisions=workers.LeavesAlone),
    Mutation("first-write-absorbed", 200, worker=executions.AbsorbsAfterTheFirstWrite, writes=True),
    Mutation("prepared-keep-their-writes", 500, decisions=workers.KeepsWhatThePreparedWrote, writes=True),
    Mutation("pre-images-too-late", 200, worker=executions.TakesPreImagesTooLate, writes=True),
    Mutation("pre-images-too-long", 100, worker=executions.KeepsPreImagesTooLong, writes=True),
    Mutation("rolled-back-before-decision", 100, decisions=workers.RollsBackBeforeTheDecision, writes=True),
    Mutation("pre-images-lost-at-second-stop", 500, worker=executions.ForgetsPreImagesAtASecondStop, writes=True),
    Mutation("offered-before-rolled-back", 500, decisions=workers.OffersBeforeItRollsBack, writes=True),
    Mutation("saved-with-writes", 20000, decisions=workers.SavesWhatWasWritten, fallback=True, writes=True),
    Mutation("finished-by-writing-again", 100, worker=executions.FinishesByWritingAgain, writes=True),
    Mutation("prepared-inside-last-write", 2000, worker=executions.IsPreparedInsideTheLastWrite, writes=True),
    Mutation("replacement-is-prepared", 20000, decisions=workers.CountsAReplacementAsPrepared, writes=True),
    Mutation("private-before-last-write", 500, worker=executions.KeepsPrivateStateBeforeTheLastWrite, writes=True),
    Mutation("barrier-before-first-write", 200, worker=executions.HasItsBarrierBeforeTheFirstWrite, writes=True),
    Mutation("surprise-is-intact", 500, decisions=workers.TakesASurpriseForIntact, writes=True),
    Mutation(
        "torn-is-called-blank",
        2000,
        decisions=workers.IsCalledBlankOnceItCopies,
        actions=_KILLS,
        points=("EXTRA", "COPY", "OBEY", "PARKED"),
        writes=True,
    ),
    Mutation("surprise-not-doubted", 500, decisions=workers.DoubtsNothing, writes=True),
    Mutation("doubted-at-commit-only", 2000, decisions=workers.DoubtsOnlyWhatWasClosed, writes=True),
    Mutation("handshake-trusted", 5000, decisions=workers.TrustsTheHandshake, flips=True),
    Mutation("every-surprise-doubted", 500, decisions=workers.DoubtsEverySurprise, writes=True),
    Mutation("private-of-a-surprise", 500, worker=executions.KeepsWhatASurpriseMadeOld, writes=True),
    Mutation("believed-again", 200, worker=executions.BelievesAgain, writes=True),
    Mutation("difference-forgotten", 200, worker=executions.ForgetsTheDifferenceInARecovery, writes=True),
    Mutation("difference-not-told", 200, worker=executions.TellsNoRankOfADifference, writes=True),
    Mutation("goes-by-its-own-steps", 500, worker=executions.GoesByItsOwnSteps, writes=True),
    _sharing("lowest-followed", controller=sharing.FollowsTheLowest),
    _sharing("anyone-followed", controller=sharing.FollowsAnyone),
    _sharing("alone-not-reported", decisions=sharing.ForgetsThatItWentOnAlone),
    _sharing(
        "half-copy-taken-for-whole",
        decisions=sharing.TakesAHalfCopyForWhole,
        points=(*_WHILE_SHARING, "OBEY", "COPY", "TAKE_OVER"),
    ),
    _waiting("meets-without-all", controller=sharing.MeetsWithoutAll),
    _waiting("code-run-twice", controller=sharing.RunsCodeTwice),
    _waiting("code-skipped", decisions=sharing.SkipsTheCode),
    _waiting("waits-in-any-case", decisions=sharing.WaitsInAnyCase),
    _waiting("says-the-first", decisions=sharing.SaysTheFirst, shapes=("waits-twice",)),
    _waiting("any-source-gives", controller=sharing.AnySourceGives, shapes=("waits-twice",)),
    _agreeing("agreed-after-barrier", worker=agreeing.AgreesAfterTheBarrier),
    _agreeing("prepared-while-agreeing", decisions=agreeing.StaysPreparedWhileRanksAgree),
    _agreeing("undone-private-kept", within=20_000, worker=agreeing.KeepsWhatAnUndoneAttemptKept),
)

HUNTED = tuple(mutation for mutation in MUTATIONS if mutation.within)


def find_mutation(name: str) -> Mutation:
    """The mutation of a name. Raises KeyError."""
    return {mutation.name: mutation for mutation in MUTATIONS}[name]
