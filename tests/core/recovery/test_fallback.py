"""The fallback tiers: who keeps whose snapshots, and what is gone back to, over everything ranks can report."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.core.controller import Stage
from relight.core.protocol.commands import FallbackTier, Notice, Restore, Resume, Stop
from relight.core.protocol.events import Snapshot, StateDiffers, Stopped
from relight.core.recovery.buddies import choose_buddies
from relight.core.recovery.fallback import (
    FallbackPlan,
    has_gone_back,
    newest_snapshots,
    newest_to_trust,
    plan_fallback,
    worth_keeping,
)
from relight.core.recovery.shards import Shards
from tests.core.test_controller import Desk, one

FSDP = ("shard 1/4", "shard 2/4", "shard 3/4", "shard 4/4")
HSDP = ("shard 1/2", "shard 2/2", "shard 1/2", "shard 2/2")
NOW = 13  # the version of the intact ranks


def report(
    rank: int, *held: tuple[int, int], blank: bool = False, version: int = NOW, checkpoints: tuple[int, ...] = ()
) -> Stopped:
    """`held`: the rank and the version of each snapshot in this process's memory."""
    return Stopped(
        process=f"w{rank}",
        rank=rank,
        generation=2,
        step=version,
        version=0 if blank else version,
        lineage="",
        prepared=-1,
        torn=False,
        blank=blank,
        stop_seconds=0.0,
        restore_address=f"address {rank}",
        snapshots=tuple(Snapshot(rank=of, version=of_version) for of, of_version in held),
        checkpoints=checkpoints,
    )


# --- what must not be overwritten yet -------------------------------------------------------------------------------
TWO = Shards(("shard 1/2", "shard 2/2"))


def test_what_the_next_death_leaves_whole_is_kept() -> None:
    """Rank 1's snapshot of version 8 has yet to be fetched by its buddy: with rank 1 it would be lost."""
    reports = [report(0, (0, 4), (0, 8), (1, 4)), report(1, (1, 4), (1, 8), (0, 4), (0, 8))]
    assert worth_keeping(reports, TWO) == 4
    assert newest_snapshots(reports, TWO) == (8, ((0, 0), (1, 1)))


def test_of_what_is_as_safe_the_newest_is_kept() -> None:
    both = [report(0, (0, 4), (0, 8), (1, 4), (1, 8)), report(1, (1, 4), (1, 8), (0, 4), (0, 8))]
    assert worth_keeping(both, TWO) == 8
    replaced = [report(0, (0, 4), (0, 8), (1, 4), (1, 8)), report(1)]
    assert worth_keeping(replaced, TWO) == 8
    assert worth_keeping([report(0, (0, 8)), report(1)], TWO) == -1


# --- buddies ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "hosts", "buddies"),
    [
        (FSDP, "AAAA", (1, 2, 3, 0)),
        (FSDP, "AABB", (2, 3, 0, 1)),  # on the other host
        (HSDP, "AAAA", (1, 2, 3, 0)),  # of the other part
        (HSDP, "AABB", (3, 2, 1, 0)),  # both
        (HSDP, "ABAB", (1, 2, 3, 0)),  # both: ranks of a host need not be neighbours
        (("", "", ""), "ABC", ()),  # of no use
        (("a",), "A", ()),
        (("a", "b"), "AA", (1, 0)),
    ],
)
def test_buddies(keys: tuple[str, ...], hosts: str, buddies: tuple[int, ...]) -> None:
    chosen = choose_buddies(keys, hosts)
    assert [hosts[b] != hosts[r] for r, b in enumerate(chosen)] == [hosts[b] != hosts[r] for r, b in enumerate(buddies)]
    assert [keys[b] != keys[r] for r, b in enumerate(chosen)] == [keys[b] != keys[r] for r, b in enumerate(buddies)]
    assert sorted(chosen) == sorted(buddies)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 4))
def test_where_it_can_be_buddies_are_on_another_host_and_of_another_part(
    shard: int, replicate: int, hosts: int
) -> None:
    """A mesh of `replicate` times `shard` ranks, laid out over hosts of the same size."""
    ranks = shard * replicate
    keys = [f"shard {rank % shard + 1}/{shard}" for rank in range(ranks)]
    places = [str(rank * hosts // ranks) for rank in range(ranks)]
    buddies = choose_buddies(keys, places)
    assert sorted(buddies) == list(range(ranks))
    assert all(keys[buddy] != keys[rank] for rank, buddy in enumerate(buddies))
    if ranks % hosts == 0 and hosts > 2:  # of two hosts, all ranks of one part may be on each half of a small mesh
        assert all(places[buddy] != places[rank] for rank, buddy in enumerate(buddies))


# --- the decision -------------------------------------------------------------------------------------------------
def snapshots_of_all(version: int, lost: int = -1) -> list[Stopped]:
    """FSDP on four ranks, each of which keeps the snapshots of the one before; `lost` has been replaced."""
    return [
        report(rank, *[] if rank == lost else [(rank, version), ((rank - 1) % 4, version)], blank=rank == lost)
        for rank in range(4)
    ]


def test_one_rank_lost_comes_back_from_its_buddy() -> None:
    plan = plan_fallback("rank 2 is lost", snapshots_of_all(10, lost=2), Shards(FSDP))
    assert plan is not None
    assert (plan.tier, plan.target, plan.targets, plan.sources) == (FallbackTier.BUDDY, 10, (2,), (3,))
    assert plan.places == ((0, 0), (1, 1), (3, 2), (3, 3))


def test_the_newest_version_of_which_all_is_there() -> None:
    reports = snapshots_of_all(10, lost=2)
    newer = [
        msgspec.structs.replace(r, snapshots=(*r.snapshots, Snapshot(rank=r.rank, version=12)))
        for r in reports  # no rank has fetched that of rank 2
        if r.rank != 2
    ]
    plan = plan_fallback("", [*newer[:2], reports[2], newer[2]], Shards(FSDP))
    assert plan is not None
    assert plan.target == 10


def test_a_buddy_that_dies_with_its_ward_leaves_the_checkpoint_on_disk() -> None:
    reports = snapshots_of_all(10, lost=2)
    reports[3] = report(3, blank=True)
    assert plan_fallback("", reports, Shards(FSDP)) is None
    seen = [msgspec.structs.replace(r, checkpoints=(12, 8) if r.rank else (8, 4)) for r in reports]
    plan = plan_fallback("", seen, Shards(FSDP))
    assert plan is not None
    assert (plan.tier, plan.target, plan.targets) == (FallbackTier.CHECKPOINT, 8, ())  # each reads its own part


def test_of_a_checkpoint_each_part_is_read_once() -> None:
    plan = plan_fallback("", [report(rank, checkpoints=(8,)) for rank in range(4)], Shards(HSDP))
    assert plan is not None
    assert (plan.targets, plan.sources) == ((2, 3), (0, 1))


def test_buddy_memory_comes_before_a_newer_checkpoint() -> None:
    reports = [msgspec.structs.replace(r, checkpoints=(12,)) for r in snapshots_of_all(10, lost=2)]
    plan = plan_fallback("", reports, Shards(FSDP))
    assert plan is not None
    assert (plan.tier, plan.target) == (FallbackTier.BUDDY, 10)


def test_the_snapshot_of_another_holder_of_the_part_will_do_if_nothing_else_belongs_to_a_rank() -> None:
    """Ranks 0 and 2 hold the same part; both are lost, and so is one of their buddies."""
    reports = [report(0, blank=True), report(1, (1, 10), (0, 10)), report(2, blank=True), report(3, (3, 10), (2, 10))]
    both = plan_fallback("", reports, Shards(HSDP))
    assert both is not None
    assert both.places == ((1, 0), (1, 1), (3, 2), (3, 3))
    reports[3] = report(3, (3, 10))
    assert plan_fallback("", reports, Shards(HSDP)) is None
    derivable = [msgspec.structs.replace(r, derivable=True) for r in reports]
    one_copy = plan_fallback("", derivable, Shards(HSDP))
    assert one_copy is not None
    assert one_copy.places == ((1, 0), (1, 1), (1, 0), (3, 3))


def test_who_has_gone_back_already_serves_no_snapshot() -> None:
    """Found by the simulator: its own snapshot was said to be in the memory of rank 0, which had come from the disk."""
    stands = msgspec.structs.replace(report(0, version=8, checkpoints=(8,)), derivable=True)
    others = [report(rank, version=8, checkpoints=(8,)) for rank in (1, 3)]
    lost = report(2, blank=True, checkpoints=(8,))  # rank 2 holds the same part as rank 0
    reports = [stands, others[0], lost, others[1]]
    reports = [msgspec.structs.replace(r, derivable=True) for r in reports]
    plan = plan_fallback("", reports, Shards(HSDP), at_most=8)
    assert plan is not None
    assert (plan.tier, plan.target) == (FallbackTier.CHECKPOINT, 8)
    assert has_gone_back(reports, 8)  # so that replicas can help again, and no rank need go down


def test_who_holds_something_else_has_not_gone_back() -> None:
    back = report(0, version=8)
    assert has_gone_back([back, report(1, blank=True)], 8)
    assert not has_gone_back([back, report(1, version=9)], 8)
    assert not has_gone_back([back, msgspec.structs.replace(report(1, version=8), prepared=8)], 8)


def test_a_checkpoint_may_be_newer_than_what_was_gone_back_to() -> None:
    """Found by the simulator: buddy memory was lost in the middle of going back to it, and the job ended."""
    reports = [report(rank, version=5, blank=rank == 2, checkpoints=(12,)) for rank in range(4)]
    plan = plan_fallback("", reports, Shards(FSDP), at_most=5)
    assert plan is not None
    assert (plan.tier, plan.target) == (FallbackTier.CHECKPOINT, 12)


def test_what_is_undone_is_not_gone_forward_to() -> None:
    """A recovery that went back to 5 began again: some stand there already, newer snapshots are worthless."""
    reports = snapshots_of_all(10)
    reports = [msgspec.structs.replace(r, snapshots=(*r.snapshots, Snapshot(rank=r.rank, version=5))) for r in reports]
    assert plan_fallback("", reports, Shards(FSDP), at_most=4) is None
    plan = plan_fallback("", reports, Shards(FSDP), at_most=5)
    assert plan is not None
    assert plan.target == 5
    reports[2] = report(2, version=5)  # restored before the recovery began again; it has no snapshot of its own
    again = plan_fallback("", reports, Shards(FSDP), at_most=5)
    assert again is not None
    assert again.places[2] == (2, 2)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Stopped], Shards]:
    keys = draw(st.sampled_from([FSDP, HSDP, ("", "", "", "")]))
    snapshots = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 5, 10])), max_size=4, unique=True)
    checkpoints = st.sampled_from([(), (8,), (8, 4), (4,)])
    reports = [
        msgspec.structs.replace(
            report(rank, *draw(snapshots), blank=draw(st.booleans()), checkpoints=draw(checkpoints)),
            derivable=draw(st.booleans()),
        )
        for rank in range(4)
    ]
    return reports, Shards(keys)


@given(jobs())
@settings(max_examples=200)
def test_whatever_is_reported(job: tuple[list[Stopped], Shards]) -> None:
    reports, shards = job
    plan = plan_fallback("why", reports, shards)
    found = newest_snapshots(reports, shards)
    assert (found is not None) == (plan is not None and plan.tier is FallbackTier.BUDDY)
    if plan is None or plan.tier is FallbackTier.CHECKPOINT:
        check_no_higher_tier(plan, reports, shards)
        return
    assert {rank for rank, place in enumerate(plan.places) if place != (rank, rank)} == set(plan.targets)
    for rank, (holder, of) in enumerate(plan.places):
        assert Snapshot(rank=of, version=plan.target) in reports[holder].snapshots
        assert shards.key(of) == shards.key(rank)
        assert of == rank or all(r.derivable for r in reports if not r.blank)


def check_no_higher_tier(plan: FallbackPlan | None, reports: list[Stopped], shards: Shards) -> None:
    """No version has a snapshot of every rank; and no newer checkpoint is seen by all."""
    held = [snapshot for r in reports for snapshot in r.snapshots]
    for version in (0, 5, 10):
        assert {s.rank for s in held if s.version == version} != set(range(4))
    seen = set.intersection(*(set(r.checkpoints) for r in reports))
    assert max(seen, default=-1) == (-1 if plan is None else plan.target)
    if plan is not None:
        assert all(shards.key(reader) == shards.key(rank) for rank, (reader, _) in enumerate(plan.places))


# --- the controller -----------------------------------------------------------------------------------------------
class Divided(Desk):
    """FSDP on four ranks with snapshots, in training."""

    def __init__(self, **entered: object) -> None:
        super().__init__(4, 1)
        self.started()
        for rank, process in self.controller.rank_processes().items():
            self.enters(process, rank, shard=FSDP[rank], state_digest=f"part {rank}", buddy_every=5, **entered)
        for standby in self.controller.members.standbys():
            self.warm(standby.name)

    def report(self, reports: list[Stopped]) -> None:
        for rank, process in self.controller.rank_processes().items():
            self.tell(msgspec.structs.replace(reports[rank], process=process, generation=self.controller.generation))

    def go_back(self, version: int) -> None:
        for rank, process in self.controller.rank_processes().items():
            self.restores(process, version, state_digest=f"part {rank} of {version}")


def test_a_lost_part_comes_from_buddy_memory() -> None:
    desk = Divided()
    desk.exits("w2", step=NOW)
    assert desk.controller.stage is Stage.STOPPING
    desk.report(snapshots_of_all(10, lost=2))
    restore = one(desk.said, Restore)
    assert (restore.tier, restore.target, restore.undone, restore.keep) == (FallbackTier.BUDDY, 10, 3, 10)
    assert [(source.rank, source.of) for source in restore.sources] == [(3, 2)]
    assert restore.targets == (2,)
    assert "part shard 3/4 of the state, held by rank 2 only" in restore.why
    assert "3 finished steps are computed again" in one(desk.said, Notice).why
    desk.go_back(10)
    assert sorted(one(desk.said, Resume).buddies) == [0, 1, 2, 3]
    (recovery,) = desk.controller.report().recoveries
    assert (recovery.tier, recovery.steps_undone) == ("buddy memory", 3)


def test_a_second_failure_while_all_go_back() -> None:
    """A rank that had gone back already stays, and what the others hold does not count any more."""
    desk = Divided()
    desk.exits("w2", step=NOW)
    desk.report(snapshots_of_all(10, lost=2))
    desk.exits("w0", step=NOW)
    desk.started()
    for standby in desk.controller.members.standbys():
        desk.warm(standby.name)
    reports = snapshots_of_all(10, lost=0)
    reports[2] = report(2, version=10)  # it was restored; its predecessor's snapshots went with that
    reports[3] = report(3, (3, 10), (2, 10), blank=True)  # it was in the middle of going back
    desk.report(reports)
    restore = one(desk.said, Restore)
    assert (restore.tier, restore.target, restore.undone, restore.targets) == (FallbackTier.BUDDY, 10, 3, (0,))
    desk.go_back(10)
    assert desk.controller.stage is Stage.TRAINING
    desk.exits("w1", step=10)  # from then on it is a recovery like any other
    desk.started()
    for standby in desk.controller.members.standbys():
        desk.warm(standby.name)
    desk.report([report(rank, version=10, blank=rank == 1) for rank in range(4)])
    assert "held by rank 1 only: every copy is lost" in desk.end().error


def test_without_a_snapshot_of_every_part_the_job_ends_and_says_which() -> None:
    desk = Divided()
    desk.exits("w2", step=NOW)
    desk.report([report(2, blank=True) if rank == 2 else report(rank, (rank, 10)) for rank in range(4)])
    assert "part shard 3/4 of the state, held by rank 2 only: every copy is lost" in desk.end().error


def test_replicas_come_first_and_no_snapshot_is_overwritten_meanwhile() -> None:
    desk = Desk(4, 1)
    desk.started()
    for rank, process in desk.controller.rank_processes().items():
        desk.enters(process, rank, shard=HSDP[rank], buddy_every=5)
    desk.warm("w4")
    desk.exits("w2", step=NOW)
    for rank, process in desk.controller.rank_processes().items():
        snapshots = () if rank == 2 else snapshots_of_all(10)[rank].snapshots
        desk.stands(process, NOW, snapshots=snapshots)
    restore = one(desk.said, Restore)
    assert (restore.tier, restore.target, restore.keep) == (FallbackTier.REPLICA, NOW, 10)
    assert [(source.rank, source.of) for source in restore.sources] == [(0, -1)]


def test_ranks_must_agree_on_how_often() -> None:
    desk = Desk(2)
    desk.started()
    desk.enters("w0", 0, shard="a", buddy_every=5)
    desk.enters("w1", 1, shard="b", buddy_every=4)
    assert "call training.buddy(every=...) alike on every rank" in desk.end().error


# --- replicas that differ, without a majority ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("agreed", "differed_at", "newest"),
    [
        ((-1, -1), -1, None),  # anything
        ((4, 8), 12, 8),  # one rank may not have heard of the last comparison
        ((8, 8), 8, 7),  # the bit changed after the comparison of that very version
        ((-1, -1), 4, -1),  # they were never compared
    ],
)
def test_what_may_be_trusted(agreed: tuple[int, ...], differed_at: int, newest: int | None) -> None:
    reports = [msgspec.structs.replace(report(rank), agreed=version) for rank, version in enumerate(agreed)]
    assert newest_to_trust(reports, differed_at) == newest


def test_no_tier_goes_back_to_what_is_not_trusted() -> None:
    reports = [msgspec.structs.replace(r, checkpoints=(12, 4)) for r in snapshots_of_all(10)]
    plan = plan_fallback("", reports, Shards(FSDP), at_most=10, trusted=9)
    assert plan is not None
    assert (plan.tier, plan.target) == (FallbackTier.CHECKPOINT, 4)
    assert plan_fallback("", reports, Shards(FSDP), trusted=3) is None


def differing(**entered: int) -> Desk:
    desk = Desk(world_size=2)
    desk.started()
    for rank, process in desk.controller.rank_processes().items():
        desk.enters(process, rank, **entered)
    event = StateDiffers(process="w0", rank=0, generation=1, step=8, digests=(1, 2), noticed_ns=1)
    desk.tell(event)
    return desk


def test_without_a_fallback_tier_it_ends() -> None:
    assert "no majority tells which is right" in differing().end().error


def test_all_go_back_to_a_checkpoint_of_a_version_that_agreed() -> None:
    desk = differing(checkpoint_every=2)
    assert desk.controller.stage is Stage.STOPPING
    desk.stands("w0", 8, checkpoints=(8, 6, 4, 2), agreed=4)
    restore = one(desk.stands("w1", 8, checkpoints=(8, 6, 4, 2), agreed=4), Restore)
    assert (restore.tier, restore.target, restore.distrust) == (FallbackTier.CHECKPOINT, 4, 8)
    assert "rank 0; rank 1, and no majority" in restore.why
    desk.restores("w0", 4)
    assert one(desk.restores("w1", 4), Resume)
    desk.exits("w1", step=5)  # a later failure is one like any other
    assert desk.controller.stage is Stage.STOPPING


def test_a_failure_on_the_way_does_not_make_them_trusted_again() -> None:
    desk = differing(checkpoint_every=2)
    for process in ("w0", "w1"):
        desk.stands(process, 8, checkpoints=(4,), agreed=4)
    desk.exits("w1", step=8)
    assert one(desk.said, Stop).generation == 3
    desk.started()
    (standby,) = desk.controller.members.standbys()
    desk.warm(standby.name)
    desk.stands("w0", 8, checkpoints=(8, 4), agreed=4)
    restore = one(desk.stands(standby.name, 0, blank=True, checkpoints=(8, 4)), Restore)
    assert (restore.target, restore.distrust) == (4, 8)


def test_nothing_from_before_ends_the_job_and_nothing_is_saved() -> None:
    desk = differing(checkpoint_every=2)
    for process in ("w0", "w1"):
        desk.stands(process, 8, checkpoints=(8, 6), agreed=4)
    assert "No buddy and no checkpoint holds a version from before that" in desk.end().error
    assert "agreed last at version 4" in desk.end().error
