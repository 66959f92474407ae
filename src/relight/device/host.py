"""The CPU as a device: nothing runs late, and all memory is the host's."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from relight.device.accelerator import Accelerator, DeviceBackend
from relight.device.torch_private import Store


class Host(Accelerator):
    """Used where a process has no accelerator, and for tensors in host memory."""

    type = "cpu"
    is_host = True
    has_gloo = True

    def count(self) -> int:
        return 1

    def device_of_slot(self, slot: int) -> torch.device:  # noqa: ARG002
        return torch.device("cpu")

    def use(self, device: torch.device) -> None:
        pass

    def synchronize(self, device: torch.device) -> None:
        pass

    def synchronize_stream(self, device: torch.device) -> None:
        pass

    def new_stream(self, device: torch.device) -> Any:  # noqa: ARG002
        return None

    def launching_on(self, stream: Any) -> contextlib.AbstractContextManager[object]:  # noqa: ARG002
        return contextlib.nullcontext()

    def seed(self, seed: int) -> None:
        """Do nothing: torch's default generator belongs to all kinds of processes."""

    def random_state(self) -> torch.Tensor | None:
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        pass

    def pin(self, view: memoryview) -> Callable[[], object] | None:  # noqa: ARG002
        return None

    def make_backend(self, store: Store, rank: int, size: int, timeout: timedelta) -> DeviceBackend:
        raise NotImplementedError("gloo carries tensors in host memory")
