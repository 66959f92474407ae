"""Any other device that torch knows by `torch.accelerator`, built in or out of its tree.

Tests run it with a device of their own (tests/device_extension). Ascend NPUs with HCCL and XPUs with XCCL go this way,
and have not been tried. Host memory is registered if the device's module has `host_register(address, nbytes)` and
`host_unregister(address)`; without them copies between buffers and the device are slower than they could be. Memory is
exported to other processes if it has `export_memory(tensor)`, which returns bytes, and `import_memory(handle, device)`,
which returns a tensor of bytes.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from relight.device.accelerator import Accelerator, DeviceBackend
from relight.device.torch_private import PrefixStore, Store, make_registered_backend


class Generic(Accelerator):
    """The current accelerator of this process, whatever its kind."""

    def __init__(self, type_: str) -> None:
        self.type = type_
        self._module: Any = torch.get_device_module(type_)
        self.backend_name = dist.Backend.default_device_backend_map.get(type_)

    def count(self) -> int:
        return torch.accelerator.device_count()

    def use(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def synchronize(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def synchronize_stream(self, device: torch.device) -> None:
        torch.accelerator.current_stream(device).synchronize()

    def new_stream(self, device: torch.device) -> torch.Stream:
        return torch.Stream(device)

    @contextlib.contextmanager
    def launching_on(self, stream: Any) -> Any:
        with torch.accelerator.device_index(stream.device.index), stream:
            yield

    def seed(self, seed: int) -> None:
        if self._is_used():
            self._module.manual_seed_all(seed)

    def random_state(self) -> torch.Tensor | None:
        return self._module.get_rng_state() if self._is_used() else None

    def set_random_state(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state)

    def _is_used(self) -> bool:
        is_initialized = getattr(self._module, "is_initialized", None)
        return is_initialized is None or bool(is_initialized())

    def pin(self, view: memoryview) -> Callable[[], object] | None:
        register = getattr(self._module, "host_register", None)
        if register is None or not self._is_used():
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        register(address, len(view))
        return functools.partial(self._module.host_unregister, address)

    def free_bytes(self, device: torch.device) -> int | None:
        ask = getattr(self._module, "mem_get_info", None)
        return None if ask is None else int(ask(device)[0])

    def reaches(self, device: torch.device, other: torch.device) -> bool:
        ask = getattr(self._module, "can_device_access_peer", None)
        return ask is None or bool(ask(device, other))

    def export(self, tensor: torch.Tensor) -> bytes | None:
        export = getattr(self._module, "export_memory", None)
        return None if export is None else export(tensor)

    def import_memory(self, handle: bytes, device: torch.device) -> torch.Tensor:
        import_memory = getattr(self._module, "import_memory", None)
        return super().import_memory(handle, device) if import_memory is None else import_memory(handle, device)

    def make_backend(self, store: Store, rank: int, size: int, timeout: timedelta) -> DeviceBackend:
        name = self.backend_name
        assert name is not None, "place() has refused this"
        backend = make_registered_backend(name, PrefixStore(name, store), rank, size, timeout)
        return DeviceBackend(ProcessGroup.BackendType.CUSTOM, backend)
