"""The kind of device that this process works on, and that of a tensor."""

import functools

import torch

from relight.device.accelerator import Accelerator
from relight.device.cuda import Cuda
from relight.device.generic import Generic
from relight.device.host import Host

HOST = Host()


@functools.cache
def accelerator() -> Accelerator:
    """Return the kind of device that this process can use; the host if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or torch.accelerator.device_count() == 0:
        return HOST
    return Cuda() if found.type == Cuda.type else Generic(found.type)


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the kind of this device; the host for one without memory of its own (`meta`)."""
    own = accelerator()
    return own if device.type == own.type else HOST


def is_accelerated(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in the memory of an accelerator."""
    return not accelerator_of(tensor.device).is_host
