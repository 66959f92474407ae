"""Schedulers of an optimizer that were not handed over are found, whatever refers to them."""

import itertools
import operator
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LinearLR, ReduceLROnPlateau, SequentialLR

from relight.errors import UsageError
from relight.training.state.handed.refusals import late_scheduler, refuse_missing_schedulers
from relight.training.state.handed.schedulers import missing_schedulers


def test_schedulers_are_found_behind_functions_and_iterators_of_c() -> None:
    optimizer, other = (torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1) for _ in range(2))
    hidden = [
        partial(ExponentialLR(optimizer, 0.9).step),
        map(operator.methodcaller("step"), itertools.repeat(ReduceLROnPlateau(optimizer))),
        ExponentialLR(other, 0.9),
    ]
    found = missing_schedulers([optimizer], [])
    assert sorted(type(one).__name__ for one in found) == ["ExponentialLR", "ReduceLROnPlateau"]
    assert missing_schedulers([optimizer], found) == []
    with pytest.raises(
        UsageError, match=r"a scheduler of main \((ExponentialLR|ReduceLROnPlateau)\) was not handed over"
    ):
        refuse_missing_schedulers({"main": optimizer}, found[:1])
    del hidden, found
    assert missing_schedulers([optimizer], []) == []


def test_a_scheduler_that_was_thrown_away_is_not_missing() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    scheduler = ExponentialLR(optimizer, 0.9)
    scheduler.itself = scheduler  # type: ignore[attr-defined]
    del scheduler
    assert missing_schedulers([optimizer], []) == []


def test_schedulers_inside_others_are_handed_over_with_them() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    warm = SequentialLR(optimizer, [LinearLR(optimizer), ExponentialLR(optimizer, 0.9)], [3])
    both = ChainedScheduler([warm, ExponentialLR(optimizer, 0.99)], optimizer)
    assert missing_schedulers([optimizer], [both]) == []
    assert len(missing_schedulers([optimizer], [warm])) == 2
    assert late_scheduler([both, warm], {"main": optimizer}, [warm]).startswith("a step has made a scheduler (Chained")
    assert not late_scheduler([warm], {"main": optimizer}, [warm])
