"""Agents and controllers that have ended, and those that follow them."""

from itertools import pairwise

from relight.launch.children.restart_policy import (
    MAX_OWN_ENDS,
    MAX_SHORT_LIVES,
    MINUTE_SECONDS,
    SHORT_LIFE_SECONDS,
    RestartPolicy,
)

KILLED, FAILED = -9, 1


def test_one_that_cannot_be_started_is_given_up() -> None:
    policy = RestartPolicy(20.0)
    for number in range(MAX_SHORT_LIVES):
        assert not policy.why_given_up
        policy.note(FAILED, now=100.0 * number, lived_seconds=0.1)
    assert "at its start" in policy.why_given_up


def test_one_that_has_lived_is_followed_by_another() -> None:
    policy = RestartPolicy(20.0)
    policy.note(FAILED, now=0.0, lived_seconds=SHORT_LIFE_SECONDS)
    for number in range(1, 2 * MAX_SHORT_LIVES):
        policy.note(FAILED, now=100.0 * number, lived_seconds=0.1)
    assert not policy.why_given_up


def test_one_that_keeps_ending_by_itself_is_given_up() -> None:
    policy = RestartPolicy(20.0)
    for number in range(MAX_OWN_ENDS):
        assert not policy.why_given_up
        policy.note(FAILED, now=MINUTE_SECONDS / MAX_OWN_ENDS * number, lived_seconds=SHORT_LIFE_SECONDS)
    assert "within a minute" in policy.why_given_up


def test_killed_ones_are_followed_by_another_later_and_later() -> None:
    policy = RestartPolicy(20.0)
    pauses = []
    for number in range(100):
        policy.note(KILLED, now=0.1 * number, lived_seconds=0.05)
        pauses.append(policy.pause_seconds)
    assert not policy.why_given_up
    assert all(earlier <= later for earlier, later in pairwise(pauses))
    assert (pauses[0], pauses[-1]) == (0.0, 20.0)
    policy.note(KILLED, now=1000.0, lived_seconds=0.05)
    assert policy.pause_seconds == 0.0
    assert policy.when == ""
