"""Doubts about a job's bits: from what workers say, and from the account itself."""

import functools

import msgspec
import pytest

from relight.core.account.doubts import KEPT_DOUBTS
from relight.core.account.report import DoubtReport, JobReport, decode_report, encode_report
from relight.core.account.verdict import NOT_KNOWN, YES, describe_bits
from relight.core.controller import Controller
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Notice, Resume
from relight.core.protocol.record import Record
from relight.core.replay import replay
from tests.core.recovery.test_corruption import differs
from tests.core.test_controller import Desk, one
from tests.core.test_memory import Recorded

REASON = "allreduce between two steps was cut short"


def doubt(rank: int = 0, step: int = 3, reason: str = REASON, process: str = "") -> ev.BitsDoubted:
    return ev.BitsDoubted(process=process or f"w{rank}", rank=rank, step=step, reason=reason)


def finish(desk: Desk, **doubts: int | None) -> JobReport:
    for process in desk.controller.rank_processes().values():
        desk.done(process, doubts=doubts.get(process, 0))
    return desk.controller.report()


def test_a_job_without_doubts_says_yes() -> None:
    report = finish(Desk().train())
    assert (report.bits_as_undisturbed, report.doubts, describe_bits(report)) == (YES, (), "yes")


def test_also_after_a_recovery() -> None:
    desk = Desk(standbys=1).train()
    desk.exits("w1")
    desk.recover()
    assert finish(desk).bits_as_undisturbed == YES


def test_a_doubt_is_told_once_and_outweighs_equal_digests() -> None:
    desk = Desk().train()
    said = desk.tell(doubt(1))
    assert [type(command) for command in said] == [Notice]
    assert f"rank 1: {REASON}" in said[0].why
    assert desk.tell(doubt(1)) == ()  # said again to a new agent
    assert desk.tell(doubt(1, step=5, process="w7")) == ()  # by who holds that rank now
    report = finish(desk, w1=1)
    assert report.bits_as_undisturbed == NOT_KNOWN
    assert report.doubts == (DoubtReport(rank=1, process="w1", step=3, reason=REASON),)
    assert describe_bits(report) == f"not known, because rank 1 in step 3: {REASON}"


def test_an_exception_after_a_doubt_may_come_of_it() -> None:
    desk = Desk(standbys=1).train()
    desk.tell(doubt(1))
    desk.raises("w1", "KeyError: 3", step=4)
    desk.exits("w1", 1, step=4)
    desk.recover(4)
    desk.raises("w2", "KeyError: 3", step=4)
    assert f"so it is a bug, or comes of an earlier failure: rank 1 in step 3: {REASON})" in desk.end().error


def test_before_the_end_only_a_doubt_is_said() -> None:
    desk = Desk().train()
    assert describe_bits(desk.controller.report()) == ""
    desk.tell(doubt())
    assert describe_bits(desk.controller.report()).startswith("not known, because rank 0 in step 3: ")
    assert desk.controller.report().bits_as_undisturbed == ""


def test_a_doubt_that_did_not_arrive_is_missed() -> None:
    report = finish(Desk().train(), w0=2)
    assert report.bits_as_undisturbed == NOT_KNOWN
    assert "2 of its doubts got lost on the way" in describe_bits(report)


def test_a_doubt_that_a_rank_gives_once_all_have_ended() -> None:
    """A replacement that has computed no step knows then what code after the loop lacks."""
    desk = Desk().train()
    assert finish(desk).bits_as_undisturbed == YES
    desk.tell(doubt(1, step=8))
    for process in desk.controller.rank_processes().values():
        desk.exits(process, 0)
    assert desk.controller.report().bits_as_undisturbed == NOT_KNOWN


def test_a_relight_without_doubts_cannot_vouch() -> None:
    report = finish(Desk().train(), w1=None)
    assert report.bits_as_undisturbed == NOT_KNOWN
    assert "did not look for doubts" in describe_bits(report)


def test_a_job_that_ended_with_an_error_says_so() -> None:
    desk = Desk().train()
    finish(desk)
    desk.exits("w0", 1, evidence="exited with status 1")
    report = desk.controller.report()
    assert report.bits_as_undisturbed == ""
    assert describe_bits(report) == "not known, because the job ended with an error"


def test_ranks_with_the_same_doubt_are_named_together() -> None:
    desk = Desk(world_size=4).train()
    said = [desk.tell(doubt(rank)) for rank in (3, 1, 2)]
    assert [len(commands) for commands in said] == [1, 0, 0]
    desk.tell(doubt(0, reason="of another kind", step=4))
    words = describe_bits(desk.controller.report())
    assert words == f"not known, because ranks 1, 2, 3 in step 3: {REASON}; and rank 0 in step 4: of another kind"


def test_a_successor_of_a_dead_controller_knows_them() -> None:
    desk = Recorded().train()
    assert isinstance(desk, Recorded)
    desk.tell(doubt(2))
    report = finish(desk, w2=1)
    told = [Record(entry.now, entry.event) for entry in desk.entries]
    assert replay(desk.controller.settings, told).report().doubts == report.doubts
    assert replay(desk.controller.settings, told).report().bits_as_undisturbed == NOT_KNOWN


def test_a_controller_keeps_the_first_ones_and_the_journal_has_all() -> None:
    desk = Recorded().train()
    assert isinstance(desk, Recorded)
    for number in range(2 * KEPT_DOUBTS):
        desk.tell(doubt(reason=f"reason {number}"))
    assert len(desk.controller.report().doubts) == KEPT_DOUBTS
    assert desk.controller.job_stats.forgot
    assert finish(desk, w0=2 * KEPT_DOUBTS).bits_as_undisturbed == NOT_KNOWN
    told = [Record(entry.now, entry.event) for entry in desk.entries]
    whole = replay(desk.controller.settings, told, functools.partial(Controller, full_account=True)).report()
    assert [found.reason for found in whole.doubts] == [f"reason {number}" for number in range(2 * KEPT_DOUBTS)]


@pytest.mark.parametrize(
    ("agreed", "sound", "doubted"), [(7, 7, False), (6, 7, False), (6, 6, True), (5, 6, True), (-1, -1, True)]
)
def test_gradients_of_a_rank_that_was_corrupted(agreed: int, sound: int, doubted: bool) -> None:
    """It may have contributed to steps that are finished, unless states were compared in each.

    Those that were compared in a handshake only may have differed before the next gradient.
    """
    desk = Desk(world_size=3, standbys=1).train()
    desk.tell(differs(5, 6, 5, step=7))
    desk.exits("w1", step=7)
    for process in desk.controller.rank_processes().values():
        desk.stands(process, 7, agreed=-1 if process == "w3" else agreed, sound=sound)
    for process in desk.controller.rank_processes().values():
        desk.restores(process, 7)
        desk.commits(process, 7)
    report = finish(desk)
    assert [found.rank for found in report.doubts] == ([1] if doubted else [])
    assert report.bits_as_undisturbed == (NOT_KNOWN if doubted else YES)


def test_all_ranks_hear_of_doubts_when_they_resume() -> None:
    """The next checkpoint keeps them, whichever rank writes it."""
    desk = Desk(world_size=3, standbys=1).train()
    desk.exits("w1", step=7)
    desk.all_stand(7)
    desk.tell(doubt(0))
    desk.tell(doubt(2))
    for process in desk.controller.rank_processes().values():
        desk.restores(process, 7)
    assert one(desk.said, Resume).doubts == (REASON,)


def test_another_failure_needs_no_comparison() -> None:
    desk = Desk(world_size=3, standbys=1).train()
    desk.exits("w1", step=7)
    desk.recover(7)
    assert finish(desk).doubts == ()


def test_who_had_begun_to_write_is_in_the_account_of_the_recovery() -> None:
    desk = Desk(world_size=4, standbys=2).train()
    desk.exits("w3", step=7)
    desk.stands("w0", 7, wrote=True)
    desk.stands("w1", 7)
    desk.stands("w2", 7, wrote=True, torn=True)
    for process in list(desk.controller.rank_processes().values())[3:]:
        desk.stands(process, 7)
    for process in desk.controller.rank_processes().values():
        desk.restores(process, 7)
    for process in desk.controller.rank_processes().values():
        desk.commits(process, 7)
    (recovery,) = desk.controller.report().recoveries
    assert (recovery.wrote, recovery.torn) == ((0, 2), (2,))


def test_reports_of_an_older_relight_are_read() -> None:
    report = msgspec.json.decode(encode_report(JobReport(job="old", final_version=3)))
    for name in ("doubts", "bits_as_undisturbed"):
        del report[name]
    old = decode_report(msgspec.json.encode(report))
    assert (old.doubts, describe_bits(old)) == ((), "")
