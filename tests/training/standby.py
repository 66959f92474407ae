"""As much of a standby's runtime as its process groups ask, before and after it is given a rank."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh

from relight.training.process.groups import ProcessGroups
from relight.training.script_groups import ScriptGroups
from relight.training.torch_private.distributed.c10d import REFUSED_STORE
from relight.training.torch_private.distributed.mesh import follow_rank, watch_skips

BUILT_AS = 3
REPLACED = "_process_group_name _warn_not_in_group broadcast_object_list scatter_object_list recv_object_list"


class Standby:
    """A standby of a job of four ranks: as much of a runtime, and of its policy, as its groups ask."""

    closed = False
    launches = launches_of_all = 0
    is_standby = True
    builds_late = False
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.groups = ProcessGroups(4)
        self.protection = self
        self.rank = BUILT_AS

    def note_skip(self) -> None:
        self.groups.table.skips = True

    def take(self, rank: int) -> None:
        self.rank = rank
        self.groups.follow_rank(rank)


@pytest.fixture
def standby(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standby]:
    for name in (*REPLACED.split(), "gather_object", "monitored_barrier"):  # put back later
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
        monkeypatch.setattr(dist, name, getattr(distributed_c10d, name), raising=False)
    monkeypatch.setattr(Join, "__init__", Join.__init__)
    monkeypatch.setattr(DeviceMesh, "_coordinate_on_dim", None, raising=False)
    runtime: Any = Standby()

    groups = ScriptGroups(runtime)
    groups.register("relighttest")
    dist.init_process_group("relighttest", store=REFUSED_STORE, rank=BUILT_AS, world_size=4)
    groups.watch()
    watch_skips(runtime.note_skip)
    follow_rank(BUILT_AS)
    yield runtime
    dist.destroy_process_group()
    for kind in ("backend_list", "_plugins", "backend_capability", "backend_type_map"):
        found: Any = getattr(dist.Backend, kind)
        (found.remove if isinstance(found, list) else found.pop)("RELIGHTTEST" if kind == "_plugins" else "relighttest")
