"""A replacement finds the batch that its predecessor would have drawn next."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from relight.core.protocol.position import BATCH_MARK, INHERITED_MARK_OFFSET
from relight.errors import UsageError
from relight.training.connection.page import PositionPage
from relight.training.data.batches import Batches
from relight.training.state.digest import batch_digest
from relight.transfer.io.codec import decode_tree, encode_tree

DATA = TensorDataset(torch.arange(40.0))


def make_loader(kind: str, rank: int = 1) -> Any:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, 2, rank, shuffle=True, seed=3)
    if kind == "stateful":
        return StatefulDataLoader(DATA, batch_size=4, sampler=sampler)
    if kind == "random sampler":
        return DataLoader(DATA, batch_size=4, shuffle=True)
    if kind == "workers":
        return DataLoader(DATA, batch_size=4, sampler=sampler, num_workers=1)
    return DataLoader(DATA, batch_size=4, sampler=sampler)


def make_batches(data: Any, accumulate: int = 1, streams: str = "step") -> Batches:
    return Batches(data, accumulate, 7, streams, PositionPage(-1))


def flat(batch: Any) -> list[float]:
    return torch.cat([t.flatten() for t in torch.utils._pytree.tree_leaves(batch)]).tolist()


@pytest.mark.parametrize("kind", ["loader", "stateful", "random sampler", "workers"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_replacement_continues_with_the_same_batches(kind: str, accumulate: int) -> None:
    original = make_batches(make_loader(kind), accumulate)
    original.start(0, 1)
    expected, private = [], []
    for step in range(8):  # more than one epoch
        private.append(encode_tree(original.private(), "p"))
        expected.append(flat(original.get(step, 1)))
        original.done()
    for start in (0, 1, 3, 5, 7):
        replacement = make_batches(make_loader(kind, rank=0), accumulate)  # built before it knew its rank
        replacement.rehearse(0)
        replacement.take_over(decode_tree(private[start]), start, 1)
        for step in range(start, 8):
            assert flat(replacement.get(step, 1)) == expected[step]
            replacement.done()


def test_epochs_are_shuffled_differently() -> None:
    batches = make_batches(make_loader("loader"))
    batches.start(0, 0)
    drawn = []
    for step in range(10):
        drawn.append(flat(batches.get(step, 0)))
        batches.done()
    assert drawn[:5] != drawn[5:]
    assert all(len({value for batch in epoch for value in batch}) == 20 for epoch in (drawn[:5], drawn[5:]))
    assert [batches.epoch(step) for step in (0, 4, 5, 9)] == [0, 0, 1, 1]


def test_a_redo_gets_the_same_batch_object() -> None:
    batches = make_batches(make_loader("loader"))
    batches.start(0, 0)
    assert batches.get(0, 0) is batches.get(0, 0)


@pytest.mark.parametrize(
    "made",
    [
        lambda size: torch.zeros(size, 2),
        lambda size: {"x": [torch.zeros(3), numpy.zeros(size)]},
        lambda size: ["text"] * size,
        None,
    ],
)
def test_tells_whether_a_batch_has_other_sizes_than_the_one_before_it(made: Any) -> None:
    sizes = (4, 4, 3, 3, 4)
    batches = make_batches(made and (lambda number: made(sizes[number])))
    found = []
    for step in range(len(sizes)):
        batches.get(step, 0)
        batches.get(step, 0)  # a redo
        found.append(batches.has_other_sizes)
        batches.done()
    assert found == ([False, False, True, False, True] if made else [False] * 5)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_have_no_sizes_to_compare(layout: torch.layout) -> None:
    batches = make_batches(lambda n: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3 + n)], layout=layout))
    for step in range(2):
        batches.get(step, 0)
        assert not batches.has_other_sizes
        batches.done()


@pytest.mark.parametrize("kind", ["loader", "stateful"])
def test_a_batch_that_the_script_changed_in_place_is_drawn_again(kind: str) -> None:
    page = PositionPage(-1)
    batches = Batches(make_loader(kind), 1, 7, "step", page)
    batches.start(0, 1)
    page.write_private(0, encode_tree(batches.private(), "p"))
    first = batches.get(0, 1)
    expected = flat(first)
    first[0].add_(1000)
    assert flat(batches.get(0, 1)) == expected


@pytest.mark.parametrize("streams", ["step", "preserve"])
def test_a_redo_draws_the_same_random_numbers(streams: str) -> None:
    batches = make_batches(lambda number: torch.full((2,), float(number)), streams=streams)
    batches.start(0, 0)
    batches.private()
    batches.get(0, 0)
    first = torch.randn(3)
    batches.get(0, 0)
    assert torch.equal(torch.randn(3), first)


def test_streams_differ_between_steps_and_ranks() -> None:
    batches = make_batches(lambda number: number)
    draws = set()
    for step, rank in ((0, 0), (1, 0), (0, 1)):
        batches.get(step, rank)
        draws.add(float(torch.rand(())))
        batches.done()
    assert len(draws) == 3


def test_preserved_streams_do_not_count_draws_between_steps() -> None:
    def run(noise: bool) -> list[float]:
        torch.manual_seed(5)
        batches = make_batches(lambda number: number, streams="preserve")
        batches.private()
        drawn = []
        for step in range(3):
            if noise:
                torch.rand(10)
            batches.get(step, 0)
            drawn.append(float(torch.rand(())))
            batches.private()
            batches.done()
        return drawn

    assert run(noise=False) == run(noise=True)


def test_private_state_that_is_kept_again_between_steps_has_the_streams_of_the_barrier() -> None:
    torch.manual_seed(5)
    batches = make_batches(lambda number: number, streams="preserve")
    batches.private()
    batches.get(0, 0)
    torch.rand(3)
    kept = encode_tree(batches.private(), "p")
    batches.done()
    torch.rand(10)
    assert encode_tree(batches.private(between=True), "p") == kept


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, numpy.random.rand])
def test_draws_are_seen_where_streams_run_on_from_step_to_step(draw: Any) -> None:
    for streams, is_seen in (("preserve", True), ("step", False)):
        batches = make_batches(lambda number: number, streams=streams)
        before = batches.look()
        assert batches.look() == before
        draw()
        assert (batches.look() != before) == is_seen


def test_a_replacement_that_draws_another_batch_is_stopped() -> None:
    page = PositionPage(-1)
    batches = Batches(lambda number: torch.full((4,), 1.0), 1, 7, "step", page)
    BATCH_MARK.pack_into(page._map, INHERITED_MARK_OFFSET, 3, batch_digest(torch.full((4,), 2.0)))
    batches.take_over(decode_tree(encode_tree(batches.private(), "p")), 3, 0)
    with pytest.raises(UsageError, match=r"drew another batch for step 3.*without a seed"):
        batches.get(3, 0)


@pytest.mark.parametrize("data", [iter([1, 2]), {1, 2}, 5], ids=["iterator", "set", "number"])
def test_data_without_a_position_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match="hand over a DataLoader"):
        make_batches(data)


def test_an_empty_loader_is_refused() -> None:
    empty = DataLoader(TensorDataset(torch.zeros(0)), batch_size=4)
    batches = make_batches(empty)
    with pytest.raises(UsageError, match="empty"):
        batches.start(0, 0)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one batch"):
        make_batches(None, accumulate=0)
    with pytest.raises(UsageError, match="preserve"):
        make_batches(None, streams="sometimes")


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset that draws random numbers, in the main process, for each item."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2) + index


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("streams", ["step", "preserve"])
def test_augmentation_is_repeated_in_the_middle_of_an_epoch(streams: str, shuffle: bool) -> None:
    def make() -> Batches:
        return make_batches(DataLoader(Augmented(), batch_size=4, shuffle=shuffle), streams=streams)

    torch.manual_seed(1)
    original = make()
    original.start(0, 1)
    expected, private = [], []
    for step in range(6):
        private.append(encode_tree(original.private(), "p"))
        expected.append((flat(original.get(step, 1)), float(torch.rand(()))))
        original.done()
    torch.manual_seed(99)
    replacement = make()
    replacement.take_over(decode_tree(private[3]), 3, 1)
    for step in range(3, 6):
        assert (flat(replacement.get(step, 1)), float(torch.rand(()))) == expected[step]
        replacement.private()
        replacement.done()


def test_the_mark_of_a_batch_depends_on_its_values_alone() -> None:
    data = torch.randn(288, 16, generator=torch.Generator().manual_seed(7))
    marks = {batch_digest((data[5::8], "label")) for _ in range(50)}
    assert len(marks) == 1
    assert batch_digest((data[6::8], "label")) not in marks
