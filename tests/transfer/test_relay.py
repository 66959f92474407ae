"""Publishing to engines on another host through a relay: processes of their own, real connections, real deaths."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from relight.errors import TransferError
from relight.transfer.engine.receiver import Receiver
from relight.transfer.plan.update.result import Published
from relight.transfer.publish.handle import Handle
from relight.transfer.publish.publisher import Publisher
from relight.transfer.relay.publish_bridge import PublishBridge
from relight.transfer.relay.relay import Relay
from relight.transfer.tensors.weights import TensorSource, digest_weights
from tests.transfer.fleet import (
    BUCKETS,
    DEADLINE_SECONDS,
    STALL_SECONDS,
    Engine,
    Fault,
    Fleet,
    Member,
    source_of,
    until,
)
from tests.transfer.hosts import TOKEN, Line


def _run_relay(pipe: Any, endpoint: str, place: str) -> None:
    patience = STALL_SECONDS / 2  # half the publisher's
    relay = Relay(
        endpoint, place, token=TOKEN, name="relay", engine_stall_seconds=patience, commit_timeout_seconds=patience
    )
    threading.Thread(target=relay.run, daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            command = pipe.recv()
            if command == "engines":
                pipe.send(0 if relay._publisher is None else len(relay._publisher.engines()))
            elif command == "memory":
                (peak_kib,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
                pipe.send(int(peak_kib) * 1024)


class Hosts:
    """A publisher and a bridge here; elsewhere a relay, and the engines that are its neighbours."""

    def __init__(self, near: Path, far: Path) -> None:
        near.mkdir()
        far.mkdir()
        self.near, self.far = Fleet(near), Fleet(far)
        self.bridge = PublishBridge(near, "127.0.0.1", token=TOKEN, on_notice=self.near.notices.append)
        self.relay: Member | None = None

    def start_relay(self, endpoint: str = "", *, publisher: bool = True) -> Member:
        """And a publisher in this process, without which it waits."""
        if publisher:
            self.near.publisher.engines()
        self.relay = Member(_run_relay, endpoint or self.bridge.endpoint, str(self.far.place))
        self.far.members.append(self.relay)
        for _ in until("the relay has opened its place"):
            if (self.far.place / "weights.sock").exists():
                return self.relay
        raise AssertionError

    def engines(self, count: int) -> list[Engine]:
        """So many, at the relay; they are there, and the relay is at the publisher."""
        engines = self.far.engines(count)
        for _ in until("the engines are not at the relay"):
            if self.at_relay() >= count:
                return engines
        raise AssertionError

    def at_relay(self) -> int:
        assert self.relay is not None
        self.relay.order("engines")
        return int(self.relay.answer())

    def start_relay_when_open(self) -> None:
        """The publisher is a process of its own."""
        for _ in until("no publisher"):
            if (self.near.place / "weights.sock").exists():
                break
        self.start_relay(publisher=False)

    def publish_when_there(self, version: int) -> None:
        """The relay and its engines are on their way back: held, so that they get it whenever they come."""
        self.near.publisher.begin(source_of(version), version=version, hold=True)

    def begin(self, version: int, **how: Any) -> Handle:
        """To the relay, which must be there."""
        self.near.wait_for(1)
        return self.near.publisher.begin(source_of(version), version=version, **how)

    def publish(self, version: int, **how: Any) -> Published:
        result = self.begin(version, **how).wait(DEADLINE_SECONDS)
        assert result is not None, "the update does not end"
        return result

    def close(self) -> None:
        self.bridge.close()
        self.far.close()
        self.near.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path / "near", tmp_path / "far")
    try:
        yield hosts
    finally:
        hosts.close()


def test_every_engine_on_the_other_host_gets_the_version(hosts: Hosts) -> None:
    hosts.start_relay()
    engines = hosts.engines(3)
    for version in (1, 2, 3):
        result = hosts.publish(version)
        assert (result.engines, result.dropped) == (("relay",), {}), hosts.near.notices
        for engine in engines:
            engine.assert_has(version)


def test_engines_on_both_hosts(hosts: Hosts) -> None:
    hosts.start_relay()
    far, near = hosts.engines(2), hosts.near.engines(2)
    hosts.near.wait_for(3)
    assert set(hosts.publish(4).engines) == {"e0", "e1", "relay"}
    for engine in far + near:
        engine.assert_has(4)


def test_the_network_carries_each_bucket_once(hosts: Hosts) -> None:
    with Line(hosts.bridge.endpoint) as line:
        hosts.start_relay(line.endpoint)
        engines = hosts.engines(3)
        before = len(line.towards_target)
        hosts.publish(1)
        for engine in engines:
            engine.assert_has(1)
        total_bytes = source_of(1).manifest.total_bytes
        assert total_bytes < len(line.towards_target) - before < 1.2 * total_bytes


@pytest.mark.parametrize("mode", ["in-place", "callback"])
def test_engines_of_other_kinds(hosts: Hosts, mode: str) -> None:
    hosts.start_relay()
    engine = hosts.far.engine("e0", mode)
    for _ in until("the engine is not at the relay"):
        if hosts.at_relay():
            break
    hosts.publish(5)
    engine.assert_has(5)


def test_an_update_waits_for_confirmation_on_the_other_host_too(hosts: Hosts) -> None:
    hosts.start_relay()
    (engine,) = hosts.engines(1)
    hosts.publish(1)
    engine.assert_has(1)
    handle = hosts.begin(2, confirmed=False)
    assert handle.wait_until_read(DEADLINE_SECONDS)
    engine.assert_whole(1)
    handle.confirm()
    engine.assert_has(2)


def test_engines_that_come_later_get_the_version_that_is_held(hosts: Hosts) -> None:
    hosts.start_relay()
    (first,) = hosts.engines(1)
    hosts.publish(6, hold=True)
    first.assert_has(6)
    late = hosts.far.engine("late")
    late.assert_has(6)
    late.process.kill()
    late.wait_until_dead()
    again = hosts.far.engine("late")
    again.assert_has(6)


def test_a_relay_that_comes_later_brings_the_version_that_is_held(hosts: Hosts) -> None:
    near = hosts.near.engine("near")
    hosts.publish(6, hold=True)
    near.assert_has(6)
    hosts.start_relay()
    for engine in hosts.engines(2):
        engine.assert_has(6)


@pytest.mark.parametrize("at", [0, BUCKETS // 2, BUCKETS - 1, "commit"])
@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_one_of_the_engines_fails_and_the_others_go_on(hosts: Hosts, kind: str, at: int | str) -> None:
    hosts.start_relay()
    first, second = hosts.engines(2)
    hosts.publish(1)
    for engine in (first, second):
        engine.assert_has(1)
    first.ask("fault", Fault(kind, at))
    assert hosts.publish(2, hold=True).engines == ("relay",), hosts.near.notices
    second.assert_has(2)
    if kind == "freeze":
        first.wait_until_stopped()
        first.wake()
        first.assert_has(2)  # in spite of all
    hosts.publish(3)
    second.assert_has(3)


def test_a_bucket_that_an_engine_takes_damaged_is_taken_again(hosts: Hosts) -> None:
    hosts.start_relay()
    first, second = hosts.engines(2)
    first.ask("fault", Fault("damage", 2))
    hosts.publish(1)
    for engine in (first, second):
        engine.assert_has(1)


def test_a_bucket_that_would_have_to_be_written_again_ends_the_update_for_the_host(hosts: Hosts) -> None:
    hosts.start_relay()
    first, second = hosts.engines(2)
    hosts.publish(1)
    for engine in (first, second):
        engine.assert_has(1)
    first.ask("fault", Fault("damage", 2, times=2))
    assert "a relay keeps none" in hosts.publish(2).dropped["relay"]
    for engine in (first, second):
        engine.assert_whole(1)
    hosts.publish(3)
    for engine in (first, second):
        engine.assert_has(3)


def test_a_bucket_that_the_network_damages_is_sent_again(hosts: Hosts) -> None:
    hits: list[int] = []

    def damage(data: bytes, before: int) -> bytes:
        at = 20_000 - before
        if hits or not 0 <= at < len(data):
            return data
        hits.append(at)
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    with Line(hosts.bridge.endpoint, damage) as line:
        hosts.start_relay(line.endpoint)
        engines = hosts.engines(2)
        assert hosts.publish(1).engines == ("relay",), hosts.near.notices
        for engine in engines:
            engine.assert_has(1)
    assert hits


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_the_connection_breaks_in_the_middle_and_comes_back(hosts: Hosts, share: float) -> None:
    total_bytes = source_of(1).manifest.total_bytes
    breaks = threading.Event()

    def cut(data: bytes, before: int) -> bytes:
        if breaks.is_set() and len(line.towards_target) - start > share * total_bytes:
            breaks.clear()
            raise OSError
        return data

    with Line(hosts.bridge.endpoint, cut) as line:
        hosts.start_relay(line.endpoint)
        engines = hosts.engines(2)
        hosts.publish(1)
        for engine in engines:
            engine.assert_has(1)
        start = len(line.towards_target)
        breaks.set()
        assert "relay" in hosts.publish(2).dropped
        for engine in engines:
            engine.assert_whole(1)
        hosts.publish(3, hold=True)
        for engine in engines:
            engine.assert_has(3)


def test_the_relay_dies_and_another_takes_its_place(hosts: Hosts) -> None:
    relay = hosts.start_relay()
    engines = hosts.engines(2)
    hosts.publish(1)
    for engine in engines:
        engine.assert_has(1)
    handle = hosts.begin(2, confirmed=False)
    assert handle.wait_until_read(DEADLINE_SECONDS)
    relay.process.kill()
    relay.wait_until_dead()
    handle.confirm()
    assert handle.wait(DEADLINE_SECONDS) is not None
    for engine in engines:
        engine.assert_whole(1)
    hosts.start_relay()
    hosts.publish_when_there(3)
    for engine in engines:
        engine.assert_has(3)


def test_the_publisher_dies_in_the_middle_and_another_publishes(hosts: Hosts) -> None:
    dying = hosts.near.publisher_process()
    hosts.start_relay_when_open()
    engines = hosts.engines(2)
    dying.publish(1, 1)
    assert dying.published().engines == ("relay",)
    dying.publish(1, 2, "kill", BUCKETS // 2)
    dying.wait_until_dead()
    for engine in engines:
        engine.assert_whole(1)
    hosts.publish_when_there(3)
    for engine in engines:
        engine.assert_has(3)


def test_a_publisher_that_freezes_in_the_middle(hosts: Hosts) -> None:
    frozen = hosts.near.publisher_process()
    hosts.start_relay_when_open()
    engines = hosts.engines(2)
    frozen.publish(1, 1)
    assert frozen.published().engines == ("relay",)
    frozen.publish(1, 2, "freeze", BUCKETS // 2)
    frozen.wait_until_stopped()
    for engine in engines:
        engine.assert_whole(1)
    frozen.process.kill()
    frozen.wait_until_dead()
    hosts.publish_when_there(3)
    for engine in engines:
        engine.assert_has(3)


def test_a_frozen_relay_costs_nobody_else_the_version(hosts: Hosts) -> None:
    relay = hosts.start_relay()
    (far,), (near,) = hosts.engines(1), hosts.near.engines(1)
    hosts.near.wait_for(2)
    assert set(hosts.publish(1).engines) == {"e0", "relay"}
    os.kill(relay.pid, signal.SIGSTOP)
    relay.wait_until_stopped()
    result = hosts.publish(2)
    assert (result.engines, set(result.dropped)) == (("e0",), {"relay"})
    near.assert_has(2)
    far.assert_whole(1)
    relay.wake()
    hosts.publish_when_there(3)
    for engine in (near, far):
        engine.assert_has(3)


def test_a_relay_keeps_no_copy_of_the_weights(hosts: Hosts) -> None:
    tensors = {f"w{number}": torch.full((2**20,), float(number)) for number in range(32)}
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with Publisher(hosts.near.place, bucket_bytes=2**20) as publisher:
        relay = hosts.start_relay(publisher=False)
        relay.order("memory")
        before_bytes = relay.answer()
        with Receiver(hosts.far.place, model={name: torch.zeros_like(t) for name, t in tensors.items()}) as engine:
            publisher.begin(TensorSource(tensors), version=1, hold=True)
            assert engine.wait_for(1, DEADLINE_SECONDS)
            assert engine.digest() == digest_weights(tensors)
        relay.order("memory")
        assert relay.answer() - before_bytes < total_bytes / 8


def test_a_stranger_gets_no_weights(hosts: Hosts) -> None:
    notices: list[str] = []
    relay = Relay(hosts.bridge.endpoint, hosts.far.place, token=b"another", on_notice=notices.append)
    thread = threading.Thread(target=relay.run)
    thread.start()
    for _ in until("nothing was said"):
        if notices:
            break
    relay.stop()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert "does not know this job's token" in notices[0]
    assert hosts.near.publisher.engines() == ()


@pytest.mark.parametrize(
    ("token", "said", "answered"),
    [
        (TOKEN, "is gone, or not there yet", 0),  # there is no publisher at the bridge's place
        (b"another", "does not know this job's token", 1),
    ],
    ids=["no publisher", "stranger"],
)
def test_what_goes_wrong_again_and_again_is_said_once(hosts: Hosts, token: bytes, said: str, answered: int) -> None:
    attempts: list[int] = []

    class Counted(Relay):
        def _converse(self) -> None:
            try:
                super()._converse()
            finally:
                attempts.append(1)

    notices: list[str] = []
    relay = Counted(hosts.bridge.endpoint, hosts.far.place, token=token, on_notice=notices.append)
    thread = threading.Thread(target=relay.run)
    thread.start()
    for _ in until("it gives up"):
        if len(attempts) >= 12:
            break
    relay.stop()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert len(notices) == 1, notices
    assert said in notices[0]
    assert len(hosts.near.notices) == answered, hosts.near.notices


def test_a_place_that_is_taken(hosts: Hosts) -> None:
    hosts.start_relay()
    second = Relay(hosts.bridge.endpoint, hosts.far.place, token=TOKEN)
    with pytest.raises(TransferError, match="another publisher is alive"):
        second.run()
