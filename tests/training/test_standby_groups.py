"""What a standby's process groups are to c10d and to a script, before and after it is given a rank."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from relight.errors import UsageError
from relight.training.collectives.groups import GroupTable
from relight.training.job import _create_group, _is_detached, _is_own, _make_group
from relight.training.torch_private.c10d import REFUSED_STORE, adapt
from relight.training.torch_private.mesh import follow_rank, regroup, watch_groups, watch_skips

BUILT_AS = 3
REPLACED = "_process_group_name _warn_not_in_group broadcast_object_list scatter_object_list recv_object_list"


class Standby:
    """Of a job of four ranks: as much of a runtime as its groups ask."""

    closed = False
    launches = 0
    is_standby = True
    builds_late = False
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.table = GroupTable(4)
        self.rank = BUILT_AS
        self.groups: list[Any] = []

    def note_skip(self) -> None:
        self.table.skips = True

    def take(self, rank: int) -> None:
        self.rank = rank
        for group in self.groups:
            group.ranks = self.table.acting(group.place, group.built_as, rank)
            regroup(group, group.ranks)


@pytest.fixture
def standby(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standby]:
    for name in (*REPLACED.split(), "gather_object", "monitored_barrier"):  # put back later
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
        monkeypatch.setattr(dist, name, getattr(distributed_c10d, name), raising=False)
    monkeypatch.setattr(DeviceMesh, "_coordinate_on_dim", None, raising=False)
    runtime: Any = Standby()

    def create(options: Any, _: Any = None) -> Any:
        group = _create_group(runtime, runtime.table.normal(options.global_ranks_in_group), 0)
        group.make_group = functools.partial(_make_group, runtime)
        return group

    dist.Backend.register_backend("relighttest", create, extended_api=True, devices=["cpu"])
    dist.init_process_group("relighttest", store=REFUSED_STORE, rank=BUILT_AS, world_size=4)
    adapt(_is_own, _is_detached)
    watch_groups(lambda ranks, members_only: runtime.table.add(ranks, members_only=members_only))
    watch_skips(runtime.note_skip)
    follow_rank(BUILT_AS)
    yield runtime
    dist.destroy_process_group()
    for kind in ("backend_list", "_plugins", "backend_capability", "backend_type_map"):
        found: Any = getattr(dist.Backend, kind)
        (found.remove if isinstance(found, list) else found.pop)("RELIGHTTEST" if kind == "_plugins" else "relighttest")


def test_groups_chosen_before_and_when_they_are_used_follow_the_rank(standby: Standby) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3], backend="gloo")]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = next(group for group in across if group != dist.GroupMember.NON_GROUP_MEMBER)
    half, _ = dist.new_subgroups(2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert (dist.get_rank(pairs[0]), dist.get_rank(mine)) == (-1, 1)
    assert standby.table.obstacle() == ""
    for rank in (0, 1, 2, 3):
        standby.take(rank)
        pair, other = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert dist.get_process_group_ranks(pairs[rank // 2]) == pair
        assert dist.get_rank(pairs[rank // 2]) == rank % 2
        assert dist.get_process_group_ranks(half) == dist.get_process_group_ranks(mesh.get_group("tp")) == pair
        assert dist.get_process_group_ranks(mine) == dist.get_process_group_ranks(mesh.get_group("dp")) == other
        assert dist.get_rank(mine) == dist.get_group_rank(mine, rank) == rank // 2
        assert mesh.get_coordinate() == (rank // 2, rank % 2)
        assert {group.ranks for group in standby.groups if group.has_member} == set(standby.table.to_form(rank))


def test_a_script_that_relies_on_skipped_operations_has_chosen_no_group(standby: Standby) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(torch.ones(1), group=pairs[1])
    with pytest.warns(UserWarning, match="does not belong to the given group"):
        dist.all_reduce(torch.ones(1), group=pairs[0])
    standby.take(0)
    assert [dist.get_rank(pair) for pair in pairs] == [0, -1]


def test_alone_it_keeps_its_own_values(standby: Standby) -> None:
    pair = dist.new_group([2, 3])
    told: list[object] = [None, None]
    dist.all_gather_object(told, "own", group=pair)
    assert told == ["own", "own"]
    words, none = ["own"], [None]
    dist.broadcast_object_list(words, 2, pair)
    dist.scatter_object_list(none, None, src=0)
    assert (words, none) == (["own"], [None])
    dist.gather_object("own", told, 3, pair)
    assert told == ["own", "own"]
    dist.monitored_barrier(pair)
    dist.barrier()


def test_the_default_store_is_refused_with_what_to_write_instead(standby: Standby) -> None:
    with pytest.raises(UsageError, match="Exchange values with"):
        distributed_c10d._get_default_store().set("key", "value")
