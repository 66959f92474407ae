"""NVIDIA's devices, and AMD's in builds for ROCm, which torch shows under the same names."""

import contextlib
import ctypes
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from relight.device.accelerator import Accelerator, DeviceBackend
from relight.device.torch_private import PrefixStore, Store, export_storage, import_storage, set_timeout

_PORTABLE = 1  # cudaHostRegisterPortable: for every device that this process uses


class Cuda(Accelerator):
    """Written by reading; see docs/GPU.md for what has run."""

    type = "cuda"
    has_gloo = True
    backend_name = "nccl" if dist.is_nccl_available() else None

    def count(self) -> int:
        return torch.cuda.device_count()

    def use(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def synchronize_stream(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).synchronize()

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.Stream(device)

    @contextlib.contextmanager
    def launching_on(self, stream: Any) -> Any:
        # With the device itself, too: it alone goes back to the thread's own one without using up memory of that.
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

    def seed(self, seed: int) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)

    def random_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def pin(self, view: memoryview) -> Callable[[], object] | None:
        """Register memory that torch has not allocated. A process that begins to use a device later does without."""
        if not torch.cuda.is_initialized():
            return None
        # Of a device that this process works on: anything on another one would take half a gigabyte of its memory.
        used = (index for index in range(self.count()) if torch.cuda.memory_reserved(index))
        device = next(used, None)
        if device is None:
            return None
        runtime = torch.cuda.cudart()
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        with torch.cuda.device(device):
            if status := int(runtime.cudaHostRegister(address, len(view), _PORTABLE)):
                with contextlib.suppress(RuntimeError):  # CUDA reports an error twice: here, not in a later kernel
                    torch.zeros(1, device="cuda")
                raise RuntimeError(f"cudaHostRegister returned {status}")

        def unpin() -> None:
            with torch.cuda.device(device):
                runtime.cudaHostUnregister(address)

        return unpin

    def identity(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)  # numbers depend on CUDA_VISIBLE_DEVICES

    def free_bytes(self, device: torch.device) -> int | None:
        return torch.cuda.mem_get_info(device)[0]

    def reaches(self, device: torch.device, other: torch.device) -> bool:
        return torch.cuda.can_device_access_peer(device, other)

    def export(self, tensor: torch.Tensor) -> bytes | None:
        start = tensor.storage_offset() * tensor.element_size()
        return msgspec.msgpack.encode((export_storage(tensor.untyped_storage()), start, tensor.nbytes))

    def import_memory(self, handle: bytes, device: torch.device) -> torch.Tensor:
        exported, start, nbytes = msgspec.msgpack.decode(handle)
        values = torch.empty(0, dtype=torch.uint8, device=device)
        return values.set_(import_storage(values.get_device(), exported), start, (nbytes,), (1,))

    def make_backend(self, store: Store, rank: int, size: int, timeout: timedelta) -> DeviceBackend:
        # Without this, torch ends a process whose peer is gone; who is replaced is for the controller to decide.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        # Nor may torch's own monitor, which ends a process that seems to hang: the controller finds those. Even without
        # it, torch asks a store of the default group in every second whether another rank wants dumps of all.
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        # Switches of NVLink add in an order of their own: a group that is formed again could have other sums.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        options = dist.ProcessGroupNCCL.Options()
        set_timeout(options, timeout)
        nccl: Any = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
        # Now, and not with the first collective: nothing could end that one if a rank is lost before it has connected.
        nccl.eager_connect_single_device(torch.device(self.type, torch.cuda.current_device()))
        return DeviceBackend(ProcessGroup.BackendType.NCCL, nccl)
