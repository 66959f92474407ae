"""Batches that a step gets where an epoch does not divide into groups."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from relight.errors import UsageError
from relight.training.connection.page import PositionPage
from relight.training.data.batches import Batches
from relight.training.data.grouping import Groups
from relight.transfer.io.codec import decode_tree, encode_tree


@pytest.mark.parametrize(("size", "epoch"), [(1, 5), (2, 5), (3, 5), (5, 5), (7, 5), (2, 4)])
def test_groups_hold_every_batch_once_and_none_of_two_epochs(size: int, epoch: int) -> None:
    groups = Groups(size, epoch)
    number = 0
    for step in range(3 * groups.steps_in_an_epoch):
        assert groups.first(step) == number
        count = groups.count(step)
        assert 1 <= count <= size
        assert number // epoch == (number + count - 1) // epoch
        assert count == size or (number + count) % epoch == 0
        number += count
    assert number == 3 * epoch


def test_without_an_epoch_all_groups_are_full() -> None:
    groups = Groups(3)
    assert [(groups.first(step), groups.count(step)) for step in range(3)] == [(0, 3), (3, 3), (6, 3)]


def make(data: object) -> Batches:
    return Batches(data, 3, 7, "step", PositionPage(-1), short_groups=True)


def loader(workers: int = 0) -> DataLoader[object]:
    return DataLoader(TensorDataset(torch.arange(20.0)), batch_size=4, shuffle=True, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_replacement_gets_the_same_short_groups(workers: int) -> None:
    original = make(loader(workers))
    original.start(0, 1)
    expected, private = [], []
    for step in range(6):
        private.append(encode_tree(original.private(), "p"))
        expected.append([batch[0].tolist() for batch in original.get(step, 1)])
        assert original.epoch(step) == step // 2
        original.done()
    assert [len(batches) for batches in expected] == [3, 2, 3, 2, 3, 2]
    assert sorted(value for group in expected[2:4] for batch in group for value in batch) == list(range(20))
    for start in range(6):
        replacement = make(loader(workers))
        replacement.rehearse(0)
        replacement.take_over(decode_tree(private[start]), start, 1)
        for step in range(start, 6):
            assert [batch[0].tolist() for batch in replacement.get(step, 1)] == expected[step]
            replacement.done()


class Endless(IterableDataset[int]):
    def __iter__(self) -> object:  # type: ignore[override]
        return iter(range(10))


def test_data_without_a_length_is_refused() -> None:
    with pytest.raises(UsageError, match="short_groups=True needs to know how many batches"):
        make(DataLoader(Endless()))
