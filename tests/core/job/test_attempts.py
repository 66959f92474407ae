"""Attempts to replace a rank that fail one after the other: the job goes on, and tries less and less often."""

from collections.abc import Callable

import pytest

from relight.core.controller import Stage
from relight.core.job.breaker import MAX_OWN_FAILURES_PER_STEP
from relight.core.membership.backoff import Backoff, pause_seconds
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Restore, Spawn, Stop
from relight.core.protocol.position import Phase, Position
from tests.core.test_controller import Desk, kinds, one

PAUSES = [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def next_start(desk: Desk, version: int = 4) -> str:
    """Rank 0 pauses where it has to; wait until a process without a rank is there; its name."""
    if desk.controller.stage is Stage.STOPPING and "w0" not in desk.controller.job.attempt.stopped:
        desk.stands("w0", version)
    while not desk.controller.members.standbys():
        assert desk.now < 10_000.0, "no process is started any more"
        desk.look()
    return desk.controller.members.standbys()[-1].name


def pauses(desk: Desk, lose: Callable[[str], object], times: int) -> list[float]:
    """Return the pauses between the loss of a process and the start of the next one, for so many losses."""
    found = []
    for _ in range(times):
        process = next_start(desk)
        lose(process)
        lost_at = desk.now
        next_start(desk)
        found.append(round(desk.now - lost_at, 3))
    return found


def holder(desk: Desk) -> str:
    return desk.controller.rank_processes()[1]


def replace(desk: Desk, version: int, *, commits: bool = True) -> None:
    """Rank 1's next process gets warm, takes the rank, and is restored."""
    desk.warm(next_start(desk, version))
    desk.all_stand(version)
    while desk.controller.stage is Stage.STOPPING:
        assert desk.now < 10_000.0, "it is not decided"
        desk.look()
    for process in desk.controller.rank_processes().values():
        desk.restores(process, version)
    for process in desk.controller.rank_processes().values() if commits else ():
        desk.commits(process, version)
    assert desk.controller.stage is Stage.TRAINING, desk.said


def test_pauses_double_up_to_a_minute() -> None:
    assert [pause_seconds(failed) for failed in range(1, 11)] == PAUSES
    assert pause_seconds(10_000) == 60.0


def test_attempts_that_were_under_way_at_the_last_failure_do_not_count() -> None:
    backoff = Backoff()
    assert backoff.fail(0.0, 10.0)
    assert not backoff.fail(9.0, 11.0)
    assert backoff.fail(10.0, 12.0)
    assert backoff.failed == 2
    backoff.succeed()
    assert backoff.fail(0.0, 13.0)
    assert backoff.failed == 1


# --- processes that are lost ----------------------------------------------------------------------------------------
def test_replacements_that_are_killed_while_they_start() -> None:
    desk = Desk().train()
    desk.exits("w1", step=4)
    desk.stands("w0", 4)
    assert pauses(desk, desk.exits, 10) == PAUSES
    desk.exits(next_start(desk))
    said = desk.controller.waiting(desk.now)
    assert said.startswith(
        "11 attempts in a row have failed; the next one to start a replacement of rank 1 begins in 60"
    )
    assert "the first failed " in said
    assert "s ago; the last: standby w" in said
    assert said.endswith("; --max-failed-attempts N would end that)")
    replace(desk, 4)
    assert desk.controller.waiting(desk.now) == ""


def test_the_out_of_memory_killer_strikes_from_outside() -> None:
    """In the same step again and again: the process that took the memory may give it back."""
    desk = Desk().train()
    for _ in range(4):
        desk.exits(holder(desk), step=4, evidence="was killed by SIGKILL (the out-of-memory killer struck 1 time(s))")
        replace(desk, 4, commits=False)
    assert desk.controller.ended is None
    assert {failure.kind for failure in desk.controller.report().failures} == {"out of memory"}


def test_a_series_without_end_is_told_again_about_once_an_hour() -> None:
    desk = Desk().train()
    desk.exits("w1", step=4)
    desk.stands("w0", 4)
    for _ in range(125):
        desk.exits(next_start(desk))
    said = [notice for notice in desk.controller.report().notices if "attempts in a row" in notice]
    assert [notice.split()[0] for notice in said] == ["3", "60", "120"]


@pytest.mark.parametrize("kind", ["frozen", "hang"])
def test_replacements_that_are_frozen_while_they_start(kind: str) -> None:
    desk = Desk().train()
    desk.exits("w1", step=4)
    desk.stands("w0", 4)
    assert pauses(desk, lambda process: desk.suspect(process, kind), 10) == PAUSES


def test_standbys_that_are_killed_while_all_train() -> None:
    desk = Desk(standbys=1).train()
    assert pauses(desk, desk.exits, 10) == PAUSES
    said = [notice for notice in desk.controller.report().notices if "attempts in a row" in notice]
    assert len(said) == 1, said
    assert said[0].startswith("3 attempts in a row to start or restore a process have failed within ")
    assert "(the last: standby w4 was" in said[0]
    assert desk.controller.stage is Stage.TRAINING


def test_replacements_that_are_killed_in_every_stage() -> None:
    """While they start, while they are restored, in their first step, sixty in a row."""
    desk = Desk().train()
    desk.exits("w1", step=4)
    desk.stands("w0", 4)
    for _ in range(20):
        desk.exits(next_start(desk))
        desk.warm(next_start(desk))
        desk.all_stand(4)
        desk.exits(holder(desk))
        replace(desk, 4, commits=False)
        desk.exits(holder(desk), step=4)
    assert desk.controller.ended is None
    before = desk.now
    next_start(desk)
    assert round(desk.now - before) == 60
    replace(desk, 4)


def test_a_step_that_all_have_committed_forgives_what_was_lost_before() -> None:
    desk = Desk().train()
    desk.exits("w1", step=4)
    desk.stands("w0", 4)
    for _ in range(5):
        desk.exits(next_start(desk))
    replace(desk, 4)
    assert Spawn in kinds(desk.exits(holder(desk), step=5))
    desk.stands("w0", 5)
    assert pauses(desk, desk.exits, 3) == PAUSES[:3]


def test_a_step_that_some_have_committed_forgives_nothing() -> None:
    desk = Desk().train()
    desk.exits("w1", step=4)
    desk.stands("w0", 4)
    for _ in range(2):
        desk.exits(next_start(desk))
    replace(desk, 4, commits=False)
    desk.commits("w0", 4)
    assert Spawn not in kinds(desk.exits(holder(desk), step=4))


def test_a_rank_that_was_long_there_counts_for_nothing() -> None:
    desk = Desk().train()
    for version in range(10):
        assert Stop in kinds(desk.exits(holder(desk), step=version))
        replace(desk, version)
    assert "attempts in a row" not in str(desk.controller.report().notices)


def test_processes_that_are_lost_together_are_one_attempt() -> None:
    desk = Desk(world_size=8).train()
    for rank in range(1, 8):
        desk.exits(f"w{rank}")
    desk.stands("w0", 4)
    for _ in range(2):
        for process in desk.controller.members.standbys():
            assert kinds(desk.exits(process.name)) == [Spawn]  # each has a successor at once
    assert "attempts in a row" not in str(desk.controller.report().notices)


def test_the_limit_of_who_sets_one() -> None:
    desk = Desk(max_failed_attempts=3).train()
    desk.exits("w1", step=4)
    desk.stands("w0", 4)
    for _ in range(3):
        desk.exits(next_start(desk))
    assert desk.end().error == (
        "3 attempts in a row to start or restore a process have failed (--max-failed-attempts 3) before one could take "
        "rank 1: was killed by SIGKILL"
    )


def test_the_limit_counts_replacements_in_their_first_step_too() -> None:
    desk = Desk(max_failed_attempts=2).train()
    desk.exits("w1", step=4)
    for _ in range(2):
        replace(desk, 4, commits=False)
        desk.exits(holder(desk), step=4)
    assert "2 attempts in a row" in desk.end().error
    assert desk.end().error.endswith("last: rank 1: was killed by SIGKILL")


def test_a_controller_that_is_restarted_waits_for_what_was_left_of_the_pause() -> None:
    """Its journal has all that happened; what it does next it does when the dead one would have."""
    desk = Desk().train()
    desk.exits("w1", step=4)
    desk.stands("w0", 4)
    for _ in range(5):
        desk.exits(next_start(desk))
    lost_at = desk.now
    desk.wait(1.5)
    desk.tell(ev.ControllerRestarted())
    desk.stands("w0", 4)
    next_start(desk)
    assert round(desk.now - lost_at, 3) == 4.0


# --- restores that fail ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("limit", [None, 6])
def test_a_failed_restore_without_a_death_is_tried_again_and_less_and_less_often(limit: int | None) -> None:
    desk = Desk(standbys=1, max_failed_attempts=limit).train()
    desk.exits("w1", step=4)
    waited = []
    for count in range(11):
        since = desk.now
        desk.all_stand(4)
        while desk.controller.stage is not Stage.RESTORING:
            desk.look()
        waited.append(round(desk.now - since))
        generation = desk.controller.generation
        assert desk.tell(ev.RestoreFailed(process="w2", generation=generation, evidence="torn")) == ()
        desk.expire()
        if count + 1 == limit:
            assert "6 attempts in a row" in desk.end().error
            assert desk.end().error.endswith("last: restoring: torn")
            return
        assert one(desk.said, Stop).generation == generation + 1
    assert waited == [0, *map(round, PAUSES)]


# --- one step that fails again and again ------------------------------------------------------------------------------
def test_deaths_from_outside_have_no_limit_at_one_step() -> None:
    desk = Desk().train()
    for _ in range(3 * MAX_OWN_FAILURES_PER_STEP):
        desk.exits(holder(desk), step=4)
        replace(desk, 4)
    assert desk.controller.job_stats.failures.count == 3 * MAX_OWN_FAILURES_PER_STEP


def test_the_script_s_own_failures_have_one() -> None:
    desk = Desk().train()
    for count in range(MAX_OWN_FAILURES_PER_STEP + 1):
        process = holder(desk)
        desk.raises(process, f"ValueError: {count}", step=4)
        if count < MAX_OWN_FAILURES_PER_STEP:
            desk.exits(process, 1, step=4)
            replace(desk, 4)
    assert desk.end().error.startswith("step 4 failed 11 times")


def test_a_rank_that_dies_between_two_steps_has_tried_the_next_one() -> None:
    """So a fault that is planned for this place strikes once, not again in the replacement."""
    desk = Desk(world_size=3, standbys=1).train()
    between = Position(step=4, version=4, phase=Phase.OUTSIDE, private_versions=(4, -1))
    desk.tell(ev.ProcessExited(process="w0", exit_status=0, evidence="left", position=between, noticed_ns=1))
    for process in desk.controller.rank_processes().values():
        desk.stands(process, 4, step=3)
    (restore,) = [command for command in desk.said if isinstance(command, Restore)]
    assert (restore.target, restore.attempt) == (4, 1)
