"""The interface to one kind of device: all that relight needs of it."""

import abc
import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from relight.device.placement import Devices
from relight.device.torch_private import Backend, Store


class DeviceBackend(NamedTuple):
    """The collectives of a device in one process group, and their kind as torch names it."""

    kind: ProcessGroup.BackendType
    backend: Backend


class Accelerator(abc.ABC):
    """One kind of device. Streams and events are torch's: `torch.Stream` works for every kind."""

    type: str  # as in `torch.device.type`
    is_host = False  # memory is the host's, and an operation is over when its call returns
    # Whether gloo can carry the device's tensors, so that ranks can do without the device's own collectives.
    has_gloo = False
    backend_name: str | None = None  # of the device's own collectives, as c10d names it; None: there are none

    @abc.abstractmethod
    def count(self) -> int:
        """Return the number of devices that this process may use."""

    def devices(self) -> Devices:
        """Return the devices of this host, to place ranks on them."""
        return Devices(0 if self.is_host else self.count(), self.type, self.has_gloo, self.backend_name)

    @abc.abstractmethod
    def use(self, device: torch.device) -> None:
        """Make it the current device of this thread."""

    @abc.abstractmethod
    def synchronize(self, device: torch.device) -> None:
        """Return once the device has done all that this process has launched on it."""

    @abc.abstractmethod
    def synchronize_stream(self, device: torch.device) -> None:
        """Return once the device has done all that was launched on this thread's current stream."""

    @abc.abstractmethod
    def new_stream(self, device: torch.device) -> Any:
        """Return a stream of the device. Streams are few: other libraries of the process use them as well."""

    @abc.abstractmethod
    def launching_on(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        """Have operations inside launched on this stream of this device; afterwards all is as it was."""

    @abc.abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the random streams of all devices, if this process has begun to use any."""

    @abc.abstractmethod
    def random_state(self) -> torch.Tensor | None:
        """Return the state of the current device's random stream; None if this process uses no device."""

    @abc.abstractmethod
    def set_random_state(self, state: torch.Tensor) -> None:
        """Put back what `random_state` returned."""

    @abc.abstractmethod
    def pin(self, view: memoryview) -> Callable[[], object] | None:
        """Register host memory, so that devices read and write it by themselves; return the function that ends that.

        None: this process uses no device, or its kind cannot. Copies are then slower, and the host waits for them.
        Raises RuntimeError: the device refuses.
        """

    def identity(self, device: torch.device) -> str:
        """Return a name that the device has in every process of this host."""
        return str(device)

    def device_named(self, identity: str) -> torch.device | None:
        """Return the device of this process that has this name on the host; None if it sees none such."""
        devices = (torch.device(self.type, index) for index in range(self.count()))
        return next((device for device in devices if self.identity(device) == identity), None)

    def free_bytes(self, device: torch.device) -> int | None:
        """Return the memory of a device of this process that no process uses; None: not known."""
        del device
        return None

    def reaches(self, device: torch.device, other: torch.device) -> bool:
        """Return whether copies from `other` to `device` go straight, and not through host memory."""
        del device, other
        return True

    def export(self, tensor: torch.Tensor) -> bytes | None:
        """Return a handle by which other processes of this host find a contiguous tensor's memory, while it lives.

        It orders nothing between the processes: each waits for its device, and then tells the other. None: this kind
        of device, or its driver, exports nothing.
        """
        del tensor
        return None

    def import_memory(self, handle: bytes, device: torch.device) -> torch.Tensor:
        """Return memory that another process has exported, as bytes of `device`, on which it lies.

        Raises RuntimeError: the process is gone, or the driver refuses.
        """
        raise RuntimeError(f"{self.type} imports no memory: {len(handle)} bytes for {device}")

    @abc.abstractmethod
    def make_backend(self, store: Store, rank: int, size: int, timeout: timedelta) -> DeviceBackend:
        """Form the device's own collectives with the other ranks. Blocks until formed, where the device does so."""

    def device_of_slot(self, slot: int) -> torch.device:
        """Return the device of a worker, by its place on the node."""
        return torch.device(self.type, slot % self.count())
