"""Divided state: who holds what, when a part is lost, and what that means for decisions and for what is survived."""

from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.core.protocol.events import Stopped
from relight.core.recovery.buddies import choose_buddies
from relight.core.recovery.coverage import Coverage, coverage, describe
from relight.core.recovery.decision import Decision, Halt, decide
from relight.core.recovery.shards import Shards, content_mismatch, require_every_part

HSDP = ("shard 1/2", "shard 2/2", "shard 1/2", "shard 2/2")


def test_plain_replication_has_one_part_and_no_keys() -> None:
    shards = Shards(["", "", ""])
    assert not shards.divided
    assert shards.key(2) == ""
    assert not shards.lacks([1])
    assert shards.lacks([])
    assert shards.digest(["d", "d", "d"]) == "d"
    assert content_mismatch(shards, ["d", "d", "e"]) == (0, 2)


def test_ranks_with_the_same_key_hold_the_same_part() -> None:
    shards = Shards(HSDP)
    assert shards.divided
    assert dict(shards.groups()) == {"shard 1/2": (0, 2), "shard 2/2": (1, 3)}
    assert content_mismatch(shards, ["a", "b", "a", "b"]) is None
    assert content_mismatch(shards, ["a", "b", "a", "c"]) == (1, 3)


def test_the_digest_of_the_whole_depends_on_each_part() -> None:
    shards = Shards(HSDP)
    whole = shards.digest(["a", "b", "a", "b"])
    assert whole != shards.digest(["a", "c", "a", "c"])
    assert whole != shards.digest(["b", "a", "b", "a"])


def test_what_is_lost_is_named_with_its_holders() -> None:
    shards = Shards(HSDP)
    assert shards.lost([0, 1]) == ""
    assert shards.lost([0, 2]) == "part shard 2/2 of the state, held by ranks 1, 3 only: every copy is lost"
    many = Shards([f"shard {rank + 1}/9" for rank in range(9)])
    assert many.lost([8]).endswith("and 4 other parts: every copy is lost")


# --- decisions ----------------------------------------------------------------------------------------------------
BASE = 5


def report(rank: int, kind: str) -> Stopped:
    """`kind`: b(lank), t(orn), u(nprepared), p(repared) or f(inished)."""
    version = 0 if kind == "b" else BASE + (kind == "f")
    return Stopped(
        process=f"w{rank}",
        rank=rank,
        generation=2,
        step=BASE,
        version=version,
        lineage="" if kind == "b" else f"lineage {version}",
        prepared=BASE if kind == "p" else -1,
        torn=kind == "t",
        blank=kind == "b",
        stop_seconds=0.0,
        restore_address=f"address {rank}",
    )


def decided(kinds: str, keys: tuple[str, ...] = HSDP) -> Decision | Halt:
    reports = [report(rank, kind) for rank, kind in enumerate(kinds)]
    held = {rank: {BASE, BASE + 1} for rank, kind in enumerate(kinds) if kind == "b"}
    return require_every_part(decide(reports, held, len(kinds)), Shards(keys))


@pytest.mark.parametrize(
    ("kinds", "target"),
    [
        ("buuu", BASE),
        ("bupp", BASE),  # one survivor of another part is unprepared: back, for every part
        ("bppp", BASE + 1),
        ("bfpf", BASE + 1),
        ("bbpp", BASE + 1),
        ("tupp", BASE),
    ],
)
def test_one_decision_for_all_parts(kinds: str, target: int) -> None:
    decision = decided(kinds)
    assert isinstance(decision, Decision)
    assert decision.target == target


@pytest.mark.parametrize("kinds", ["bubu", "bpbp", "tpbf", "bftf"])
def test_a_part_without_an_intact_holder_ends_the_job_and_is_named(kinds: str) -> None:
    decision = decided(kinds)
    assert isinstance(decision, Halt)
    assert decision.reason == "part shard 1/2 of the state, held by ranks 0, 2 only: every copy is lost"


def test_plain_replication_is_decided_as_ever() -> None:
    assert isinstance(decided("bpbp", ("", "", "", "")), Decision)
    assert decided("bbbb", ("", "", "", "")) == decide([report(rank, "b") for rank in range(4)], {}, 4)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_part_can_reach_the_target_from_its_own_holders(data: st.DataObject) -> None:
    parts, copies = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    world = parts * copies
    order = data.draw(st.permutations(range(world)))
    keys = tuple(f"part {order[rank] % parts}" for rank in range(world))
    kinds = data.draw(st.text("btup" if data.draw(st.booleans()) else "btpf", min_size=world, max_size=world))
    decision = decided(kinds, keys)
    intact = {rank for rank in range(world) if kinds[rank] in "upf"}
    if {keys[rank] for rank in intact} != set(keys):
        assert isinstance(decision, Halt)
        return
    assert isinstance(decision, Decision), decision
    for rank in range(world):
        if rank in intact:
            reached = BASE + (kinds[rank] == "f") + (rank in decision.finishers)
            assert reached == decision.target
            assert kinds[rank] == "p" or rank not in decision.finishers
        else:
            assert rank in decision.targets
            assert any(keys[source] == keys[rank] for source in decision.sources)


# --- what is survived ---------------------------------------------------------------------------------------------
def covered(keys: tuple[str, ...], hosts: tuple[str, ...]) -> Coverage:
    return coverage(Shards(keys).groups(), hosts, {})


def losses(keys: tuple[str, ...], hosts: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    return {loss.what: (loss.survived, loss.cases) for loss in covered(keys, hosts).losses}


def test_hsdp_on_two_hosts_with_a_replica_on_each() -> None:
    assert losses(HSDP, ("a", "a", "b", "b")) == {
        "a device": (4, 4),
        "two devices": (4, 6),
        "a host": (2, 2),
        "two hosts": (0, 1),
        "a host and a device elsewhere": (0, 4),
    }


def test_hsdp_on_two_hosts_with_a_part_on_each() -> None:
    """A mesh laid the other way: no host can be lost."""
    found = losses(HSDP, ("a", "b", "a", "b"))
    assert found["a host"] == (0, 2)
    assert found["two devices"] == (4, 6)


def test_sharding_without_replicas_survives_nothing() -> None:
    found = losses(("shard 1/2", "shard 2/2"), ("a", "a"))
    assert found == {"a device": (0, 2), "two devices": (0, 1), "a host": (0, 1)}


def test_the_fatal_cases_are_named() -> None:
    found = covered(HSDP, ("a", "a", "b", "b"))
    named = {loss.what: loss.examples for loss in found.losses}
    assert named["two devices"] == ("ranks 0 and 2", "ranks 1 and 3")
    assert named["two hosts"] == ("a and b",)
    assert named["a host and a device elsewhere"] == ("a and rank 2", "a and rank 3", "b and rank 0", "b and rank 1")


def test_it_is_said_in_words() -> None:
    groups = Shards(HSDP).groups()
    lines = describe(coverage(groups, ("a", "a", "b", "b"), dict.fromkeys(groups, 3 * 2**20)))
    assert lines == (
        "the state is divided into 2 parts, up to 3.0 MiB of parameters each, each held by 2 ranks; "
        "a loss is survived if each part keeps a holder:",
        "  losing a device: always survived",
        "  losing two devices: survived in 4 of 6 cases, not if it is ranks 0 and 2; ranks 1 and 3",
        "  losing a host: always survived",
        "  losing two hosts: never survived: the job ends",
        "  losing a host and a device elsewhere: never survived: the job ends",
        "  one more replica would need 2 devices, with 9.0 MiB of state each",
        "  training.buddy(every=...) would take 36.0 MiB of host memory for each rank, and survive the loss of any one "
        "device",
    )


def test_ten_thousand_ranks_are_counted_not_tried() -> None:
    keys = tuple(f"shard {rank % 5000 + 1}/5000" for rank in range(10_000))
    hosts = tuple(f"node-{rank // 8}" for rank in range(10_000))
    found = losses(keys, hosts)
    assert found["two devices"] == (49_995_000 - 5_000, 49_995_000)
    assert found["a host"] == (1250, 1250)
    assert found["two hosts"] == (780_625 - 625, 780_625)
    assert found["a host and a device elsewhere"] == (12_490_000 - 10_000, 12_490_000)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_counts_are_those_of_trying_every_case(data: st.DataObject) -> None:
    world = data.draw(st.integers(2, 8))
    keys = tuple(data.draw(st.lists(st.sampled_from(["p", "q", "r"]), min_size=world, max_size=world)))
    hosts = tuple(data.draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=world, max_size=world)))
    groups = Shards(keys).groups()
    names = sorted(set(hosts))

    def survives(*lost: int | str) -> bool:
        left = {key for rank, key in enumerate(keys) if rank not in lost and hosts[rank] not in lost}
        return left == set(keys)

    ranks = range(world)
    expected = {
        "a device": [survives(rank) for rank in ranks],
        "two devices": [survives(*pair) for pair in combinations(ranks, 2)],
        "a host": [survives(name) for name in names],
    }
    if len(names) > 1:
        expected["two hosts"] = [survives(*pair) for pair in combinations(names, 2)]
        elsewhere = [(name, rank) for name in names for rank in ranks if hosts[rank] != name]
        expected["a host and a device elsewhere"] = [survives(*pair) for pair in elsewhere]
    found = {loss.what: (loss.survived, loss.cases) for loss in coverage(groups, hosts, {"p": 1}).losses}
    assert found == {what: (sum(cases), len(cases)) for what, cases in expected.items()}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_buddies_save_is_counted_as_by_trying_every_case(data: st.DataObject) -> None:
    world = data.draw(st.integers(2, 8))
    keys = tuple(data.draw(st.lists(st.sampled_from(["p", "q", "r"]), min_size=world, max_size=world)))
    hosts = tuple(data.draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=world, max_size=world)))
    buddies = choose_buddies(keys, hosts)
    names = sorted(set(hosts))

    def saved(*lost: int | str) -> bool:
        gone = {rank for rank in range(world) if rank in lost or hosts[rank] in lost}
        is_fatal = {key for rank, key in enumerate(keys) if rank not in gone} != set(keys)
        return bool(buddies) and is_fatal and not any(buddies[rank] in gone for rank in gone)

    ranks = range(world)
    expected = {
        "a device": sum(saved(rank) for rank in ranks),
        "two devices": sum(saved(*pair) for pair in combinations(ranks, 2)),
        "a host": sum(saved(name) for name in names),
    }
    if len(names) > 1:
        expected["two hosts"] = sum(saved(*pair) for pair in combinations(names, 2))
        elsewhere = [(name, rank) for name in names for rank in ranks if hosts[rank] != name]
        expected["a host and a device elsewhere"] = sum(saved(*pair) for pair in elsewhere)
    found = coverage(Shards(keys).groups(), hosts, {}, buddies, 10).losses
    assert {loss.what: loss.from_buddies for loss in found} == expected


def test_tiers_are_said_in_words() -> None:
    keys = tuple(f"shard {rank + 1}/4" for rank in range(4))
    groups = Shards(keys).groups()
    mib = dict.fromkeys(groups, 2**20)
    without = describe(coverage(groups, ("a",) * 4, mib))
    assert without[1] == "  losing a device: never survived: the job ends"
    assert without[-2:] == (
        "  one more replica would need 4 devices, with 3.0 MiB of state each",
        "  training.buddy(every=...) would take 12.0 MiB of host memory for each rank, and survive the loss of any one "
        "device",
    )
    buddies = choose_buddies(keys, ("a",) * 4)
    lines = describe(coverage(groups, ("a",) * 4, mib, buddies, 10, 500))
    assert lines[1:4] == (
        "  losing a device: always survived, from buddy memory",
        "  losing two devices: of 6 cases 2 from buddy memory, 4 from a checkpoint",
        "  losing a host: always survived, from a checkpoint",
    )
    assert any(line.startswith("  from buddy memory at most about 10 steps are computed again") for line in lines)
    only_buddies = describe(coverage(groups, ("a",) * 4, mib, buddies, 10))
    assert only_buddies[2] == "  losing two devices: of 6 cases 2 from buddy memory, in 4 the job ends"


def test_it_can_be_written_as_json_and_read_again() -> None:
    found = covered(HSDP, ("a", "a", "b", "b"))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Coverage) == found
