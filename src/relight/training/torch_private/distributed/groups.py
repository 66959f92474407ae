"""Process groups of torch: their operations, and gloo's, devices' and detached ones."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import ProcessGroup

from relight.device.choose import accelerator, accelerator_of
from relight.wire.connection.loopback import IPV4, handed_down
from relight.wire.settings import host_address

# The operations of a process group, by the names of 2.14 and of older versions; those that exist are delegated.
_OPERATIONS = (
    "allreduce allreduce_coalesced broadcast reduce allgather _allgather_base all_gather_single allgather_coalesced "
    "allgather_into_tensor_coalesced all_gather_single_coalesced gather gather_into_tensor gather_single scatter "
    "reduce_scatter _reduce_scatter_base reduce_scatter_single reduce_scatter_tensor_coalesced "
    "reduce_scatter_single_coalesced all_to_all_single alltoall_base alltoall send recv recv_anysource barrier"
).split()
TENSOR_ALL_GATHERS = (
    "_allgather_base all_gather_single allgather_into_tensor_coalesced all_gather_single_coalesced".split()
)
REDUCE_SCATTERS = frozenset(
    "_reduce_scatter_base reduce_scatter_single reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced".split()
)
POINT_TO_POINT = frozenset(("send", "recv", "recv_anysource"))
# Collectives never time out: the controller finds the rank that hangs, and Stop ends the wait.
_COLLECTIVE_TIMEOUT = timedelta(days=7)
_FORMING_TIMEOUT = timedelta(seconds=60)
OPERATIONS = tuple(name for name in _OPERATIONS if hasattr(ProcessGroup, name))


def make_generation_group(store: Store, rank: int, size: int, name: str, device: torch.device | None) -> ProcessGroup:
    """Return a real process group: gloo, and for tensors of a device its own collectives. Blocks until formed.

    Without `device`, gloo carries the tensors of devices too, if it can. `store` is to be kept as long as the group: a
    device's collectives use it later as well, for sends and receives.
    """
    group = ProcessGroup(store, rank, size)
    gloo = _make_gloo(store, rank, size)
    gloo._set_default_timeout(_COLLECTIVE_TIMEOUT)
    kind = ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)
    if device is not None:
        kind_of_device = accelerator_of(device)
        kind_of_device.use(device)  # this may be a thread of its own, whose current device is another rank's
        own = kind_of_device.make_backend(store, rank, size, _COLLECTIVE_TIMEOUT)
        group._set_default_backend(own.kind)
        group._register_backend(device, own.kind, own.backend)
    elif accelerator().has_gloo and not accelerator().is_host:
        group._register_backend(torch.device(accelerator().type), kind, gloo)
    group._set_group_name(name)  # type: ignore[arg-type]
    return group


def name_group(group: ProcessGroup, name: str, description: str | None) -> None:
    """Give a group the name under which DeviceMesh finds it, and a description for people."""
    group._set_group_name(name)  # type: ignore[arg-type]
    group._set_group_desc("undefined" if description is None else description)


def cpu_backend(group: ProcessGroup) -> Any:
    """Return the backend for CPU tensors. It takes the group's calls, without torch's dispatcher in between."""
    return group._get_backend(torch.device("cpu"))


def _make_gloo(store: Store, rank: int, size: int) -> dist.ProcessGroupGloo:
    """Listens at this host's address if it has one, so that other hosts reach it; else where torch chooses."""
    address = host_address() or (handed_down() if handed_down() != IPV4 else "")
    gloo_group: Any = dist.ProcessGroupGloo
    if not address:
        return dist.ProcessGroupGloo(store, rank, size, _FORMING_TIMEOUT)
    options = gloo_group._Options()
    options._timeout = _FORMING_TIMEOUT
    options._devices = [gloo_group.create_device(hostname=address)]
    group: dist.ProcessGroupGloo = gloo_group(store, rank, size, options)
    return group


def make_detached_group(rank: int, size: int, device: torch.device) -> ProcessGroup:
    """A group of `size` whose operations complete at once without a peer: what a standby builds and warms up on."""
    fake = torch._C._distributed_c10d.FakeProcessGroup._create_internal(rank, size)
    group = ProcessGroup(HashStore(), rank, size)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, fake)
    if device.type != "cpu":
        group._register_backend(device, ProcessGroup.BackendType.CUSTOM, fake)
    group._set_group_name("relight-detached")  # type: ignore[arg-type]
    return group


class ExchangeWork(dist.Work):
    """A send or receive, which c10d asks for the rank that sent."""

    def source_rank(self) -> int:
        """Return the rank that sent; an implementation of ours overrides this."""
        raise NotImplementedError

    def _source_rank(self) -> int:
        return self.source_rank()


def source_rank_of(work: Any) -> int:
    """Return the rank that sent, of gloo's work."""
    return int(work._source_rank())


def abort_backend(group: ProcessGroup, device: torch.device) -> None:
    """Make the device's own collectives of this group fail at once."""
    group._get_backend(device).abort()
