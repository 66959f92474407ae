"""Registers the late device with torch, as the package of any device out of torch's tree does."""

import contextlib
import importlib.machinery
import importlib.util
import struct
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration

from tests.device_extension.build import LIBRARY, is_built

NAME = "late"
_EXPORTED = struct.Struct("=iiQQ")  # process, descriptor, first byte, bytes


def _load() -> Any:
    if not is_built():
        raise ImportError("the late device is not built: make test-device")
    loader = importlib.machinery.ExtensionFileLoader("_late", str(LIBRARY))
    spec = importlib.util.spec_from_file_location("_late", LIBRARY, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _make_backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return native.LateBackend(store, rank, size)


def _index(device: int | str | torch.device | None) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return native.current_device() if index is None else index


@contextlib.contextmanager
def _on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Launch what is inside on this stream, as `torch.cuda.stream` does: streams may be entered again."""
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _register() -> None:
    backend_registration.rename_privateuse1_backend(NAME)
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = native.device_count
    module.current_device = native.current_device
    module.set_device = lambda device: native.set_device(_index(device))
    module.synchronize = lambda device=None: native.synchronize(_index(device))
    module.manual_seed_all = module.manual_seed = native.seed_all
    module.get_rng_state = lambda device=None: native.random_state(_index(device))
    module.set_rng_state = lambda state, device=None: native.set_random_state(_index(device), state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.export_memory = lambda tensor: _EXPORTED.pack(*native.export_memory(tensor))
    module.import_memory = lambda handle, device: native.import_memory(_EXPORTED.unpack(handle), _index(device))
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream, module.set_stream = torch.accelerator.current_stream, torch.accelerator.set_stream
    module.stream = _on_stream
    module.memory_allocated = module.memory_reserved = lambda device=None: native.allocated_bytes(_index(device))
    module.mem_get_info = lambda device=None: (
        native.memory_limit() - native.allocated_bytes(_index(device)),
        native.memory_limit(),
    )
    module.empty_cache = lambda: None
    module.host_register, module.host_unregister = native.register_host, native.unregister_host
    torch._register_device_module(NAME, module)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(f"{NAME}_ccl", _make_backend, devices=[NAME])


native = _load()
_register()
