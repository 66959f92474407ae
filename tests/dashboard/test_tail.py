"""Whole lines of files that grow, are renamed, are cut, or are not there yet."""

from pathlib import Path

from relight.dashboard.sources.tail import Tail


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_bytes(b"one\ntw")
    assert tail.read() == [b"one"]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.read() == [b"two", b"three"]
    tail.close()


def test_half_a_line_of_a_dead_controller_is_cut_off_by_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"one\nha")
    tail = Tail(path)
    assert tail.read() == [b"one"]
    with path.open("r+b") as file:
        file.truncate(4)
        file.seek(4)
        file.write(b"two\n")
    assert tail.read() == [b"two"]
    tail.close()


def test_a_file_that_is_renamed_is_read_to_its_end_first(tmp_path: Path) -> None:
    path, older = tmp_path / "trace.jsonl", tmp_path / "trace.1.jsonl"
    path.write_bytes(b"one\n")
    tail = Tail(path, older)
    assert tail.read() == [b"one"]
    with path.open("ab") as file:
        file.write(b"two\n")
    path.rename(older)
    path.write_bytes(b"three\n")
    assert [tail.read(), tail.read(), tail.read()] == [[b"two"], [b"three"], []]
    tail.close()


def test_the_older_file_comes_first(tmp_path: Path) -> None:
    path, older = tmp_path / "trace.jsonl", tmp_path / "trace.1.jsonl"
    older.write_bytes(b"one\n")
    path.write_bytes(b"two\n")
    tail = Tail(path, older)
    assert [tail.read(), tail.read(), tail.read()] == [[b"one"], [b"two"], []]
    tail.close()


def test_a_line_of_any_length_cannot_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"x" * 1000 + b"\none\n" + b"y" * 90 + b"\n")
    tail = Tail(path, max_line_bytes=100)
    found = []
    for _ in range(200):
        found += tail.read(max_bytes=16)
    assert tail.too_long == 10
    assert b"one" in found
    assert b"y" * 90 in found
    tail.close()
