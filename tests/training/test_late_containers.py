"""Containers of modules that steps change in place for the first time after the steps in which relight learns."""

from collections import deque
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from relight.training.state.modules.attributes import AttributeLog


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[torch.Tensor] = deque(maxlen=3)
        self.counts = [0, 0]


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def log(net: Net) -> Iterator[AttributeLog]:
    log = AttributeLog({"net": net})
    log.install()
    for _ in range(3):
        log.begin(learning=True)
        log.notice()
        log.commit()
    yield log
    log.remove()


def test_the_first_late_change_is_undone(net: Net, log: AttributeLog) -> None:
    log.begin(learning=False)
    net.recent.append(torch.ones(2))
    net.counts[1] += 1
    log.notice()
    assert sorted(log.private()) == ["net//counts", "net//recent"]
    log.roll_back()
    assert (list(net.recent), net.counts) == ([], [0, 0])


def test_a_late_change_is_kept_and_undone_from_then_on(net: Net, log: AttributeLog) -> None:
    log.begin(learning=False)
    net.recent.append(torch.ones(2))
    log.notice()
    log.commit()
    log.begin(learning=False)
    net.recent.append(torch.zeros(2))
    log.roll_back()
    assert [one.tolist() for one in net.recent] == [[1.0, 1.0]]
    other = Net()
    adopted = AttributeLog({"net": other})
    adopted.install()
    adopted.adopt(log.private())
    adopted.remove()
    assert [one.tolist() for one in other.recent] == [[1.0, 1.0]]


def test_a_change_after_an_early_barrier_is_not_taken_for_the_beginning(net: Net, log: AttributeLog) -> None:
    log.begin(learning=False)
    log.notice()
    net.counts[0] += 5
    log.commit()
    log.begin(learning=False)
    net.counts[0] += 1
    log.roll_back()
    assert net.counts == [5, 0]


def test_what_holds_works_of_collectives_is_emptied_again(net: Net, log: AttributeLog) -> None:
    """Overlap by hand: handles of a step that was interrupted before it waited for them."""
    log.begin(learning=False)
    net.counts.append(object())  # type: ignore[arg-type]
    assert log.private() == {}
    log.roll_back()
    assert net.counts == [0, 0]
