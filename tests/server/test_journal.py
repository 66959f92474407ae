"""The journal keeps what it can, says once when it cannot, and never stops the job."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from relight.core.protocol.commands import Notice, Stop
from relight.core.protocol.events import ProcessExited, ProcessStarted
from relight.core.protocol.position import Position
from relight.server.records.journal import RESERVE_NAME, Journal, JournalInUse, JournalLine, read_journal
from relight.server.records.reserve import Reserve
from relight.server.records.trace import TraceFile
from relight.wire.messages import TraceChunk
from relight.wire.settings import JobSettings
from tests.disk import fill

SETTINGS = JobSettings(job="test", script="train.py")
EVENT = ProcessStarted(process="w0", pid=1)


@pytest.fixture
def full_disk(mount: Callable[[str], Path]) -> Path:
    return mount("size=64k")


class Alarms(list[str]):
    def __call__(self, level: str, text: str) -> None:
        self.append(text)

    def trace(self, text: str) -> None:
        self.append(text)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path, alarms = tmp_path / "journal.jsonl", Alarms()
    journal = Journal(path.parent, SETTINGS, alarms)
    died = ProcessExited(
        process="w0", exit_status=-9, evidence="was killed", position=Position(step=3, loss=2.5), noticed_ns=5
    )
    unstamped = msgspec.structs.replace(died, position=Position())  # its loss is not a number
    stop = Stop(generation=2, why="w0 died")
    journal.event(0.5, died)
    journal.commands(0.5, [Notice(level="warning", why="w0 died"), stop])
    journal.event(0.75, unstamped)
    journal.expiry(1.0)
    journal.note(1.5, "refused a stranger")
    journal.close()
    header, lines = read_journal(path)
    assert header.settings == SETTINGS
    assert [line.now for line in lines] == [0.5, 0.5, 0.5, 0.75, 1.0, 1.5]
    assert lines[0].event == died
    assert lines[2].command == stop
    assert repr(lines[3].event) == repr(unstamped)  # NaN is unlike itself
    assert lines[4].expired
    assert lines[5].note == "refused a stranger"
    assert not alarms


def test_each_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path.parent, SETTINGS, Alarms())
    for count in range(3):
        assert len(read_journal(path)[1]) == count
        journal.event(float(count), EVENT)
    journal.close()


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path.parent, SETTINGS, Alarms())
    journal.event(1.0, EVENT)
    journal.event(2.0, EVENT)
    journal.close()
    path.write_bytes(path.read_bytes()[:-5])
    assert [line.now for line in read_journal(path)[1]] == [1.0]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path.parent, SETTINGS, Alarms())
    journal.event(1.0, EVENT)
    journal.event(2.0, EVENT)
    journal.close()
    lines = path.read_bytes().split(b"\n")
    lines[1] = b'{"now": "yesterday"}'
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(msgspec.ValidationError, match="line 2"):
        read_journal(path)


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path.parent, SETTINGS, Alarms()).close()
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":99'))
    with pytest.raises(msgspec.ValidationError, match="format 99"):
        read_journal(path)


def stop(generation: int) -> Stop:
    return Stop(generation=generation, why="test")


def test_a_full_disk_is_told_once_and_what_is_there_stays_readable(full_disk: Path) -> None:
    path, alarms = full_disk / "journal.jsonl", Alarms()
    journal = Journal(path.parent, SETTINGS, alarms)
    for count in range(2_000):
        journal.event(float(count), EVENT)
        assert journal.commands(float(count), [stop(count)]) == ""
    assert len(alarms) == 1
    assert os.strerror(errno.ENOSPC) in alarms[0]
    assert "training goes on and failures are still handled" in alarms[0]
    lines = read_journal(path)[1]
    assert len(lines) > 50
    assert [line.now for line in lines if line.event] == [float(count) for count in range(len(lines) - len(lines) // 2)]
    journal.close()
    successor = Journal(path.parent, SETTINGS, alarms, resume=True)
    assert successor.incomplete  # more than is to be read here has happened
    assert Reserve(full_disk / RESERVE_NAME).generation == 1_999


def test_what_a_full_disk_did_not_take_is_written_once_there_is_room(full_disk: Path) -> None:
    path, alarms = full_disk / "journal.jsonl", Alarms()
    journal = Journal(path.parent, SETTINGS, alarms)
    ballast = fill(full_disk)
    for count in range(200):
        journal.event(float(count), EVENT)
        assert journal.commands(float(count), [stop(count)]) == ""
    ballast.unlink()
    journal.event(200.0, EVENT)
    assert [line.now for line in read_journal(path)[1] if line.event] == [float(count) for count in range(201)]
    assert len(alarms) == 2
    assert "nothing is missing" in alarms[1]
    journal.close()
    assert not Journal(path.parent, SETTINGS, alarms, resume=True).incomplete


def test_a_generation_that_cannot_be_made_durable_is_refused(full_disk: Path) -> None:
    journal = Journal(full_disk, SETTINGS, Alarms())
    fill(full_disk)
    for count in range(100):
        journal.event(float(count), EVENT)
    assert journal.commands(100.0, [stop(2)]) == ""
    os.close(journal._reserve._descriptor)  # type: ignore[union-attr]  # its disk is gone too
    assert journal.commands(101.0, [stop(2)]) == ""  # in use already
    assert "generation 3 cannot be made durable" in journal.commands(102.0, [stop(3)])


def test_a_successor_continues_after_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(tmp_path, SETTINGS, Alarms())
    journal.event(1.0, EVENT)
    journal.event(2.0, EVENT)
    journal.close()
    path.write_bytes(path.read_bytes()[:-5])
    successor = Journal(tmp_path, SETTINGS, Alarms(), resume=True)
    assert [line.now for line in successor.found()] == [1.0]
    successor.event(3.0, EVENT)
    assert [line.now for line in read_journal(path)[1]] == [1.0, 3.0]


def test_a_successor_of_one_that_wrote_nothing_begins(tmp_path: Path) -> None:
    for rest in (b"", b'{"format":1,"wa'):
        (tmp_path / "journal.jsonl").write_bytes(rest)
        journal = Journal(tmp_path, SETTINGS, Alarms(), resume=True)
        assert not list(journal.found())
        assert read_journal(tmp_path / "journal.jsonl")[0].settings == SETTINGS
        journal.close()


def test_two_controllers_cannot_write_one_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SETTINGS, Alarms())
    with pytest.raises(JournalInUse, match="another controller"):
        Journal(tmp_path, SETTINGS, Alarms(), resume=True)
    journal.close()
    Journal(tmp_path, SETTINGS, Alarms(), resume=True).close()


def test_a_place_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    alarms = Alarms()
    journal = Journal(tmp_path / "missing" / "journal.jsonl", SETTINGS, alarms)
    journal.event(1.0, EVENT)
    journal.commands(1.0, [Stop(generation=2, why="test")])
    journal.close()
    assert len(alarms) == 1


def test_an_older_journal_is_never_overwritten(tmp_path: Path) -> None:
    path, alarms = tmp_path / "journal.jsonl", Alarms()
    path.write_bytes(b"precious")
    with pytest.raises(JournalInUse, match="another run has just been started there"):
        Journal(path.parent, SETTINGS, alarms)
    assert path.read_bytes() == b"precious"


def test_exactly_one_kind_of_line_is_written(tmp_path: Path) -> None:
    line = msgspec.json.decode(msgspec.json.encode(JournalLine(now=1.0, wall="x", event=EVENT)))
    assert sorted(line) == ["event", "now", "wall"]


# --- the trace beside it ------------------------------------------------------------------------------------------
CHUNK = TraceChunk(process="w0", rank=0, records=((1, 1, 0, 2, 0),), clock_offset_ns=0)


def test_the_trace_keeps_two_files_of_bounded_size(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path, Alarms().trace, max_bytes=1_000)
    for step in range(100):
        trace.append(msgspec.structs.replace(CHUNK, records=((step, 1, step, 2, step),)))
    newer, older = tmp_path / "trace.jsonl", tmp_path / "trace.1.jsonl"
    assert 0 < newer.stat().st_size <= 1_000
    assert 0 < older.stat().st_size <= 1_000
    lines = (older.read_bytes() + newer.read_bytes()).splitlines()
    steps = [msgspec.json.decode(line, type=TraceChunk).records[0][0] for line in lines]
    assert steps == list(range(100 - len(steps), 100))


def test_a_trace_on_a_full_disk_is_told_once(full_disk: Path) -> None:
    alarms = Alarms()
    trace = TraceFile(full_disk, alarms.trace)
    for _ in range(2_000):
        trace.append(CHUNK)
    assert len(alarms) == 1
    assert os.strerror(errno.ENOSPC) in alarms[0]


def test_a_journal_that_is_locked_is_taken_over_only_by_force_and_its_writer_gives_way(tmp_path: Path) -> None:
    """The old controller may be frozen on a host that is out of reach: when it wakes, nothing may come of it."""
    alarms, gave_way = Alarms(), list[str]()
    old = Journal(tmp_path, SETTINGS, alarms, give_way=lambda: gave_way.append("old"))
    old.event(0.5, EVENT)
    with pytest.raises(JournalInUse):
        Journal(tmp_path, SETTINGS, alarms, resume=True)
    new = Journal(tmp_path, SETTINGS, alarms, resume=True, take_over=True, give_way=lambda: gave_way.append("new"))
    assert [line.event for line in new.found()] == [EVENT]
    new.note(1.0, "of the new one")
    assert gave_way == []
    old.note(1.0, "of the old one")
    assert gave_way == ["old"]
    assert [line.note for line in read_journal(tmp_path / "journal.jsonl")[1]] == ["", "of the new one"]
    with pytest.raises(JournalInUse):  # the copy is locked as the original was
        Journal(tmp_path, SETTINGS, alarms, resume=True)
    assert not alarms
    old.close()
    new.close()


def test_a_journal_whose_lock_is_free_is_taken_over_as_a_copy(tmp_path: Path) -> None:
    """A lock may go with the connection to the storage, while its holder is only stopped."""
    alarms, gave_way = Alarms(), list[str]()
    old = Journal(tmp_path, SETTINGS, alarms, give_way=lambda: gave_way.append("old"))
    old.note(0.5, "of the old one")
    assert old._descriptor is not None
    fcntl.flock(old._descriptor, fcntl.LOCK_UN)
    new = Journal(tmp_path, SETTINGS, alarms, resume=True, take_over=True)
    old.note(1.0, "after it woke up")
    assert gave_way == ["old"]
    assert [line.note for line in read_journal(tmp_path / "journal.jsonl")[1]] == ["of the old one"]
    old.close()
    new.close()


def test_a_controller_that_may_not_act_gives_way_before_a_line_and_before_an_order(tmp_path: Path) -> None:
    class GaveWay(Exception):
        pass

    def give_way() -> None:
        raise GaveWay

    answers = [True]  # for the first line, which has the settings
    journal = Journal(tmp_path, SETTINGS, Alarms(), may_act=lambda: answers.pop(0), give_way=give_way)
    answers += [True, True, True]
    journal.event(0.5, EVENT)
    journal.commands(0.5, [Notice(level="info", why="of the controller")])
    answers += [True, False]
    with pytest.raises(GaveWay):
        journal.commands(1.0, [Notice(level="info", why="written, so a successor knows it, and not given")])
    answers.append(False)
    with pytest.raises(GaveWay):
        journal.event(2.0, EVENT)
    assert len(read_journal(tmp_path / "journal.jsonl")[1]) == 3
    journal.close()
