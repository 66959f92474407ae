"""The place of the barrier, learnt by several ranks from the same sums."""

from relight.core.worker.pattern import AGREEMENTS, AGREEMENTS_OF_SEVERAL, Learner, Pattern, observed

ONE = observed(["opt"], 0)
LOGGED = observed(["opt"], 1)
GAN = observed(["d", "g"], 1)
LAZY = observed(["d", "d", "g"], 2)
OPEN = observed(["opt"], 0, more_expected=True)


def barrier(ranks: list[Learner], seen: list[Pattern]) -> list[Learner]:
    """One passed barrier of all ranks."""
    total = sum(rank.number(pattern) for rank, pattern in zip(ranks, seen, strict=True))
    return [rank.count(pattern, total, len(ranks)) for rank, pattern in zip(ranks, seen, strict=True)]


def train(ranks: list[Learner], *steps: Pattern) -> list[Learner]:
    for pattern in steps:
        ranks = barrier(ranks, [pattern if rank.learnt is None else rank.learnt for rank in ranks])
    return ranks


def learnt(ranks: list[Learner]) -> set[Pattern | None]:
    return {rank.learnt for rank in ranks}


def test_one_write_is_learnt_soon_and_several_late() -> None:
    assert learnt(train([Learner()] * 3, *[ONE] * (AGREEMENTS - 1))) == {None}
    assert learnt(train([Learner()] * 3, *[ONE] * AGREEMENTS)) == {ONE}
    assert learnt(train([Learner()] * 3, *[GAN] * (AGREEMENTS_OF_SEVERAL - 1))) == {None}
    assert learnt(train([Learner()] * 3, *[GAN] * AGREEMENTS_OF_SEVERAL)) == {GAN}


def test_what_only_the_first_steps_do_is_no_difference() -> None:
    """A value that is set after the first write, for instance; or an optimizer that is still to come."""
    assert learnt(train([Learner()] * 2, LOGGED, ONE, ONE)) == {ONE}
    assert learnt(train([Learner()] * 2, OPEN, OPEN, ONE, ONE)) == {ONE}
    assert learnt(train([Learner()] * 2, Pattern(), ONE, Pattern(), ONE, ONE)) == {ONE}


def test_steps_that_differ_are_never_believed_again() -> None:
    for steps in ([GAN, LAZY], [ONE, GAN], [GAN, ONE], [ONE, LOGGED]):
        ranks = train([Learner()] * 2, *steps, *[ONE] * 200)
        assert learnt(ranks) == {None}, steps
        assert learnt(train([rank.anew() for rank in ranks], *[ONE] * 200)) == {None}, steps


def test_after_a_step_of_several_writes_one_write_is_not_believed_soon() -> None:
    """A critic that is trained five times as often: the generator's step logs something at its end."""
    logged = observed(["d", "g"], 2)
    ranks = train([Learner()] * 2, logged, ONE, ONE, ONE, ONE)
    assert learnt(ranks) == {None}
    assert learnt(train(ranks, logged, *[ONE] * 200)) == {None}


def test_a_surprise_of_one_rank_is_told_at_the_next_barrier() -> None:
    ranks = train([Learner()] * 3, ONE, ONE)
    ranks[1] = ranks[1].surprised(everywhere=False)
    assert learnt(ranks) == {ONE}  # ranks of different form would wait for each other in different places
    ranks = barrier(ranks, [ONE] * 3)
    assert learnt(ranks) == {None}
    assert all(rank.differs for rank in ranks)


def test_a_surprise_of_all_ranks_is_forgotten_at_once() -> None:
    ranks = [rank.surprised(everywhere=True) for rank in train([Learner()] * 3, ONE, ONE)]
    assert learnt(ranks) == {None}
    assert learnt(train(ranks, *[ONE] * 200)) == {None}


def test_a_replacement_is_told() -> None:
    ranks = train([Learner()] * 2, GAN, LAZY)
    ranks = train([ranks[0].anew(), Learner()], ONE)
    assert ranks[1].differs
    assert learnt(train([Learner(), ranks[1].anew()], *[ONE] * 200)) == {None}


def test_a_replacement_hears_of_a_difference_in_the_barrier_that_shows_it() -> None:
    """It may learn its first pattern in that very barrier, from which the others know that it does not hold."""
    survivor = train([Learner()] * 2, GAN)[0].anew()
    assert all(rank.differs for rank in train([survivor, Learner(agreements=1)], ONE))


def test_a_replacement_is_told_that_steps_may_write_several_times() -> None:
    """It has seen one write alone, and would believe that sooner than the others."""
    survivor = train([Learner()] * 2, observed(["d", "g"], 2))[0].anew()
    assert learnt(train([survivor, Learner()], *[ONE] * AGREEMENTS)) == {None}
    assert learnt(train([survivor, Learner()], *[ONE] * AGREEMENTS_OF_SEVERAL)) == {ONE}


def test_ranks_that_disagree_learn_nothing() -> None:
    ranks = [Learner()] * 2
    for _ in range(5):
        ranks = barrier(ranks, [ONE, LOGGED])
        assert learnt(ranks) == {None}


def test_many_ranks_that_know_of_a_difference_are_told_from_other_patterns() -> None:
    count = 2**14 - 1
    ranks = [Learner(differs=True)] * (count - 1)
    assert not barrier([*ranks, Learner()], [ONE] * count)[-1].learnt
    assert barrier([*ranks, Learner()], [ONE] * count)[-1].differs
    calm = barrier([Learner()] * count, [GAN] * count)
    assert not any(rank.differs for rank in calm)
    assert all(rank.has_several for rank in calm)
    assert not any(rank.has_several for rank in barrier([Learner()] * count, [LOGGED] * count))
    assert count * ranks[0].number(LAZY) < 2**63
