"""Reports of a worker to people: each thing once, doubts again to an agent's successor, and when a risk is a doubt."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from relight.core.protocol.events import BitsDoubted, WorkerNotice
from relight.core.protocol.fault import Plan
from relight.core.worker.worker import Worker
from relight.training.connection.page import PositionPage
from relight.training.process.controller.notices import Notices
from relight.training.process.faults import Faults
from tests.training.agent_end import AgentEnd


class Speaker(AgentEnd):
    """Rank 1 of a job, in step 7."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, self)
        self.faults = Faults(Plan(), PositionPage(-1), None, lambda: None, lambda _: None, lambda _: None)
        self.faults.step = 7
        self.notices = Notices(self.link, "w0", Worker(1, is_standby=False), self.faults)
        self.link.start()

    def receive(self, message: msgspec.Struct) -> None:
        raise AssertionError(message)

    def reconnected(self) -> None:
        self.notices.repeat_doubts()

    def hears_nothing(self) -> None:
        """Nothing was sent until now: the next message is one that is sent now."""
        self.notices.say("end", "end")
        assert self.heard() == WorkerNotice(process="w0", rank=1, text="end")


@pytest.fixture
def speaker(tmp_path: Path) -> Iterator[Speaker]:
    with contextlib.closing(Speaker(tmp_path / "agent.sock")) as made:
        yield made


def doubt(reason: str, step: int) -> BitsDoubted:
    return BitsDoubted(process="w0", rank=1, step=step, reason=reason)


def test_a_thing_is_said_once_whatever_its_words(speaker: Speaker) -> None:
    speaker.notices.say("torn", "first")
    speaker.notices.say("torn", "second")
    assert speaker.heard() == WorkerNotice(process="w0", rank=1, text="first")
    speaker.hears_nothing()


def test_what_is_learnt_after_the_recovery_that_it_makes_doubtful(speaker: Speaker) -> None:
    """Code between two steps ran after a rank was lost there, and not in its replacement."""
    speaker.notices.note_recovery(7, "")
    speaker.notices.doubt_if_lost_after(5, "changed earlier")
    speaker.hears_nothing()
    speaker.notices.doubt_if_lost_after(6, "changed there")
    assert speaker.heard() == doubt("changed there", 7)


def test_a_doubt_names_the_step_under_way_or_the_one_that_is_meant(speaker: Speaker) -> None:
    speaker.notices.doubt("one")
    speaker.notices.doubt("other", step=3)
    speaker.notices.doubt("before the first", step=-1)
    speaker.notices.doubt("one", step=5)
    assert [speaker.heard() for _ in range(3)] == [doubt("one", 7), doubt("other", 3), doubt("before the first", 0)]
    speaker.hears_nothing()


def test_an_agents_successor_hears_all_doubts_again(speaker: Speaker) -> None:
    speaker.notices.doubt("one")
    speaker.heard()
    speaker.dies()
    assert speaker.heard() == doubt("one", 7)


@pytest.mark.parametrize(("version", "is_doubted"), [(6, True), (5, True), (7, False), (0, False)])
def test_a_risk_is_a_doubt_once_a_recovery_goes_back_to_it(speaker: Speaker, version: int, is_doubted: bool) -> None:
    speaker.notices.doubt_if_lost_after(5, "its numbers are gone")
    speaker.notices.note_recovery(version, "")
    if is_doubted:
        assert speaker.heard() == doubt("its numbers are gone", 7)
    speaker.hears_nothing()


def test_what_makes_every_recovery_doubtful_is_said_at_the_first_one(speaker: Speaker) -> None:
    speaker.notices.note_recovery(4, "draws of its own")
    speaker.notices.note_recovery(5, "draws of its own")
    assert speaker.heard() == doubt("draws of its own", 7)
    speaker.hears_nothing()
