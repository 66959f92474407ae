"""Attributes of modules that code between steps changes, of a rank that was lost before it ran that code."""

from collections.abc import Mapping

import pytest
from torch import nn

from relight.training.state.modules.attributes import AttributeLog
from relight.training.state.rank_attributes import RankAttributes

PATH = "net//scale"


class Net(nn.Module):
    """A module with a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = 1.0


class Rank:
    """Attributes of one rank, for which the loop begins steps."""

    def __init__(self) -> None:
        self.net = Net()
        self.log = AttributeLog({"net": self.net})
        self.attributes = RankAttributes(self.log)
        self.version = -1

    def begin(self) -> bool:
        """The loop asks for a step; return whether private state is to be kept again."""
        self.version += 1
        due = self.attributes.see_code(self.version)
        self.log.begin(learning=False)
        return due

    def end(self) -> dict[str, object]:
        """The barrier is passed and the step committed; return what the rank has kept."""
        kept = self.log.private()
        self.attributes.number()
        self.log.commit()
        return kept


@pytest.fixture
def survivor() -> Rank:
    return Rank()


def replace(survivor: Rank, kept: Mapping[str, object]) -> Rank:
    """Return the replacement of a rank that had kept this."""
    replacement = Rank()
    replacement.log.install()
    replacement.log.remove()  # it knows its modules now
    survivor.attributes.see_code(survivor.version + 1)
    replacement.attributes.adopt_copy(survivor.attributes.describe())
    replacement.attributes.take_over(kept)
    return replacement


def step_and_change(rank: Rank, scale: float | None) -> dict[str, object]:
    """Run a step, then code between steps; return what was kept between the two."""
    rank.log.install()
    rank.begin()
    kept = rank.end()
    rank.net.scale = scale
    rank.log.remove()
    return kept


def test_values_that_are_equal_everywhere_are_those_of_another_rank(survivor: Rank) -> None:
    step_and_change(survivor, 2.0)
    kept = step_and_change(survivor, 3.0)
    assert kept == {PATH: 2.0}

    replacement = replace(survivor, kept)

    assert replacement.net.scale == 3.0
    number = replacement.attributes.number()
    assert replacement.attributes.compare(number, 2 * number, 2) is None


def test_values_that_differ_are_the_ranks_own_and_told(survivor: Rank) -> None:
    step_and_change(survivor, 2.0)
    number = survivor.attributes.number()
    survivor.attributes.compare(number, 2 * number + 1, 2)
    kept = {PATH: 2.5}
    step_and_change(survivor, 3.0)

    replacement = replace(survivor, kept)

    assert replacement.net.scale == 2.5
    assert "net//scale" in (replacement.attributes.lost([PATH]) or "")
    assert replacement.attributes.lost(None) is None  # kept again by the rank itself, after that code
    assert replacement.attributes.lost(["net//other"]) is not None  # such code changes it there alone


def test_of_values_that_differ_what_code_between_steps_has_ended_is_ended(survivor: Rank) -> None:
    step_and_change(survivor, 2.0)
    number = survivor.attributes.number()
    survivor.attributes.compare(number, 2 * number + 1, 2)
    step_and_change(survivor, None)

    replacement = replace(survivor, {PATH: 2.5})

    assert replacement.net.scale is None
    assert "net//scale" in (replacement.attributes.lost([PATH]) or "")


def test_values_that_turn_out_to_differ_later_are_told(survivor: Rank) -> None:
    kept = step_and_change(survivor, 2.0)
    assert kept == {}

    replacement = replace(survivor, kept)

    number = replacement.attributes.number()
    assert replacement.attributes.compare(number, 2 * number, 2) is None
    assert replacement.attributes.compare(number, 2 * number + 1, 2) is not None


def test_values_of_another_rank_stay_so_in_the_next_replacement(survivor: Rank) -> None:
    replacement = replace(survivor, step_and_change(survivor, 2.0))
    assert replacement.attributes.is_a_guess

    second = replace(survivor, {PATH: 2.0})  # which the replacement had kept before any barrier
    assert not second.attributes.is_a_guess
    second.attributes.take_over({PATH: 2.0}, guessed=replacement.attributes.is_a_guess)

    number = second.attributes.number()
    assert second.attributes.compare(number, 2 * number + 1, 2) is not None


def test_what_differs_is_kept_again_once_code_between_steps_changes_it(survivor: Rank) -> None:
    step_and_change(survivor, 2.0)
    assert not survivor.begin()  # equal everywhere: another rank has it
    assert survivor.attributes.late_changes.all == [PATH]
    survivor.end()
    survivor.attributes.compare(1, 3, 2)
    step_and_change(survivor, 3.0)

    assert survivor.begin()
    survivor.end()
    assert not survivor.begin()


def test_a_replacement_does_not_take_what_it_has_got_for_changed_by_code_between_steps(survivor: Rank) -> None:
    survivor.attributes.compare(1, 3, 2)
    kept = step_and_change(survivor, 2.0)

    replacement = replace(survivor, {PATH: 2.5, **kept})
    replacement.begin()

    assert replacement.attributes.late_changes.describe() == survivor.attributes.late_changes.describe()


def test_a_step_that_is_undone_after_its_barrier_changed_nothing_between_steps(survivor: Rank) -> None:
    survivor.log.install()
    survivor.begin()
    survivor.net.scale = 2.0
    survivor.end()
    survivor.begin()
    survivor.net.scale = 3.0
    survivor.attributes.number()
    survivor.attributes.roll_back()
    survivor.log.roll_back()
    survivor.begin()

    assert survivor.net.scale == 2.0
    assert survivor.attributes.late_changes.all == []
    survivor.log.remove()


def test_what_no_step_of_a_lost_rank_had_changed_is_as_it_was_at_first(survivor: Rank) -> None:
    """Other ranks' steps had: a layer that counts what it skips by chance."""
    survivor.log.install()
    survivor.begin()
    survivor.net.scale = 2.0
    survivor.log.notice()
    number = survivor.attributes.number()
    survivor.attributes.compare(number, number, ranks=2)  # the lost one had nothing to compare
    survivor.log.commit()
    survivor.log.remove()

    replacement = replace(survivor, {})

    assert replacement.net.scale == 1.0
    number = replacement.attributes.number()
    assert replacement.attributes.compare(number, 1, ranks=2) is None
