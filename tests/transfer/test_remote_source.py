"""Sources on other hosts than the publisher: over TCP, with the way within the machine not taken."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import relight
from relight.errors import TransferError
from relight.transfer.plan.update.result import SELF
from relight.transfer.publish.source import FixedVersion
from relight.transfer.relay.remote_source import RemoteSourceLink, SourceBridge
from relight.transfer.tensors.weights import PartSource
from relight.wire.connection.tls import Tls
from tests.certificates import Authority
from tests.transfer.fleet import until
from tests.transfer.hosts import Line
from tests.transfer.test_division import (
    BUCKET_BYTES,
    LAYOUTS,
    SECONDS,
    engine,
    publish,
    source_of,
    whole_tensors,
)

TOKEN = b"the token of this test's job...."
IN_A_BUCKET = 40_000  # so far into what a source sends: behind its description, which is shorter

Link = Callable[[PartSource, int], RemoteSourceLink]


def no_line(data: bytes, before: int) -> bytes:
    del before
    return data


@contextlib.contextmanager
def far_ranks(
    place: Path,
    layout: str,
    version: int,
    carry_up: Callable[[bytes, int], bytes] = no_line,
    tls: Tls | None = None,
) -> Iterator[tuple[relight.Publisher, PartSource, list[RemoteSourceLink]]]:
    """A publisher that is rank 0, and its source; ranks 1 to 3 are on another host, rank 1 behind a line of its own."""
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(
            relight.Publisher(place, bucket_bytes=BUCKET_BYTES, stall_timeout_seconds=SECONDS)
        )
        bridge = stack.enter_context(SourceBridge(place, "127.0.0.1", token=TOKEN, tls=tls))
        line = stack.enter_context(Line(bridge.endpoint, carry_up=carry_up))
        links, threads = [], []
        for rank in (1, 2, 3):
            source = source_of(layout, rank, version)
            endpoint = line.endpoint if rank == 1 else bridge.endpoint
            link = RemoteSourceLink(
                endpoint,
                source,
                lease=FixedVersion(version),
                held=source.held,
                name=f"rank-{rank}",
                token=TOKEN,
                tls=tls,
            )
            links.append(link)
            threads.append(threading.Thread(target=link.run))
            threads[-1].start()
        try:
            assert publisher.wait_for_sources(3, SECONDS)
            yield publisher, source_of(layout, 0, version), links
        finally:
            for link, thread in zip(links, threads, strict=True):
                link.stop()
                thread.join(SECONDS)
                assert not thread.is_alive()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_get_whole_tensors(tmp_path: Path, layout: str) -> None:
    with contextlib.ExitStack() as stack:
        engines = [engine(tmp_path, mode) for mode in ("model", "in-place")]
        for receiver, _ in engines:
            stack.enter_context(receiver)
        publisher, source, _ = stack.enter_context(far_ranks(tmp_path, layout, 3))
        result = publish(publisher, source, 3, 2)
        assert not result.dropped
        assert not result.error
        writers = {stage.member for stage in result.stages if stage.kind == "broadcast"}
        assert writers == {SELF, "rank-1", "rank-2", "rank-3"}
        for receiver, live in engines:
            assert receiver.wait_for(3, SECONDS)
            assert relight.digest_weights(live) == relight.digest_weights(whole_tensors(3))


def test_through_tls(tmp_path: Path) -> None:
    tls = Tls(Authority(tmp_path / "tls").issue("host", "127.0.0.1"))
    receiver, live = engine(tmp_path, "model")
    with receiver, far_ranks(tmp_path, "rows and columns", 3, tls=tls) as (publisher, source, _):
        result = publish(publisher, source, 3, 1)
        assert (result.error, result.dropped) == ("", {})
        assert receiver.wait_for(3, SECONDS)
        assert relight.digest_weights(live) == relight.digest_weights(whole_tensors(3))


def test_a_bucket_that_the_network_damages_is_written_again(tmp_path: Path) -> None:
    hits: list[int] = []

    def damage(data: bytes, before: int) -> bytes:
        at = IN_A_BUCKET - before
        if hits or not 0 <= at < len(data):
            return data
        hits.append(at)
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    receiver, live = engine(tmp_path, "model")
    with receiver, far_ranks(tmp_path, "columns", 3, damage) as (publisher, source, _):
        result = publish(publisher, source, 3, 1)
        assert (result.error, result.dropped) == ("", {})
        reloads = [stage.bucket for stage in result.stages if stage.kind == "reload"]
        assert len(reloads) > len(set(reloads)), "one was loaded, found damaged, and loaded again"
        assert receiver.wait_for(3, SECONDS)
        assert relight.digest_weights(live) == relight.digest_weights(whole_tensors(3))
    assert hits


def cut(data: bytes, before: int) -> bytes:
    if before + len(data) > IN_A_BUCKET:
        raise OSError
    return data


def test_a_replica_writes_what_a_lost_host_held(tmp_path: Path) -> None:
    receiver, live = engine(tmp_path, "model")
    with receiver, far_ranks(tmp_path, "hsdp", 3, cut) as (publisher, source, _):
        result = publish(publisher, source, 3, 1)
        assert (result.error, set(result.dropped)) == ("", {"rank-1"})
        assert receiver.wait_for(3, SECONDS)
        assert relight.digest_weights(live) == relight.digest_weights(whole_tensors(3))


def test_without_a_replica_engines_keep_their_version(tmp_path: Path) -> None:
    receiver, live = engine(tmp_path, "model")
    with receiver:
        with far_ranks(tmp_path, "fsdp", 3, cut) as (publisher, source, _):
            result = publish(publisher, source, 3, 1)
            assert "no other source holds bucket" in result.error
            assert receiver.version == -1
        with far_ranks(tmp_path, "fsdp", 4) as (publisher, source, _):
            assert not publish(publisher, source, 4, 1).error
        assert receiver.wait_for(4, SECONDS)
        assert relight.digest_weights(live) == relight.digest_weights(whole_tensors(4))


def test_a_rank_that_withdraws_ends_its_link(tmp_path: Path) -> None:
    """It waits for nothing, not even for a bucket that is on its way."""
    with far_ranks(tmp_path, "hsdp", 3) as (publisher, _, links):
        links[1].withdraw("its weights are about to change")
        for _ in until("rank 2 is still there"):
            if publisher.sources() == ("rank-1", "rank-3"):
                break


def test_a_stranger_is_no_source(tmp_path: Path) -> None:
    source = source_of("columns", 1, 3)
    with (
        relight.Publisher(tmp_path, bucket_bytes=BUCKET_BYTES) as publisher,
        SourceBridge(tmp_path, "127.0.0.1", token=TOKEN) as bridge,
    ):
        link = RemoteSourceLink(
            bridge.endpoint, source, lease=FixedVersion(3), held=source.held, name="stranger", token=b"another token"
        )
        with pytest.raises(TransferError, match="does not know this job's token"):
            link.run()
        assert publisher.sources() == ()
