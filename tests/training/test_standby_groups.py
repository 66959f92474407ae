"""A standby's process groups as c10d and a script see them, before and after it is given a rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from relight.errors import UsageError
from tests.training.standby import Standby


def test_groups_chosen_before_and_when_they_are_used_follow_the_rank(standby: Standby) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3], backend="gloo")]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = next(group for group in across if group != dist.GroupMember.NON_GROUP_MEMBER)
    half, _ = dist.new_subgroups(2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert (dist.get_rank(pairs[0]), dist.get_rank(mine)) == (-1, 1)
    assert standby.groups.table.obstacle() == ""
    for rank in (0, 1, 2, 3):
        standby.take(rank)
        pair, other = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert dist.get_process_group_ranks(pairs[rank // 2]) == pair
        assert dist.get_rank(pairs[rank // 2]) == rank % 2
        assert dist.get_process_group_ranks(half) == dist.get_process_group_ranks(mesh.get_group("tp")) == pair
        assert dist.get_process_group_ranks(mine) == dist.get_process_group_ranks(mesh.get_group("dp")) == other
        assert dist.get_rank(mine) == dist.get_group_rank(mine, rank) == rank // 2
        assert mesh.get_coordinate() == (rank // 2, rank % 2)
        assert {group.ranks for group in standby.groups.all if group.has_member} == set(
            standby.groups.table.to_form(rank)
        )


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


@pytest.mark.usefixtures("standby")
def test_uneven_inputs_are_refused() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"Leave join\(\) out"):
        model.join()
    with model.join(enable=False):
        model(torch.ones(1, 2))
