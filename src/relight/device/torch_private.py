"""Private interfaces of torch that devices need."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, Store

__all__ = [
    "Backend",
    "PrefixStore",
    "Store",
    "export_storage",
    "import_storage",
    "make_registered_backend",
    "set_timeout",
]


def export_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Return what another process needs to open a storage in the memory of an NVIDIA or AMD device."""
    return storage._share_cuda_()  # type: ignore[no-any-return]


def import_storage(device: int, exported: tuple[Any, ...]) -> torch.UntypedStorage:
    """Open a storage of another process, on this process's device of that number."""
    return torch.UntypedStorage._new_shared_cuda(device, *exported[1:])


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the time after which a backend gives up a collective by itself."""
    options._timeout = timeout


def make_registered_backend(name: str, store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """Make the backend that a package has registered with `torch.distributed.Backend.register_backend`."""
    plugin = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)  # type: ignore[no-any-return]
    options = torch._C._distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, timeout
    return plugin.creator_fn(options, None)  # type: ignore[no-any-return]
