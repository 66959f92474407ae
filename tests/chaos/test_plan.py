"""Sentences and faults are two spellings of one thing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.chaos.plan import (
    ACTION_WORDS,
    EXAMPLES,
    POINT_WORDS,
    check_fault,
    describe_fault,
    parse_fault,
    planned_for_standby,
    planned_in_recovery,
    planned_in_step,
    random_fault,
)
from relight.core.protocol.fault import RECOVERY_POINTS, STEP_POINTS, Action, Fault, Plan, Point
from relight.errors import UsageError

actions = st.sampled_from(Action)
numbers = st.integers(min_value=0, max_value=10**6)
in_steps = st.builds(
    Fault, action=actions, point=st.sampled_from(sorted(STEP_POINTS)), rank=numbers, step=numbers, attempt=numbers
)
in_recoveries = st.builds(
    Fault,
    action=actions,
    point=st.sampled_from(sorted(RECOVERY_POINTS)),
    rank=st.none() | numbers,
    recovery=st.integers(min_value=1, max_value=10**6),
)
of_standbys = st.builds(Fault, action=actions, point=st.sampled_from((Point.IDLE, Point.WARMUP)), standby=numbers)
faults = in_steps | in_recoveries | of_standbys


@given(faults)
def test_a_described_fault_is_parsed_back(fault: Fault) -> None:
    assert parse_fault(describe_fault(fault)) == fault


@given(faults, st.sampled_from(["  ", "\t", "\n"]))
def test_white_space_and_case_of_the_action_do_not_matter(fault: Fault, space: str) -> None:
    first, rest = describe_fault(fault).split(" ", 1)
    assert parse_fault(f" {first.upper()} {rest}".replace(" ", space)) == fault


@given(st.text())
def test_any_text_is_a_fault_or_one_clear_error(text: str) -> None:
    try:
        fault = parse_fault(text)
    except UsageError:
        return
    assert parse_fault(describe_fault(fault)) == fault


@pytest.mark.parametrize(
    ("sentence", "fault"),
    [
        (
            "kill rank 2 in BACKWARD of step 13",
            Fault(action=Action.KILL, point=Point.BACKWARD, rank=2, step=13),
        ),
        (
            "raise in rank 0 in forward of step 5 attempt 1",
            Fault(action=Action.RAISE, point=Point.FORWARD, rank=0, step=5, attempt=1),
        ),
        (
            "raise rank 0 in FORWARD of step 5",
            Fault(action=Action.RAISE, point=Point.FORWARD, rank=0, step=5),
        ),
        (
            "exit rank 0 between steps at step 7",
            Fault(action=Action.EXIT, point=Point.BETWEEN_STEPS, rank=0, step=7),
        ),
        ("segfault rank 1 after step 7", Fault(action=Action.SEGFAULT, point=Point.AFTER_STEP, rank=1, step=7)),
        (
            "kill the restore source during the next restore",
            Fault(action=Action.KILL, point=Point.RESTORE_SEND, recovery=1),
        ),
        (
            "kill the restore source during restore 3",
            Fault(action=Action.KILL, point=Point.RESTORE_SEND, recovery=3),
        ),
        (
            "block the restore target during restore 2",
            Fault(action=Action.BLOCK, point=Point.RESTORE_RECEIVE, recovery=2),
        ),
        (
            "kill the replacement when promoted in recovery 1",
            Fault(action=Action.KILL, point=Point.PROMOTED, recovery=1),
        ),
        ("kill standby 0 when idle", Fault(action=Action.KILL, point=Point.IDLE, standby=0)),
        ("kill standby 0 in warmup", Fault(action=Action.KILL, point=Point.WARMUP, standby=0)),
        ("freeze rank 1 in STOP of recovery 2", Fault(action=Action.FREEZE, point=Point.STOP, rank=1, recovery=2)),
        ("cut any rank in REFORM of recovery 1", Fault(action=Action.CUT, point=Point.REFORM, recovery=1)),
    ],
)
def test_sentences(sentence: str, fault: Fault) -> None:
    assert parse_fault(sentence) == fault


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("kil rank 2 in BACKWARD of step 13", "'kil' is no action; did you mean 'kill'?"),
        ("kill rank 2 in BACKWORD of step 13", "'BACKWORD' is no point inside a step; did you mean 'BACKWARD'?"),
        ("kill rank 2 in STOP of step 13", "'STOP' is no point inside a step"),
        ("kill rank 2 in STPO of recovery 1", "did you mean 'STOP'?"),
        ("kill rank two in BACKWARD of step 13", "for example 'kill rank 2 in BACKWARD of step 13'"),
        ("kill standby when idle", "for example 'kill standby 0 when idle'"),
        ("kill rank 1 in STOP of recovery 0", "recoveries are counted from 1"),
        (f"kill rank 1 after step {10**30}", "too large"),
        ("kill", "expected an action, then who and where"),
        ("", "expected an action"),
    ],
)
def test_a_bad_sentence_names_the_nearest_good_words(sentence: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_fault(sentence)


def test_every_word_is_explained_and_every_example_works() -> None:
    assert set(ACTION_WORDS) == set(Action)
    assert set(POINT_WORDS) == set(Point)
    for example in EXAMPLES:
        parse_fault(example)


def test_a_fault_for_a_rank_or_standby_that_is_not_there_is_refused() -> None:
    check_fault(parse_fault("kill rank 3 after step 1"), world_size=4, standbys=0)
    with pytest.raises(UsageError, match="no rank 4; ranks are 0 to 3"):
        check_fault(parse_fault("kill rank 4 after step 1"), world_size=4, standbys=0)
    with pytest.raises(UsageError, match="the job has no standby"):
        check_fault(parse_fault("kill standby 0 when idle"), world_size=4, standbys=0)


# --- lookups ------------------------------------------------------------------------------------------------------
@given(in_steps)
def test_a_fault_in_a_step_strikes_its_rank_point_step_and_attempt_only(fault: Fault) -> None:
    assert fault.rank is not None
    assert fault.step is not None
    plan = Plan(faults=(fault,))
    here = {"rank": fault.rank, "point": fault.point, "step": fault.step, "attempt": fault.attempt}

    def look(**changes: int) -> Fault | None:
        return planned_in_step(plan, **{**here, **changes})  # type: ignore[arg-type]

    assert look() == fault
    assert look(rank=fault.rank + 1) is None
    assert look(step=fault.step + 1) is None
    assert look(attempt=fault.attempt + 1) is None


def test_a_fault_in_a_recovery_strikes_whoever_gets_there_unless_a_rank_is_named() -> None:
    anyone = parse_fault("kill the restore source during restore 2")
    named = parse_fault("kill rank 1 in STOP of recovery 1")
    plan = Plan(faults=(anyone, named))
    for rank in range(3):
        assert planned_in_recovery(plan, rank=rank, point=Point.RESTORE_SEND, recovery=2) == anyone
        assert planned_in_recovery(plan, rank=rank, point=Point.RESTORE_SEND, recovery=1) is None
        found = planned_in_recovery(plan, rank=rank, point=Point.STOP, recovery=1)
        assert found == (named if rank == 1 else None)


def test_a_fault_of_a_standby() -> None:
    fault = parse_fault("kill standby 1 when idle")
    assert planned_for_standby(Plan(faults=(fault,)), standby=1, point=Point.IDLE) == fault
    assert planned_for_standby(Plan(faults=(fault,)), standby=0, point=Point.IDLE) is None


# --- random faults ------------------------------------------------------------------------------------------------
@given(st.integers(), st.floats(min_value=0.0, max_value=1.0), numbers, st.integers(min_value=1, max_value=64))
def test_a_random_fault_is_a_function_of_its_arguments(seed: int, rate: float, step: int, world_size: int) -> None:
    fault = random_fault(seed, rate, step, world_size)
    assert fault == random_fault(seed, rate, step, world_size)
    if fault is not None:
        assert fault.step == step
        assert fault.rank is not None
        assert 0 <= fault.rank < world_size
        assert parse_fault(describe_fault(fault)) == fault


def test_the_rate_is_kept_and_the_extremes_are_exact() -> None:
    def count(rate: float) -> int:
        return sum(random_fault(7, rate, step, 4) is not None for step in range(10_000))

    assert count(0.0) == 0
    assert count(1.0) == 10_000
    assert 800 < count(0.1) < 1_200


def test_random_faults_are_the_same_in_every_release() -> None:
    """A seed in a bug report must lead to the same faults forever."""
    found = [describe_fault(fault) for step in range(12) if (fault := random_fault(1, 0.5, step, 4))]
    assert found == [
        "kill rank 0 in FORWARD of step 1",
        "segfault rank 1 in OPTIMIZER of step 3",
        "segfault rank 1 in AFTER_WRITE of step 9",
    ]


def test_a_random_fault_strikes_the_first_attempt_only() -> None:
    plan = Plan(seed=3, rate_per_step=1.0, world_size=2)
    fault = random_fault(3, 1.0, 5, 2)
    assert fault is not None
    assert fault.rank is not None
    assert planned_in_step(plan, rank=fault.rank, point=fault.point, step=5, attempt=0) == fault
    assert planned_in_step(plan, rank=fault.rank, point=fault.point, step=5, attempt=1) is None
