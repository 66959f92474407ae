"""Micro-batches of one optimizer step out of a DataLoader that accelerate has prepared."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from relight.errors import UsageError

pytest.importorskip("accelerate", exc_type=ImportError)

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from accelerate.utils import GradientAccumulationPlugin

from relight.integrations.accelerate import UpdateSampler, update_loader
from relight.training.state.digest import edits_of

ITEMS = 22


def flat(batches: Iterable[list[int]]) -> list[int]:
    """Join batches."""
    return list(itertools.chain.from_iterable(batches))


def shard(rank: int, *, shuffled: bool = False) -> BatchSamplerShard:
    """Batches of two out of 22 items, for one of two ranks: six, the last of which begins again at the start."""
    data = list(range(ITEMS))
    sampler = SeedableRandomSampler(data, data_seed=3) if shuffled else SequentialSampler(data)
    return BatchSamplerShard(BatchSampler(sampler, 2, drop_last=False), num_processes=2, process_index=rank)


def test_gives_what_accelerate_gives_in_groups() -> None:
    for rank in (0, 1):
        given = [[index for _, index in group] for group in UpdateSampler(shard(rank), 4)]
        alone = list(shard(rank))
        assert given == [flat(alone[:4]), flat(alone[4:])]


def test_numbers_the_micro_batches_of_a_group() -> None:
    groups = list(UpdateSampler(shard(0), 4))
    assert [number for number, _ in groups[0]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [number for number, _ in groups[1]] == [0, 0, 1, 1]


def test_an_assigned_rank_changes_the_batches() -> None:
    sampler = UpdateSampler(shard(1), 2)
    sampler.rank = 0
    assert list(sampler) == list(UpdateSampler(shard(0), 2))


def test_epochs_are_shuffled_as_accelerate_does() -> None:
    sampler, alone = UpdateSampler(shard(0, shuffled=True), 3), shard(0, shuffled=True)
    for epoch in (0, 1, 2):
        sampler.set_epoch(epoch)
        alone.batch_sampler.sampler.set_epoch(epoch)
        assert [index for group in sampler for _, index in group] == flat(alone)


@pytest.mark.parametrize("first", range(7))
def test_a_resumed_run_gets_the_data_that_follows(first: int) -> None:
    def stream(sampler: UpdateSampler) -> list[list[tuple[int, int]]]:
        groups = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            groups += list(sampler)
        return groups

    whole = stream(UpdateSampler(shard(0, shuffled=True), 4))
    resumed = stream(UpdateSampler(shard(0, shuffled=True), 4, first=first))
    count = len(whole) - first
    assert resumed[:count] == whole[first:]


def test_ranks_share_an_order_that_no_generator_decides() -> None:
    """A RandomSampler without a generator draws from the global streams, which differ between ranks."""
    for epoch in (0, 1):
        seen = []
        for rank in (0, 1):
            torch.manual_seed(rank)
            batches = BatchSampler(RandomSampler(range(ITEMS)), 2, drop_last=True)
            sampler = UpdateSampler(BatchSamplerShard(batches, num_processes=2, process_index=rank), 1, seed=5)
            sampler.set_epoch(epoch)
            before = torch.get_rng_state()
            seen += [index for group in itertools.islice(sampler, 5) for _, index in group]
            assert torch.equal(torch.get_rng_state(), before)
        assert len(set(seen)) == 20


def test_a_generator_of_the_samplers_own_is_where_the_epoch_begins() -> None:
    def made() -> UpdateSampler:
        own = RandomSampler(range(ITEMS), generator=torch.Generator().manual_seed(3))
        return UpdateSampler(BatchSamplerShard(BatchSampler(own, 2, drop_last=False), num_processes=2), 2)

    def epoch(sampler: UpdateSampler, number: int) -> list[Any]:
        sampler.set_epoch(number)
        return list(sampler)

    first, late = made(), made()
    whole = [epoch(first, number) for number in range(3)]
    assert whole[0] != whole[1]
    next(iter(late))  # a rehearsal
    assert [epoch(late, number) for number in (2, 0, 1, 1)] == [whole[number] for number in (2, 0, 1, 1)]


def test_a_run_may_turn_out_to_have_begun_elsewhere() -> None:
    late = UpdateSampler(shard(0, shuffled=True), 4)
    late.begin_after(1)
    assert list(late) == list(UpdateSampler(shard(0, shuffled=True), 4, first=1))


def test_collates_each_micro_batch() -> None:
    loader: DataLoader[int] = DataLoader(torch.arange(ITEMS), batch_sampler=shard(0))  # type: ignore[arg-type]
    batches = list(update_loader(loader, 4))
    assert [each.tolist() for each in batches[0]] == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert [len(each) for each in batches] == [4, 2]


def test_refuses_an_iterable_dataset() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield 0

    with pytest.raises(UsageError, match="IterableDataset"):
        update_loader(DataLoader(Endless()), 1)


def test_refuses_what_is_no_loader() -> None:
    """Two loaders that take turns, in a class of the script's, say."""
    with pytest.raises(UsageError, match="the training data is read by a list, no DataLoader"):
        update_loader([], 1)  # type: ignore[arg-type]


def test_a_plain_batch_sampler_has_one_rank() -> None:
    sampler = UpdateSampler(BatchSampler(RandomSampler(range(ITEMS)), 2, drop_last=True), 1)
    sampler.rank = 1
    assert sampler.rank == 0
    assert len(sampler) == ITEMS // 2


def accumulating(**settings: Any) -> Accelerator:
    return Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(**settings))


def groups_of(accumulate: int) -> list[Any]:
    """Six micro-batches of a rank, in groups."""
    return list(update_loader(DataLoader(torch.arange(ITEMS), batch_sampler=shard(0)), accumulate))  # type: ignore[arg-type]


def synced(accelerator: Accelerator, group: Any, most: int = 99) -> list[bool]:
    """Return for each micro-batch whether accelerate synchronizes gradients; the loop is left after `most`."""
    found = []
    for _ in itertools.islice(group, most):
        with accelerator.accumulate():
            found.append(accelerator.sync_gradients)
    return found


@pytest.mark.parametrize(("steps", "accumulate"), [(1, 4), (2, 4), (4, 4)])
def test_a_step_ends_with_synchronized_gradients(steps: int, accumulate: int) -> None:
    accelerator = accumulating(num_steps=steps)
    every = [(number + 1) % steps == 0 for number in range(accumulate)]
    for _ in range(2):
        assert [synced(accelerator, group) for group in groups_of(accumulate)] == [every, [*every[:1], True]]
    assert not accelerator.gradient_state.in_dataloader


def test_an_interrupted_step_is_counted_anew() -> None:
    accelerator = accumulating(num_steps=4)
    group = groups_of(4)[0]
    kept = iter(group)
    assert synced(accelerator, kept, 3) == [False] * 3
    assert synced(accelerator, group) == [False, False, False, True]
    assert kept is not None  # what was interrupted is still there


def test_refuses_steps_that_end_with_waiting_gradients() -> None:
    accumulating(num_steps=3)
    with pytest.raises(UsageError, match="gradient_accumulation_steps=3"):
        groups_of(4)
    accumulating(num_steps=4, sync_with_dataloader=False)
    with pytest.raises(UsageError, match="the last 2 micro-batches of an epoch wait"):
        groups_of(4)
    accumulating(num_steps=1)


def test_worker_processes_give_groups_that_accelerate_counts() -> None:
    accelerator = accumulating(num_steps=2)
    loader: DataLoader[int] = DataLoader(torch.arange(ITEMS), batch_sampler=shard(0), num_workers=1)  # type: ignore[arg-type]
    groups = list(update_loader(loader, 2))
    assert [synced(accelerator, group) for group in groups] == [[False, True]] * 3
    assert [each.tolist() for each in groups[0]] == [[0, 1], [4, 5]]
    accumulating(num_steps=1)


def test_a_changed_micro_batch_is_drawn_again() -> None:
    group = groups_of(4)[0]
    before = edits_of(group)
    assert edits_of(group) == before
    group[3].add_(1)
    assert edits_of(group) != before
