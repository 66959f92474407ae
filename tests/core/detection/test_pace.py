"""The pace of all agents together is bounded; that of one of them depends on how many there are."""

import pytest

from relight.core.detection.pace import SAMPLE_SECONDS, SAMPLES_PER_SECOND, judge_seconds, sample_seconds


@pytest.mark.parametrize("agents", [1, 2, 100, 1250, 1251, 5000, 10_000, 100_000])
def test_one_controller_can_listen_to_all_samples(agents: int) -> None:
    seconds = sample_seconds(agents)
    assert agents / seconds <= SAMPLES_PER_SECOND
    assert seconds == SAMPLE_SECONDS or agents / (seconds / 2) > SAMPLES_PER_SECOND  # no rarer than it must be


def test_small_jobs_are_looked_at_as_often_as_ever() -> None:
    assert sample_seconds(1) == sample_seconds(500) == SAMPLE_SECONDS
    assert judge_seconds(8) < 0.01  # less than lies between two samples of one agent, more than between those of many
    assert judge_seconds(100) < judge_seconds(100_000) <= 2.0


def test_it_changes_seldom_while_agents_join() -> None:
    assert len({sample_seconds(agents) for agents in range(1, 10_001)}) == 4
