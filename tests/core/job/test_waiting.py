"""Descriptions of what a job that does not train waits for: of each stage, from the facts that make it wait."""

import pytest

from relight.core.controller import Stage
from relight.core.job import waiting
from relight.core.membership.backoff import Backoff
from relight.core.membership.members import Members
from tests.core.membership.test_hosts import join
from tests.core.test_controller import Desk


def said(desk: Desk, seconds: float = 0.0) -> str:
    return desk.controller.waiting(desk.now + seconds)


def test_a_job_in_training_waits_for_nothing() -> None:
    assert said(Desk(standbys=1).train()) == ""


def test_missing_hosts_come_before_ranks() -> None:
    desk = Desk(world_size=6, nodes=3, slots=2)
    assert said(desk) == "waiting for 2 hosts to join"
    join(desk, "node-1")
    assert said(desk) == "waiting for 1 host to join"


def test_ranks_that_have_not_reached_their_first_step_are_named() -> None:
    desk = Desk(world_size=3)
    desk.started()
    assert said(desk, 7.0).startswith("waiting for ranks 0, 1, 2 to reach the first step, for 7 s")
    desk.enters("w0", 0)
    desk.enters("w2", 2)
    assert said(desk).startswith("waiting for rank 1 to reach the first step")


def test_of_many_ranks_some_are_named() -> None:
    assert said(Desk(world_size=6)).startswith("waiting for 6 ranks (0, 1, 2, 3, ...) to reach the first step")


def test_ranks_that_have_not_paused_are_named() -> None:
    desk = Desk(world_size=3, standbys=1).train()
    desk.exits("w2")
    assert said(desk, 2.0) == "waiting for ranks 0, 1, 2 to pause, for 2.0 s"
    desk.stands("w0")
    desk.stands("w3")
    assert said(desk).startswith("waiting for rank 1 to pause")


def test_a_process_that_is_not_known_dead_is_named() -> None:
    desk = Desk(standbys=1).train()
    desk.suspect("w1")
    assert said(desk) == "waiting until the failed process of rank 1 has certainly ended"


@pytest.mark.parametrize(
    ("standbys", "starts", "words"),
    [
        (0, False, "no standby was left; a process was ordered from node-0 5 s ago"),
        (0, True, "no standby was left; process 1 on node-0 has been starting for 5 s"),
    ],
)
def test_a_vacant_rank_says_what_will_take_it(standbys: int, starts: bool, words: str) -> None:
    desk = Desk(standbys=standbys).train()
    desk.exits("w1")
    if starts:
        desk.started()
    text = said(desk, 5.0)
    assert text.startswith("waiting for a replacement of rank 1: ")
    assert words in text


def test_a_standby_that_is_not_warm_is_waited_for() -> None:
    desk = Desk(standbys=1)
    desk.started()
    desk.enters("w0", 0)
    desk.enters("w1", 1)
    desk.exits("w1")
    assert "the standby was not warm yet; process 1 on node-0 has been starting for" in said(desk)


def test_without_room_for_a_process_that_is_said() -> None:
    members = Members()
    members.add("node-0", 0, 0, 0.0)
    assert (
        waiting.to_decide(members, (), 2, 1.0) == "waiting for a replacement of rank 1: no host has room for a process"
    )


def test_ranks_that_do_not_hold_the_version_are_named() -> None:
    desk = Desk(standbys=1).train()
    desk.exits("w1")
    desk.all_stand()
    assert desk.controller.stage is Stage.RESTORING
    assert said(desk, 3.0) == "waiting for ranks 0, 1 to hold the agreed version, for 3.0 s"
    desk.restores("w0")
    assert said(desk).startswith("waiting for rank 1 to hold the agreed version")


def test_scripts_that_run_to_their_ends_are_named() -> None:
    desk = Desk().train().finish()
    assert said(desk) == "waiting for the script of ranks 0, 1 to end"
    desk.exits("w0", 0)
    assert said(desk) == "waiting for the script of rank 1 to end"


@pytest.mark.parametrize(
    ("limit", "ends"), [(None, "--max-failed-attempts N would end that"), (5, "--max-failed-attempts 5")]
)
def test_a_pause_between_attempts_says_since_when_and_what_would_end_it(limit: int | None, ends: str) -> None:
    members, backoff = Members(), Backoff()
    members.add("node-0", 0, 0, 0.0)
    for at in (10.0, 20.0, 30.0):
        backoff.fail(at, at, "it was killed")
    text = waiting.for_next_attempt(members, 2, backoff, limit, 30.0)
    assert text == (
        "3 attempts in a row have failed; the next one to start a replacement of rank 1 begins in 1 s "
        f"(the first failed 20 s ago; the last: it was killed; {ends})"
    )
    assert "restore the replacements" in waiting.for_next_attempt(members, 1, backoff, limit, 30.0)
