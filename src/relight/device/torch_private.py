"""Private interfaces of torch that devices need."""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, Store

__all__ = [
    "FLAG_READERS",
    "Backend",
    "PrefixStore",
    "Store",
    "backend_flags",
    "export_storage",
    "import_storage",
    "make_registered_backend",
    "set_backend_flags",
    "set_timeout",
]

# Flags of libraries that kernels come from, as `torch.backends` sets them: by their names in C++, in the order in which
# they are set. Each may choose another kernel, and so other bits.
_FLAGS = (
    "cublas_allow_tf32 cudnn_allow_tf32 cudnn_enabled cudnn_benchmark cudnn_deterministic mkldnn_enabled "
    "mkldnn_deterministic nnpack_enabled cublas_allow_fp16_accumulation cublas_allow_fp16_reduced_precision_reduction "
    "cublas_allow_bf16_reduced_precision_reduction cpu_allow_fp16_reduced_precision_reduction "
    "deterministic_fill_uninitialized_memory math_sdp_allow_fp16_bf16_reduction sdp_priority_order"
).split()
_ATTENTION = "flash math mem_efficient cudnn overrideable fa3".split()
# Precision of float32 by backend and operation: what follows from another one comes after that.
_PRECISIONS = [("generic", "all")]
_PRECISIONS += [(name, operation) for name in ("cuda", "mkldnn") for operation in "all matmul conv rnn".split()]


def _found(getters: dict[str, tuple[str, str]]) -> dict[str, tuple[Callable[[], Any], Callable[..., object]]]:
    """Return functions to read and set flags, as far as this torch has them."""
    known = {name: (getattr(torch._C, get, None), getattr(torch._C, put, None)) for name, (get, put) in getters.items()}
    return {name: (get, put) for name, (get, put) in known.items() if get is not None and put is not None}


_ACCESS = _found(
    {
        "precision": ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
        **{name: (f"_get_{name}", f"_set_{name}") for name in _FLAGS},
        **{f"{name}_sdp": (f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in _ATTENTION},
    }
)
_READ_PRECISION: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
_SET_PRECISION: Any = getattr(torch._C, "_set_fp32_precision_setter", None)


# Functions that read what `backend_flags` is made of. They raise RuntimeError if one of the flags cannot be read.
FLAG_READERS: list[Callable[[], Any]] = [
    *(read for read, _ in _ACCESS.values()),
    *(functools.partial(_READ_PRECISION, *one) for one in (_PRECISIONS if _READ_PRECISION is not None else ())),
]


def backend_flags() -> dict[str, Any]:
    """Return the flags that can be read: some cannot, once newer ones for the same thing were set."""
    found = {name: value for name, (read, _) in _ACCESS.items() if (value := _read(read)) is not None}
    if _READ_PRECISION is not None:
        found["precisions"] = [_READ_PRECISION(*one) for one in _PRECISIONS]
    return found


def set_backend_flags(flags: dict[str, Any]) -> None:
    """Set those that differ."""
    for name, (read, change) in _ACCESS.items():
        if name in flags and _read(read) != (value := flags[name]):
            change(*value) if isinstance(value, list) and name != "sdp_priority_order" else change(value)
    for one, value in zip(_PRECISIONS, flags.get("precisions", ()), strict=False):
        if _READ_PRECISION(*one) != value:
            _SET_PRECISION(*one, value)


def _read(read: Callable[[], Any]) -> Any:
    try:
        value = read()
    except RuntimeError:
        return None
    return list(value) if isinstance(value, tuple) else value


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
