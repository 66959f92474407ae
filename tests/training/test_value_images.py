"""Copies of values: containers that another thread changes meanwhile."""

from collections import OrderedDict, deque
from typing import Any

import pytest

from relight.training.state.value_images import copied


class Changing(set[Any]):
    """As it is copied, something changes the container that holds it."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def copy(self) -> set[Any]:
        self.change()
        return set()


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_dict_may_grow_meanwhile(kind: type[dict[str, Any]]) -> None:
    table = kind()
    table["first"] = Changing(lambda: table.update(new=2))
    table["second"] = 1
    assert copied(table, {}) == {"first": set(), "second": 1}


def test_a_deque_may_grow_meanwhile() -> None:
    queue = deque[Any]()
    queue += [Changing(lambda: queue.append(2)), 1]
    assert copied(queue, {}) == deque([set(), 1])
