"""Moments at which an agent reports what its processes do."""

from relight.agent.decisions.sampling import LOOK_SECONDS, TRACE_SECONDS, SamplingSchedule
from relight.core.detection.pace import SAMPLE_SECONDS
from relight.wire.messages import Pace


def test_reports_come_at_the_pace_that_was_asked_for() -> None:
    schedule = SamplingSchedule()
    schedule.set_pace(Pace(sample_seconds=4.0, trace=True))
    assert schedule.is_due(100.0, any_stopped=False)
    schedule.note_sent(100.0)
    assert not schedule.is_due(103.9, any_stopped=False)
    assert schedule.seconds_to_next_look(103.0, has_others=False) == 1.0
    assert schedule.is_due(104.0, any_stopped=False)


def test_no_pace_is_faster_than_that_of_few_agents() -> None:
    schedule = SamplingSchedule()
    schedule.set_pace(Pace(sample_seconds=0.0, trace=True))
    schedule.note_sent(100.0)
    assert schedule.seconds_to_next_look(100.0, has_others=False) == SAMPLE_SECONDS


def test_a_stop_and_its_end_are_reported_at_once() -> None:
    schedule = SamplingSchedule()
    schedule.note_sent(100.0)
    assert schedule.is_due(100.1, any_stopped=True)
    assert schedule.seconds_to_next_look(100.1, has_others=False) == LOOK_SECONDS
    assert schedule.is_due(100.2, any_stopped=False)  # it goes on
    assert not schedule.is_due(100.3, any_stopped=False)


def test_processes_that_raise_no_signal_are_looked_at_more_often() -> None:
    schedule = SamplingSchedule()
    schedule.note_sent(100.0)
    assert schedule.seconds_to_next_look(100.0, has_others=True) == LOOK_SECONDS


def test_phases_are_reported_less_often_than_samples() -> None:
    schedule = SamplingSchedule()
    assert schedule.note_sent(100.0)
    assert not schedule.note_sent(100.0 + TRACE_SECONDS / 2)
    assert schedule.note_sent(100.0 + TRACE_SECONDS)


def test_a_new_connection_is_told_at_once() -> None:
    schedule = SamplingSchedule()
    schedule.note_sent(100.0)
    schedule.begin()
    assert schedule.is_due(100.1, any_stopped=False)
