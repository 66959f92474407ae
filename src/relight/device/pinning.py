"""Registers host memory with the devices of this process. Needs no torch where the process has none."""

import importlib
import sys
from collections.abc import Callable


def pin(view: memoryview) -> Callable[[], object]:
    """Let the device that this process works on read and write this memory by itself; return what ends that.

    Without a device, or if the device cannot, nothing is registered.
    """
    if "torch" not in sys.modules:
        return _nothing
    # By name: processes of the control plane use these buffers without torch.
    choose = importlib.import_module("relight.device.choose")
    return choose.accelerator().pin(view) or _nothing


def _nothing() -> None:
    pass
