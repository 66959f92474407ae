"""Groups to try operations on."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from relight.training.group import Inner
from relight.training.sockets import GroupSockets
from relight.training.torch_private import make_inner_group


class DeafSockets(GroupSockets):
    """Cutting them fails nothing, as when gloo loses the completion of an operation."""

    def cut(self) -> None:
        pass


@pytest.fixture
def pair() -> tuple[Inner, Inner]:
    """A group of two, both in this process."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: make_inner_group(store, rank, 2, "test", None), range(2))
    return Inner(first, DeafSockets(1)), Inner(second, DeafSockets(1))
