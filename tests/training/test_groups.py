"""Groups that each rank is in, and the names under which members meet; the part of the state that a rank holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.training.collectives.groups import GroupTable, group_name
from relight.training.shards import Cut, batch_groups, shard_key


def mesh_2x2() -> GroupTable:
    """As init_device_mesh makes them: all groups of one dimension, then all of the other."""
    table = GroupTable(4)
    for ranks in ([0, 2], [1, 3], [0, 1], [2, 3]):
        table.add(ranks)
    return table


def test_a_rank_knows_the_groups_of_every_other() -> None:
    table = mesh_2x2()
    assert table.of(0) == [range(4), (0, 2), (0, 1)]
    assert table.of(3) == [range(4), (1, 3), (2, 3)]
    assert table.obstacle() == ""


def test_groups_with_the_same_members_are_formed_once() -> None:
    table = mesh_2x2()
    table.add([0, 1, 2, 3])
    table.add([0, 1])
    table.add([2, 3])
    assert table.of(0) == [range(4), (0, 2), (0, 1), range(4), (0, 1)]
    assert table.to_form(0) == [range(4), (0, 2), (0, 1)]


def test_a_group_that_only_some_ranks_have_is_an_obstacle() -> None:
    table = mesh_2x2()
    table.add([0, 1])
    obstacle = table.obstacle()
    assert "rank 0 is in process groups of 4, 2, 2, 2 ranks, rank 3 in groups of 4, 2, 2" in obstacle
    assert "late_standby=True" in obstacle


def test_a_group_that_is_another_one_of_each_member_is_an_obstacle() -> None:
    """Neighbours in a ring: whether the script has chosen it as its first or its second, no standby could tell."""
    table = GroupTable(3)
    for ranks in ([0, 1], [1, 2], [2, 0]):
        table.add(ranks)
    assert "the process group of ranks 1, 2 is number 1 of those of rank 2, and number 2 of" in table.obstacle()


def test_a_group_is_what_it_was_made_as_to_its_members_and_else_what_the_rank_has_instead() -> None:
    table = mesh_2x2()

    def acting(rank: int) -> list[object]:
        return [table.acting(place, 3, rank) for place in range(5)]

    assert acting(3) == [range(4), (0, 2), (1, 3), (0, 1), (2, 3)]
    assert acting(0) == [range(4), (0, 2), (0, 2), (0, 1), (0, 1)]
    assert acting(1) == [range(4), (0, 2), (1, 3), (0, 1), (0, 1)]  # the first, (0, 2), is skipped: rank 1 is not in it
    table.skips = True
    assert acting(0) == [range(4), (0, 2), (1, 3), (0, 1), (2, 3)]


def test_a_group_of_which_others_do_not_hear_is_an_obstacle() -> None:
    table = GroupTable(4)
    table.add([0, 1], members_only=True)
    assert "use_local_synchronization" in table.obstacle()


def test_names_tell_groups_apart_and_stay_short() -> None:
    table = mesh_2x2()
    names = {group_name(ranks) for rank in range(4) for ranks in table.of(rank)}
    assert names == {"default", "0-2", "1-3", "0-1", "2-3"}
    even, odd = group_name(tuple(range(0, 10_000, 2))), group_name(tuple(range(1, 10_000, 2)))
    assert even != odd
    assert len(even) < 40


@given(st.data())
def test_all_ranks_can_form_their_groups_one_after_the_other(data: st.DataObject) -> None:
    """Whatever groups there are: while some are not formed, one of them is next for all of its members."""
    world = data.draw(st.integers(1, 6))
    table = GroupTable(world)
    for ranks in data.draw(st.lists(st.sets(st.integers(0, world - 1), min_size=1), max_size=8)):
        table.add(sorted(ranks))
    waiting = {rank: list(table.to_form(rank)) for rank in range(world)}
    while any(waiting.values()):
        ready = [
            groups[0]
            for groups in waiting.values()
            if groups and all(waiting[member] and waiting[member][0] == groups[0] for member in groups[0])
        ]
        assert ready, waiting
        for member in ready[0]:
            waiting[member].pop(0)


# --- shard keys -----------------------------------------------------------------------------------------------------
def test_what_is_not_divided_has_no_key() -> None:
    assert shard_key([[], []]) == ""
    assert shard_key([[Cut("shard", 0, 1)]]) == ""


def test_the_key_joins_the_cuts_of_all_tensors() -> None:
    """One tensor is cut along both dimensions, one along one, one not at all: the rank's part differs along both."""
    tp, dp = Cut("tp", 1, 2), Cut("dp_shard", 0, 4)
    assert shard_key([[tp], [dp, tp], []]) == "dp_shard 1/4, tp 2/2"


@given(st.lists(st.lists(st.sampled_from(["a", "b", "c"]), max_size=3), max_size=4), st.permutations(range(4)))
def test_ranks_have_one_key_exactly_if_they_agree_along_every_cut_dimension(
    tensors: list[list[str]], order: list[int]
) -> None:
    sizes = {"a": 2, "b": 2, "c": 3}
    places = [(a, b, c) for a in range(2) for b in range(2) for c in range(3)]
    cut = {name for tensor in tensors for name in tensor}

    def key(place: tuple[int, int, int]) -> str:
        at = dict(zip("abc", place, strict=True))
        shuffled = sorted(tensors, key=lambda tensor: order[len(tensor)])
        return shard_key([Cut(name, at[name], sizes[name]) for name in tensor] for tensor in shuffled)

    for one in places:
        for other in places:
            same = all(x == y for name, x, y in zip("abc", one, other, strict=True) if name in cut)
            assert (key(one) == key(other)) is same


@pytest.mark.parametrize("ranks", [(), (4, 5, 6, 7)])
def test_a_mesh_of_some_ranks_only_is_told_from_others(ranks: tuple[int, ...]) -> None:
    assert shard_key([[Cut("shard", 0, 2, ranks)]]) != shard_key([[Cut("shard", 0, 2, (0, 1, 2, 3))]])


# --- batches --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sizes", "together", "expected"),
    [
        ((4,), (), [(0,), (1,), (2,), (3,)]),
        ((2, 2), (1,), [(0, 1), (2, 3)]),
        ((2, 2), (0,), [(0, 2), (1, 3)]),
        ((2, 2), (0, 1), [(0, 1, 2, 3)]),
        ((2, 2, 2), (2,), [(0, 1), (2, 3), (4, 5), (6, 7)]),
    ],
)
def test_ranks_along_a_tensor_parallel_dimension_share_a_batch(
    sizes: tuple[int, ...], together: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    ranks = [rank for group in expected for rank in group]
    assert batch_groups(sizes, sorted(ranks), together) == expected
