"""A Lease in a file: of any hosts that write at once one succeeds, and only on what it has read."""

import threading
from pathlib import Path

import pytest

from relight.cluster.lease import LeaseError
from relight.cluster.lease_file import FILE, LOCK, LeaseFile
from relight.core.lease import Read, Record, Write


def read(file: LeaseFile) -> Record:
    record, _ = file.perform(Read(), {})
    assert isinstance(record, Record)
    return record


def test_a_write_replaces_what_was_read(tmp_path: Path) -> None:
    first, second = LeaseFile(tmp_path, 15, begins=True), LeaseFile(tmp_path, 9)
    assert read(first) == Record("0", "", 15.0)
    assert first.perform(Write("0", "a"), {}) == ("1", {})
    assert read(second) == Record("1", "a", 15.0)
    assert second.perform(Write("1", "b"), {}) == ("2", {})
    assert first.perform(Write("1", "a"), {}) == ("", {})  # it has to read again
    assert read(first) == Record("2", "b", 9.0)


def test_a_host_without_the_file_shares_no_storage(tmp_path: Path) -> None:
    for request in (Read(), Write("0", "b")):
        with pytest.raises(LeaseError, match="do all hosts share this directory"):
            LeaseFile(tmp_path, 15).perform(request, {})
    with pytest.raises(LeaseError, match="do all hosts share this directory"):
        LeaseFile(tmp_path / "nowhere", 15).perform(Read(), {})


def test_a_host_in_doubt_writes_nothing_and_gives_the_lease_up(tmp_path: Path) -> None:
    doubts = [""]
    file = LeaseFile(tmp_path, 15, lambda: doubts[0], begins=True)
    file.perform(Write("0", "a"), {})
    doubts[0] = "Slurm has taken n1 out of the job"
    with pytest.raises(LeaseError, match="must not hold it: Slurm has taken n1 out of the job"):
        file.perform(Write("1", "a"), {})
    assert read(file).version == "1"
    assert file.perform(Write("1", ""), {}) == ("2", {})


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": "x"}', b"\x00" * 10])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(LeaseError, match=str(tmp_path / FILE)):
        LeaseFile(tmp_path, 15, begins=True).perform(Read(), {})


def test_a_lock_that_is_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(LeaseError, match="cannot be used"):
        LeaseFile(tmp_path, 15, begins=True).perform(Write("0", "a"), {})


@pytest.mark.parametrize("writers", [2, 5, 16])
def test_of_all_that_write_at_once_one_succeeds(tmp_path: Path, writers: int) -> None:
    rounds = 20
    won: list[tuple[str, str]] = []  # versions, and the names of their writers
    barrier = threading.Barrier(writers)

    def write(name: str) -> None:
        file = LeaseFile(tmp_path, 60, begins=True)
        for number in range(rounds):
            barrier.wait(60.0)
            version, _ = file.perform(Write(str(number), name), {})
            if version:
                assert isinstance(version, str)
                won.append((version, name))

    threads = [threading.Thread(target=write, args=(f"host-{number}",)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert sorted(int(version) for version, _ in won) == list(range(1, rounds + 1))
    assert read(LeaseFile(tmp_path, 60)).holder == dict(won)[str(rounds)]
