"""The private interfaces of DeviceMesh, DTensor and c10d's groups, each tried on the installed version."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend "fake" known

from relight.errors import UsageError
from relight.training.shards import Cut, shard_key
from relight.training.torch_private.distributed.mesh import (
    as_part_like,
    batch_place,
    cuts_of,
    dimensions_of,
    fit_part,
    follow_rank,
    is_distributed,
    is_of_first_copy,
    regroup,
    watch_groups,
)

PROVISIONAL = 3


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[int], bool]]]:
    """Rank 3 of four, on groups that complete alone; the list fills with the groups that are made."""
    dist.init_process_group("fake", store=HashStore(), rank=PROVISIONAL, world_size=4)
    found: list[tuple[list[int], bool]] = []
    monkeypatch.setattr(distributed_c10d, "_process_group_name", distributed_c10d._process_group_name)  # put back later
    watch_groups(lambda ranks, *, members_only: found.append((list(ranks), members_only)))
    yield found
    dist.destroy_process_group()


def mesh_2x2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_every_group_of_a_mesh_is_seen_whoever_is_in_it(made: list[tuple[list[int], bool]]) -> None:
    mesh_2x2()
    assert made == [([0, 2], False), ([1, 3], False), ([0, 1], False), ([2, 3], False)]


def test_a_group_made_by_its_members_alone_is_told_from_others(made: list[tuple[list[int], bool]]) -> None:
    dist.new_group([3, 1], use_local_synchronization=True)
    assert made == [([1, 3], True)]


def test_cuts_follow_placements_and_the_place_in_the_mesh(made: object) -> None:
    mesh = mesh_2x2()
    both = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)])
    one = distribute_tensor(torch.zeros(4, 4), mesh["tp"], [Shard(0)])
    none = distribute_tensor(torch.zeros(4, 4), mesh, [Replicate(), Replicate()])
    assert list(cuts_of(both, 4, "w")) == [Cut("dp", 1, 2), Cut("tp", 1, 2)]
    assert list(cuts_of(one, 4, "w")) == [Cut("tp", 1, 2)]
    assert list(cuts_of(none, 4, "w")) == []
    assert list(cuts_of(torch.zeros(2), 4, "w")) == []
    assert shard_key(cuts_of(tensor, 4, "w") for tensor in (one, none)) == "tp 2/2"


def test_a_mesh_of_some_ranks_names_them(made: object) -> None:
    tensor = distribute_tensor(torch.zeros(4), DeviceMesh("cpu", [2, 3]), [Shard(0)])
    assert list(cuts_of(tensor, 4, "w")) == [Cut("dimension 0", 1, 2, (2, 3))]


def test_what_is_not_reduced_yet_is_refused(made: object) -> None:
    tensor = DTensor.from_local(torch.zeros(2), mesh_2x2(), [Partial(), Replicate()])
    with pytest.raises(UsageError, match="w is a DTensor that is not reduced yet"):
        list(cuts_of(tensor, 4, "w"))


@pytest.fixture
def moving(made: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """As in a standby: the rank of this process is whatever stands in the list."""
    rank = [PROVISIONAL]
    monkeypatch.setattr(dist, "get_rank", lambda group=None: rank[0])
    monkeypatch.setattr("torch.distributed.device_mesh.get_rank", lambda group=None: rank[0])
    follow_rank(PROVISIONAL)
    yield rank
    delattr(DeviceMesh, "_coordinate_on_dim")


def test_meshes_follow_the_rank(moving: list[int]) -> None:
    mesh = mesh_2x2()
    part = mesh["tp"]
    places = []
    for moving[0] in range(4):
        places.append((tuple(mesh.get_coordinate() or ()), tuple(part.get_coordinate() or ()), part.mesh.tolist()))
    assert places == [
        ((0, 0), (0,), [0, 1]),
        ((0, 1), (1,), [0, 1]),
        ((1, 0), (0,), [2, 3]),
        ((1, 1), (1,), [2, 3]),
    ]


def test_a_mesh_that_this_rank_is_not_in_has_no_place_for_it(moving: list[int]) -> None:
    mesh = DeviceMesh("cpu", [2, 3])
    moving[0] = 1
    assert mesh.get_coordinate() is None


def test_a_divided_tensor_gets_room_for_another_ranks_part(moving: list[int]) -> None:
    mesh = mesh_2x2()
    tensor = distribute_tensor(torch.zeros(5, 3), mesh["tp"], [Shard(0)])
    assert tensor.to_local().shape == (2, 3)
    moving[0] = 2
    fit_part(tensor)
    assert tensor.to_local().shape == (3, 3)
    assert tensor.shape == (5, 3)


def test_the_place_among_the_batches_is_that_of_the_tensor_parallel_group(made: object) -> None:
    mesh = mesh_2x2()
    cut = distribute_tensor(torch.zeros(4, 4), mesh["tp"], [Shard(0)])
    assert [batch_place([cut], (), rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    both = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)])
    assert [batch_place([both], dimensions_of(mesh["dp"]), rank, 4) for rank in range(4)] == [0, 0, 1, 1]


def test_one_copy_of_what_differs_between_replicas_is_rank_0s(moving: list[int]) -> None:
    mesh = mesh_2x2()
    plain = torch.zeros(4)
    along_tp = distribute_tensor(torch.zeros(4), mesh["tp"], [Shard(0)])
    along_dp = distribute_tensor(torch.zeros(4), mesh, [Shard(0), Replicate()])
    both = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)])
    found: dict[str, list[int]] = {name: [] for name in ("plain", "along_tp", "along_dp", "both")}
    for moving[0] in range(4):
        for (name, ranks), tensor in zip(found.items(), (plain, along_tp, along_dp, both), strict=True):
            if is_of_first_copy(tensor, (moving[0],), name):
                ranks.append(moving[0])
    assert found == {"plain": [0], "along_tp": [0, 1], "along_dp": [0, 2], "both": [0, 1, 2, 3]}


def test_in_a_pipeline_each_stage_has_such_a_copy(moving: list[int]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    part = distribute_tensor(torch.zeros(4), mesh["tp"], [Shard(0)])
    whole = distribute_tensor(torch.zeros(4), mesh["tp"], [Replicate()])
    pipelines = [(0, 2), (1, 3), (0, 2), (1, 3)]
    found = []
    for moving[0], pipeline in enumerate(pipelines):
        found.append([is_of_first_copy(tensor, pipeline, "x") for tensor in (part, whole, torch.zeros(4))])
    assert found == [[True, True, True], [True, False, False], [True, True, True], [True, False, False]]
    with pytest.raises(UsageError, match="does not tell its place from rank 0's"):
        is_of_first_copy(part, (0, 1, 2), "x")


def test_along_dimensions_of_data_every_rank_has_its_own_batch(made: object) -> None:
    mesh = mesh_2x2()
    cut = distribute_tensor(torch.zeros(4, 4), mesh, [Replicate(), Shard(0)])
    assert [batch_place([cut], dimensions_of(mesh), rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert batch_place([torch.zeros(2)], (), 3, 4) == 3
    whole = init_device_mesh("cpu", (4,))  # without names
    row = distribute_tensor(torch.zeros(4), whole, [Shard(0)])
    assert batch_place([row], dimensions_of(whole), 2, 4) == 2
    assert batch_place([row], (), 2, 4) == 0


def test_a_flattened_dimension_is_those_that_it_is_made_of(made: object) -> None:
    """With expert parallelism every rank has a batch of its own, though experts are divided among them."""
    mesh = mesh_2x2()
    everyone = mesh._flatten("everyone")
    assert dimensions_of(everyone) == dimensions_of(mesh)
    experts = distribute_tensor(torch.zeros(4, 4), mesh["tp"], [Shard(0)])
    assert [batch_place([experts], dimensions_of(everyone), rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    deep = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    some = {index for _, index in dimensions_of(deep["b", "c"]._flatten("bc"))}
    assert some == {1, 2}


def test_in_a_pipeline_ranks_share_a_batch_along_all_dimensions_but_those_of_data(made: object) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    weight = distribute_tensor(torch.zeros(4, 4), mesh["dp"], [Replicate()])
    by_data = dimensions_of(mesh["dp"])
    assert [batch_place([weight], by_data, rank, 4, pipelines=True) for rank in range(4)] == [0, 1, 0, 1]
    assert [batch_place([weight], by_data, rank, 4) for rank in range(4)] == [0, 1, 2, 3]


def test_an_optimizers_state_is_divided_like_its_parameter(made: object) -> None:
    parameter = distribute_tensor(torch.zeros(5, 3), mesh_2x2(), [Replicate(), Shard(0)])
    moment = as_part_like(torch.ones(2, 3), parameter)
    assert is_distributed(moment)
    assert not is_distributed(torch.ones(1))
    assert (moment.placements, moment.shape) == (parameter.placements, parameter.shape)  # type: ignore[attr-defined]
    moment.mul_(2.0)
    assert moment.to_local().tolist() == [[2.0] * 3] * 2  # type: ignore[attr-defined]


def test_a_group_with_other_members_has_another_rank_in_it(made: object) -> None:
    group = mesh_2x2().get_group("tp")
    assert dist.get_process_group_ranks(group) == [2, 3]
    regroup(group, (0, 3))
    assert dist.get_process_group_ranks(group) == [0, 3]
    assert distributed_c10d.get_group_rank(group, 3) == 1
