"""Groups to try operations on."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from relight.training.collectives.generation_group import GenerationGroup
from relight.training.collectives.sockets import GroupSockets
from relight.training.torch_private.distributed.groups import make_generation_group
from tests.training.standby import standby  # noqa: F401 - a fixture


class DeafSockets(GroupSockets):
    """Cutting them fails nothing, as when gloo loses the completion of an operation."""

    def cut(self) -> None:
        pass


@pytest.fixture
def pair() -> Iterator[tuple[GenerationGroup, GenerationGroup]]:
    """A group of two, both in this process; afterwards nothing of it is left to processes that a later test forks."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: make_generation_group(store, rank, 2, "test", None), range(2))
    yield GenerationGroup(first, DeafSockets(1)), GenerationGroup(second, DeafSockets(1))
    gc.collect()
