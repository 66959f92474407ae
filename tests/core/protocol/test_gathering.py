"""Reports of a host's ranks wait for each other, and for nothing else."""

from collections.abc import Sequence

import pytest

from relight.core.protocol import events as ev
from relight.core.protocol.gathering import MAX_GATHERED, Gathering, subject

STOPPED = ("Stopped", 2)
RESTORED = ("Restored", 2)


def stopped(generation: int) -> ev.Stopped:
    return ev.Stopped(
        process="w0",
        rank=0,
        generation=generation,
        step=0,
        version=0,
        lineage="",
        prepared=-1,
        torn=False,
        blank=False,
        stop_seconds=0.0,
        restore_address="",
    )


def say(gathering: Gathering[str], names: Sequence[str], expected: Sequence[str]) -> list[bool]:
    return [gathering.add(name, STOPPED, name, expected) for name in names]


def test_the_last_one_that_is_expected_lets_all_go() -> None:
    gathering: Gathering[str] = Gathering()
    assert say(gathering, ("b", "a", "c"), ("a", "b", "c")) == [False, False, True]
    assert gathering.take() == ["b", "a", "c"], "in the order in which they were said"
    assert gathering.take() == []
    assert len(gathering) == 0


def test_who_has_gone_ahead_is_not_waited_for_again() -> None:
    """Something else was said in between, so the first two could not wait."""
    gathering: Gathering[str] = Gathering()
    say(gathering, ("a", "b"), ("a", "b", "c", "d"))
    assert gathering.take() == ["a", "b"]
    assert say(gathering, ("c", "d"), ("a", "b", "c", "d")) == [False, True]


def test_who_is_not_expected_any_more_is_not_waited_for() -> None:
    gathering: Gathering[str] = Gathering()
    assert say(gathering, ("a",), ("a", "dead")) == [False]
    assert say(gathering, ("b",), ("a", "b")) == [True]


def test_another_generation_or_another_kind_does_not_join() -> None:
    gathering: Gathering[str] = Gathering()
    say(gathering, ("a",), ("a", "b"))
    assert gathering.joins(STOPPED)
    assert not gathering.joins(RESTORED)
    assert not gathering.joins(("Stopped", 3))
    gathering.take()
    assert gathering.add("a", RESTORED, "a", ("a", "b")) is False, "what it has said of another thing does not count"
    assert gathering.add("b", RESTORED, "b", ("a", "b")) is True


def test_a_message_does_not_grow_without_bound() -> None:
    gathering: Gathering[str] = Gathering()
    names = [f"w{number}" for number in range(MAX_GATHERED + 1)]
    assert say(gathering, names[:MAX_GATHERED], names) == [False] * (MAX_GATHERED - 1) + [True]


@pytest.mark.parametrize("generation", [2, 7])
def test_only_what_every_rank_says_once_in_a_generation_waits(generation: int) -> None:
    assert subject(stopped(generation)) == ("Stopped", generation)
    assert subject(ev.WorkerReleased(process="w0")) is None
    broken = ev.CollectiveFailed(process="w0", rank=0, generation=generation, step=1, summary="reset", noticed_ns=1)
    assert subject(broken) is None, "it says that something is wrong: the controller's patience begins with it"
