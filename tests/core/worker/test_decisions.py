"""Decisions of a worker, event by event: the production machine that both drivers carry out."""

import msgspec
import pytest

from relight.core.protocol.commands import (
    Assign,
    Begin,
    FallbackTier,
    Release,
    Restore,
    Resume,
    Save,
    Source,
    Stop,
    WindDown,
)
from relight.core.worker import actions as act
from relight.core.worker import events as ev
from relight.core.worker.states import State
from relight.core.worker.worker import Worker

BEGIN = Begin(why="", generation=1, buddies=(1, 0))
SOURCE = Source(rank=0, address="here")


def stop(generation: int) -> Stop:
    return Stop(why="", generation=generation)


def restore(
    generation: int, target: int, targets: tuple[int, ...] = (), tier: FallbackTier = FallbackTier.REPLICA
) -> Restore:
    return Restore(
        why="",
        generation=generation,
        target=target,
        attempt=1,
        sources=(SOURCE,),
        targets=targets,
        tier=tier,
    )


def resume(generation: int) -> Resume:
    return Resume(why="", generation=generation)


def save(generation: int, target: int) -> Save:
    return Save(why="", generation=generation, target=target, rank=0, writers=())


def feed(worker: Worker, *events: ev.Event) -> act.Actions:
    """Hand events in; return what the last one led to."""
    actions: act.Actions = ()
    for event in events:
        actions = worker.handle(event)
    return actions


def kinds(actions: act.Actions) -> list[str]:
    return [type(action).__name__ for action in actions]


@pytest.fixture
def worker() -> Worker:
    """Rank 1 of a job, between two steps."""
    worker = Worker(1, is_standby=False, until=10)
    assign = Assign(why="", process="w1", rank=1, generation=1)
    feed(worker, assign, ev.Ordered(), ev.ScriptEntered(), BEGIN, ev.Ordered())
    return worker


def enter_step(worker: Worker) -> None:
    assert kinds(feed(worker, ev.StepWanted())) == ["OfferStep"]
    feed(worker, ev.StepEntered())


def reach_barrier(worker: Worker) -> act.Actions:
    enter_step(worker)
    return feed(worker, ev.GradientsReady(), ev.PrivateKept())


def do_steps(worker: Worker, count: int) -> None:
    for _ in range(count):
        reach_barrier(worker)
        feed(worker, ev.BarrierPassed(), ev.StepFinished(f"lineage {worker.version + 1}"))


def test_begin_names_the_buddies() -> None:
    worker = Worker(0, is_standby=False, until=1)
    assert kinds(feed(worker, ev.ScriptEntered())) == ["ReportEntered"]
    assert not worker.is_ready
    assert feed(worker, BEGIN) == ()
    assert worker.is_ready
    assert feed(worker, ev.Ordered()) == (act.AssignBuddies((1, 0), ()),)
    assert worker.state is State.OUTSIDE


def test_a_rank_whose_begin_was_lost_hears_stop() -> None:
    worker = Worker(0, is_standby=False, until=1)
    feed(worker, ev.ScriptEntered(), stop(2))
    assert worker.is_ready
    assert feed(worker, ev.Ordered()) == ()
    assert kinds(feed(worker, ev.StepWanted())) == ["ReportStatus"]


# --- a step -------------------------------------------------------------------------------------------------------
def test_a_step_is_prepared_once_its_private_state_is_kept(worker: Worker) -> None:
    enter_step(worker)
    assert kinds(feed(worker, ev.GradientsReady())) == ["KeepPrivate"]
    assert worker.status().prepared == -1
    assert kinds(feed(worker, ev.PrivateKept())) == ["ShowPrepared", "EnterBarrier"]
    assert worker.status().prepared == 0


def test_a_rank_withdraws_that_it_is_prepared_if_the_barrier_is_put_off(worker: Worker) -> None:
    reach_barrier(worker)
    assert kinds(feed(worker, ev.BarrierPutOff())) == ["WithdrawPrepared"]
    assert worker.status().prepared == -1
    assert kinds(feed(worker, ev.GradientsReady())) == ["KeepPrivate"]
    assert kinds(feed(worker, ev.PrivateKept())) == ["ShowPrepared", "EnterBarrier"]
    assert worker.status().prepared == 0


def test_a_rank_that_is_interrupted_after_the_barrier_was_put_off_goes_back(worker: Worker) -> None:
    reach_barrier(worker)
    feed(worker, ev.BarrierPutOff(), stop(2), ev.Interrupted())
    assert worker.status().prepared == -1
    assert not worker.status().torn


def test_the_version_is_confirmed_before_the_write(worker: Worker) -> None:
    reach_barrier(worker)
    assert kinds(feed(worker, ev.BarrierPassed())) == ["ConfirmVersion", "BeginWrite"]
    assert kinds(feed(worker, ev.StepFinished("next"))) == ["Commit"]
    assert (worker.version, worker.lineage, worker.commits) == (1, "next", 1)


def test_a_step_that_the_script_left_is_offered_again(worker: Worker) -> None:
    enter_step(worker)
    assert kinds(feed(worker, ev.StepWanted())) == ["OfferStep"]
    assert worker.version == 0


def test_a_step_that_the_script_left_after_its_barrier_is_torn_if_a_recovery_comes(worker: Worker) -> None:
    reach_barrier(worker)
    feed(worker, ev.BarrierPassed(), stop(2), ev.StepWanted())
    assert worker.status().torn


def test_after_the_last_step_a_rank_waits_for_release(worker: Worker) -> None:
    do_steps(worker, 10)
    assert kinds(feed(worker, ev.StepWanted())) == ["ReportDone"]
    assert not worker.is_ready
    released = Release(why="", generation=1)
    assert kinds(feed(worker, released, ev.Ordered())) == ["Release"]


def test_a_rank_that_is_done_takes_part_in_a_recovery(worker: Worker) -> None:
    do_steps(worker, 10)
    feed(worker, ev.StepWanted(), Release(why="", generation=1), stop(2))
    assert kinds(feed(worker, ev.Ordered())) == ["ReportStatus"]


@pytest.mark.parametrize(("cap", "last", "goal"), [(0, None, 10), (4, None, 4), (0, 3, 3), (4, 6, 4)])
def test_the_goal_is_the_nearest_end(worker: Worker, cap: int, last: int | None, goal: int) -> None:
    worker.cap, worker.last = cap, last
    assert worker.goal == goal


def test_winding_down_is_said_at_the_next_barrier(worker: Worker) -> None:
    feed(worker, WindDown(why="", generation=1))
    assert worker.winding_down
    assert worker.state is State.OUTSIDE


@pytest.mark.parametrize(
    ("version", "every", "first", "compares"),
    [(1, 0, True, True), (1, 0, False, False), (2, 0, True, False), (2, 2, True, True), (3, 2, True, False)],
)
def test_states_are_compared_in_the_second_step_and_as_asked(
    worker: Worker, version: int, every: int, first: bool, compares: bool
) -> None:
    do_steps(worker, version)
    assert worker.compares(every, first=first) is compares


def test_after_a_recovery_the_second_step_is_not_the_jobs_second(worker: Worker) -> None:
    worker.generation, worker.began = 3, 5
    worker.version = 6
    assert not worker.compares(0, first=True)


# --- orders -------------------------------------------------------------------------------------------------------
def test_only_a_newer_stop_closes_the_generation(worker: Worker) -> None:
    assert kinds(feed(worker, stop(2))) == ["CloseGeneration"]
    assert feed(worker, stop(2)) == ()
    assert feed(worker, stop(1)) == ()
    assert worker.newest == 2


def test_orders_older_than_the_newest_stop_are_not_kept(worker: Worker) -> None:
    feed(worker, stop(3), restore(2, 0), resume(2))
    assert worker.order_of(Restore, 2) is None
    assert worker.order_of(Resume, 2) is None


def test_a_broken_collective_is_reported_unless_stop_explains_it(worker: Worker) -> None:
    enter_step(worker)
    assert kinds(feed(worker, ev.CollectiveBroke())) == ["ReportBrokenCollective"]
    assert feed(worker, stop(2), ev.CollectiveBroke()) == ()


# --- Stop to Restore ----------------------------------------------------------------------------------------------
def test_a_prepared_rank_finishes_its_step_if_that_is_decided(worker: Worker) -> None:
    reach_barrier(worker)
    assert kinds(feed(worker, stop(2), ev.Interrupted())) == ["ReportStatus"]
    assert worker.status().prepared == 0
    assert kinds(feed(worker, restore(2, 1), ev.Ordered())) == ["FinishStep", "ConfirmVersion", "BeginWrite"]
    feed(worker, ev.StepFinished("next"))
    assert "AwaitGroups" in kinds(feed(worker, ev.StepWanted()))


def test_a_prepared_rank_that_goes_back_undoes_its_writes_before_it_offers(worker: Worker) -> None:
    reach_barrier(worker)
    feed(worker, stop(2), ev.Interrupted())
    assert feed(worker, restore(2, 0, (2,)), ev.Ordered()) == ()
    assert worker.state is State.ORDERED
    found = kinds(feed(worker, ev.StepLeft()))
    assert found == ["LeaveGroups", "BeginForming", "AwaitCopies", "RollBack", "Offer", "AwaitGroups"]


def test_a_rank_that_has_left_its_step_cannot_finish_it(worker: Worker) -> None:
    reach_barrier(worker)
    feed(worker, stop(2), ev.StepLeft())
    assert worker.status().prepared == -1


def test_an_interruption_after_the_barrier_tears_the_state(worker: Worker) -> None:
    reach_barrier(worker)
    feed(worker, ev.BarrierPassed(), stop(2), ev.StepLeft())
    assert worker.status().torn
    assert kinds(feed(worker, restore(2, 0), ev.Ordered(), ev.StepLeft()))[-1] == "ReportRestoreFailure"


def test_an_interruption_before_the_barrier_does_not(worker: Worker) -> None:
    enter_step(worker)
    feed(worker, stop(2), ev.StepLeft())
    assert worker.is_intact


def test_a_commit_after_the_barrier_leaves_nothing_torn(worker: Worker) -> None:
    do_steps(worker, 1)
    feed(worker, stop(2), ev.StepWanted())
    assert worker.is_intact


def test_a_newer_stop_makes_a_parked_rank_report_again(worker: Worker) -> None:
    feed(worker, stop(2), ev.StepWanted())
    assert kinds(feed(worker, stop(3), ev.Ordered())) == ["ReportStatus"]
    assert worker.status().generation == 3


def test_a_newer_stop_supersedes_a_decision(worker: Worker) -> None:
    feed(worker, stop(2), ev.StepWanted(), restore(2, 0), ev.Ordered(), stop(3))
    assert kinds(feed(worker, ev.StepLeft())) == ["ReportStatus"]
    assert worker.order is None


def test_a_collective_that_was_cut_short_after_the_write_tears_the_state(worker: Worker) -> None:
    reach_barrier(worker)
    assert feed(worker, ev.BarrierPassed(), stop(2), ev.CutShort()) == ()
    feed(worker, ev.StepFinished("next"), ev.StepWanted())
    assert worker.status().torn


def test_a_step_that_is_undone_without_a_failure_is_another_attempt(worker: Worker) -> None:
    enter_step(worker)
    assert feed(worker, ev.StepUndone()) == ()
    assert kinds(feed(worker, ev.StepWanted())) == ["OfferStep"]
    assert (worker.version, worker.attempt) == (0, 1)


# --- a surprise ---------------------------------------------------------------------------------------------------
def commit_surprise(worker: Worker, *before: ev.Event) -> act.Actions:
    reach_barrier(worker)
    return feed(worker, ev.BarrierPassed(), *before, ev.StepFinished("next", "a surprise"))


def test_private_state_is_kept_anew_before_a_surprise_is_committed(worker: Worker) -> None:
    assert kinds(commit_surprise(worker)) == ["KeepPrivateAnew", "Commit"]


def test_the_bits_are_doubted_at_once_if_a_failure_is_known(worker: Worker) -> None:
    assert commit_surprise(worker, stop(2))[-1] == act.Doubt("a surprise")


@pytest.mark.parametrize(("later", "doubted"), [(0, True), (1, False)])
def test_the_bits_are_doubted_if_a_recovery_goes_on_from_the_end_of_a_surprise(
    worker: Worker, later: int, doubted: bool
) -> None:
    """After one more step every rank has committed the surprise, and has kept its private state anew."""
    commit_surprise(worker)
    do_steps(worker, later)
    feed(worker, stop(2), ev.StepWanted())
    found = feed(worker, restore(2, 1 + later), ev.Ordered(), ev.StepLeft())
    assert (act.Doubt("a surprise") in found) is doubted


def test_the_bits_are_not_doubted_if_all_go_back_over_a_surprise(worker: Worker) -> None:
    commit_surprise(worker)
    feed(worker, stop(2), ev.StepWanted())
    found = feed(worker, restore(2, 0, tier=FallbackTier.BUDDY), ev.Ordered(), ev.StepLeft())
    assert "Doubt" not in kinds(found)


@pytest.mark.parametrize(("target", "doubted"), [(1, True), (0, False)])
def test_a_rank_that_is_torn_doubts_the_bits_if_it_goes_on_from_other_ranks(
    worker: Worker, target: int, doubted: bool
) -> None:
    """It takes its private state of the barrier, and those who know more may be lost."""
    reach_barrier(worker)
    feed(worker, ev.BarrierPassed(), stop(2), ev.Interrupted())
    found = kinds(feed(worker, restore(2, target, (1,)), ev.Ordered(), ev.StepLeft()))
    assert ("Doubt" in found) is doubted


def test_a_last_checkpoint_of_a_surprise_is_doubted_before_it_is_written(worker: Worker) -> None:
    commit_surprise(worker)
    found = kinds(feed(worker, stop(2), ev.StepWanted(), save(2, 1), ev.Ordered(), ev.StepLeft()))
    assert found.index("Doubt") < found.index("SavePart")


# --- flipped bits -------------------------------------------------------------------------------------------------
def test_states_that_agree_before_the_barrier_vouch_for_the_next_version(worker: Worker) -> None:
    enter_step(worker)
    feed(worker, ev.StatesAgree())
    assert (worker.status().agreed, worker.status().sound) == (0, 1)


def test_states_that_agree_in_a_handshake_vouch_for_no_later_version(worker: Worker) -> None:
    """A bit that flips after it is in the next gradient."""
    assert (worker.status().agreed, worker.status().sound) == (0, 0)
    feed(stopped(worker), restore(2, 2), ev.Ordered(), ev.StepLeft(), ev.GroupsFormed(), resume(2), ev.Ordered())
    assert (worker.status().agreed, worker.status().sound) == (2, 2)


def test_states_that_differ_are_reported_and_vouch_for_nothing(worker: Worker) -> None:
    do_steps(worker, 1)
    enter_step(worker)
    assert kinds(feed(worker, ev.StatesDiffer())) == ["ReportDifference"]
    assert (worker.status().agreed, worker.status().sound) == (0, 0)


# --- Restore ------------------------------------------------------------------------------------------------------
def stopped(worker: Worker, version: int = 2) -> Worker:
    do_steps(worker, version)
    feed(worker, stop(2), ev.StepWanted())
    return worker


def test_a_rank_at_another_version_than_the_target_fails(worker: Worker) -> None:
    actions = feed(stopped(worker), restore(2, 1), ev.Ordered(), ev.StepLeft())
    assert actions[-1] == act.ReportRestoreFailure("rank 1 is at version 2, not 1")
    assert not worker.is_ready
    feed(worker, stop(3))
    assert worker.is_ready
    assert kinds(feed(worker, ev.Ordered())) == ["ReportStatus"]


def test_a_target_copies_and_is_blank_until_it_has_all() -> None:
    worker = Worker(1, is_standby=True, until=10)
    assign = Assign(why="", process="w4", rank=1, generation=2)
    assert kinds(feed(worker, ev.StandbyWarm(), assign, ev.Ordered())) == ["TakeRank"]
    assert kinds(feed(worker, ev.StepWanted())) == ["ReportStatus"]
    assert worker.status().blank
    assert "Copy" in kinds(feed(worker, restore(2, 3, (1,)), ev.Ordered(), ev.StepLeft()))
    assert worker.status().blank
    assert kinds(feed(worker, ev.StateTaken(3, "three", 10))) == ["ClaimVersion", "AwaitGroups"]
    assert (worker.version, worker.lineage, worker.status().blank) == (3, "three", False)


def test_a_copy_that_failed_leaves_a_rank_blank() -> None:
    worker = Worker(1, is_standby=True, until=10)
    assign = Assign(why="", process="w4", rank=1, generation=2)
    feed(worker, ev.StandbyWarm(), assign, ev.Ordered(), ev.StepWanted(), restore(2, 3, (1,)), ev.Ordered())
    assert feed(worker, ev.StepLeft(), ev.RestoreFailed("gone")) == (act.ReportRestoreFailure("gone"),)
    assert worker.status().blank


# --- Resume -------------------------------------------------------------------------------------------------------
def test_resume_opens_the_generation(worker: Worker) -> None:
    feed(stopped(worker), restore(2, 2), ev.Ordered(), ev.StepLeft())
    assert kinds(feed(worker, ev.GroupsFormed())) == ["ReportRestored"]
    assert not worker.is_ready
    assert kinds(feed(worker, resume(2), ev.Ordered())) == ["OpenGeneration", "AssignBuddies"]
    assert (worker.generation, worker.closed, worker.began, worker.attempt) == (2, False, 2, 1)
    reach_barrier(worker)
    assert kinds(feed(worker, ev.BarrierPassed(), ev.StepFinished("next"))) == ["Commit", "ReportResumed"]


def resumed(worker: Worker, order: Restore) -> act.Actions:
    feed(stopped(worker), order, ev.Ordered(), ev.StepLeft(), ev.GroupsFormed())
    return feed(worker, resume(2), ev.Ordered())


def test_snapshots_that_are_not_trusted_are_discarded_before_training_goes_on(worker: Worker) -> None:
    actions = resumed(worker, msgspec.structs.replace(restore(2, 2), distrust=1))
    assert kinds(actions) == ["OpenGeneration", "DiscardDistrusted", "AssignBuddies"]
    assert actions[1] == act.DiscardDistrusted(1)


def test_steps_that_were_undone_are_further_attempts(worker: Worker) -> None:
    """Versions up to 2 + 1 were begun before: the step to 3 and the one under way then; the next one is new."""
    resumed(worker, msgspec.structs.replace(restore(2, 2), undone=1))
    assert worker.attempt == 1
    do_steps(worker, 1)
    assert worker.attempt == 1
    do_steps(worker, 1)
    assert worker.attempt == 0


def test_a_newer_stop_comes_before_resume(worker: Worker) -> None:
    feed(stopped(worker), restore(2, 2), ev.Ordered(), ev.StepLeft(), ev.GroupsFormed(), resume(2), stop(3))
    assert kinds(feed(worker, ev.Ordered())) == ["ReportStatus"]
    assert worker.closed


# --- fallback tiers -----------------------------------------------------------------------------------------------
def test_a_rank_is_blank_while_it_goes_down(worker: Worker) -> None:
    order = restore(2, 1, tier=FallbackTier.BUDDY)
    found = kinds(feed(stopped(worker), order, ev.Ordered(), ev.StepLeft()))
    assert found[-2:] == ["DiscardUndone", "RecallSnapshot"]
    assert worker.blank
    assert kinds(feed(worker, ev.StateTaken(1, "one", 10))) == ["ClaimVersion", "AwaitGroups"]
    assert worker.is_intact


def test_a_rank_without_its_own_snapshot_asks_another_one(worker: Worker) -> None:
    order = restore(2, 1, tier=FallbackTier.BUDDY)
    feed(stopped(worker), order, ev.Ordered(), ev.StepLeft())
    assert kinds(feed(worker, ev.SnapshotMissing())) == ["FetchSnapshot"]


@pytest.mark.parametrize(("tier", "action"), [(FallbackTier.BUDDY, "FetchSnapshot"), (FallbackTier.CHECKPOINT, "Copy")])
def test_a_target_gets_the_version_from_another_rank(worker: Worker, tier: FallbackTier, action: str) -> None:
    found = kinds(feed(stopped(worker), restore(2, 1, (1,), tier), ev.Ordered(), ev.StepLeft()))
    assert found[-2:] == ["DiscardUndone", action]
    assert worker.blank
    feed(worker, ev.StateTaken(1, "one", 10))
    assert worker.is_intact


@pytest.mark.parametrize("spoilt", ["blank", "torn"])
def test_a_rank_that_holds_nothing_whole_asks_another_one(worker: Worker, spoilt: str) -> None:
    setattr(stopped(worker), spoilt, True)
    feed(worker, restore(2, 2, tier=FallbackTier.BUDDY), ev.Ordered(), ev.StepLeft())
    assert kinds(feed(worker, ev.SnapshotMissing())) == ["FetchSnapshot"]


def test_a_rank_that_had_gone_down_already_stays(worker: Worker) -> None:
    order = restore(2, 2, tier=FallbackTier.BUDDY)
    feed(stopped(worker), order, ev.Ordered(), ev.StepLeft())
    assert kinds(feed(worker, ev.SnapshotMissing())) == ["RollBack", "ClaimVersion", "AwaitGroups"]
    assert worker.is_intact


def test_a_reader_of_a_checkpoint_serves_it(worker: Worker) -> None:
    order = restore(2, 1, (2,), tier=FallbackTier.CHECKPOINT)
    assert kinds(feed(stopped(worker), order, ev.Ordered(), ev.StepLeft()))[-1] == "ReadCheckpoint"
    assert kinds(feed(worker, ev.StateTaken(1, "one", 10))) == ["ClaimVersion", "Offer", "AwaitGroups"]


def test_a_step_that_cannot_be_undone_tears(worker: Worker) -> None:
    enter_step(worker)
    feed(worker, stop(2), ev.StepLeft(can_be_undone=False))
    assert worker.status().torn


# --- winding down -------------------------------------------------------------------------------------------------
def test_the_barrier_says_which_step_is_the_last(worker: Worker) -> None:
    reach_barrier(worker)
    feed(worker, ev.BarrierPassed(winds_down=True), ev.StepFinished(""))
    assert kinds(feed(worker, ev.StepWanted())) == ["ReportDone"]


# --- a last checkpoint --------------------------------------------------------------------------------------------
def test_writes_are_undone_before_they_are_saved(worker: Worker) -> None:
    found = kinds(feed(stopped(worker), save(2, 2), ev.Ordered(), ev.StepLeft()))
    assert found == ["LeaveGroups", "AwaitCopies", "RollBack", "SavePart"]
    assert feed(worker, ev.PartSaved(path="there")) == (act.ReportSaved("there", ""),)


def test_a_rank_that_completes_nothing_reports_nothing(worker: Worker) -> None:
    feed(stopped(worker), save(2, 2), ev.Ordered(), ev.StepLeft())
    assert feed(worker, ev.PartSaved()) == ()
    assert worker.state is State.FAILED


def test_a_torn_rank_writes_without_undoing(worker: Worker) -> None:
    """It is no source of the state, and writes only what it is asked for beside it."""
    reach_barrier(worker)
    feed(worker, ev.BarrierPassed(), stop(2), ev.StepLeft())
    found = kinds(feed(worker, save(2, 0), ev.Ordered(), ev.StepLeft()))
    assert found == ["LeaveGroups", "AwaitCopies", "SavePart"]


def test_a_blank_rank_saves_nothing(worker: Worker) -> None:
    stopped(worker).blank = True
    assert feed(worker, save(2, 2), ev.Ordered(), ev.StepLeft()) == ()
    assert worker.state is State.FAILED


def test_another_version_is_not_saved(worker: Worker) -> None:
    actions = feed(stopped(worker), save(2, 3), ev.Ordered(), ev.StepLeft())
    assert actions[-1] == act.ReportSaved("", "rank 1: it holds version 2, not 3")


def test_a_script_that_failed_is_held_for_a_last_checkpoint_only(worker: Worker) -> None:
    enter_step(worker)
    feed(worker, ev.ScriptFailed(saves=True))
    feed(worker, stop(2), ev.Ordered())
    assert feed(worker, restore(2, 0), ev.Ordered(), ev.StepLeft()) == ()
    assert worker.state is State.FAILED


@pytest.mark.parametrize(("saves", "passed"), [(False, False), (True, True)])
def test_a_script_that_failed_ends(worker: Worker, saves: bool, passed: bool) -> None:
    reach_barrier(worker)
    if passed:
        feed(worker, ev.BarrierPassed())
    feed(worker, ev.ScriptFailed(saves=saves))
    assert worker.state is State.ENDING


def test_a_recovery_comes_before_the_release(worker: Worker) -> None:
    worker.until = worker.version
    feed(worker, ev.StepWanted(), Release(why="", generation=1), stop(2))
    assert kinds(feed(worker, ev.Ordered())) == ["ReportStatus"]
    assert worker.state is State.PARKED


def test_a_script_that_failed_after_its_last_step_ends(worker: Worker) -> None:
    worker.until = 2
    worker.version = 2
    feed(worker, ev.StepWanted(), Release(why="", generation=1), ev.Ordered())
    feed(worker, ev.ScriptFailed(saves=True))
    assert worker.state is State.ENDING


# --- the value ----------------------------------------------------------------------------------------------------
def test_a_copy_is_equal_and_shares_nothing(worker: Worker) -> None:
    twin = worker.copy()
    assert twin == worker
    feed(twin, stop(2))
    feed(twin, restore(2, 0))
    assert twin != worker
    assert Restore not in worker.orders


def test_what_is_not_in_the_table_is_a_mistake(worker: Worker) -> None:
    with pytest.raises(KeyError):
        feed(worker, ev.BarrierPassed())


@pytest.mark.parametrize("state", State)
def test_orders_arrive_in_any_state(worker: Worker, state: State) -> None:
    worker.state = state
    assert kinds(feed(worker, stop(2))) == ["CloseGeneration"]
