"""Registers host memory with the devices of this process. Needs no torch where the process has none."""

import importlib
import sys
import warnings
from collections.abc import Callable


def pin(view: memoryview) -> Callable[[], object]:
    """Let the device that this process works on read and write this memory by itself; return what ends that.

    Without a device, or if the device cannot, nothing is registered. A device that refuses is reported once.
    """
    if "torch" not in sys.modules:
        return _nothing
    # By name: processes of the control plane use these buffers without torch.
    choose = importlib.import_module("relight.device.choose")
    kind = choose.accelerator()
    try:
        return kind.pin(view) or _nothing
    except RuntimeError as error:
        warnings.warn(
            f"{len(view)} bytes of host memory could not be registered (pinned) with the {kind.type} device: {error}. "
            "Weights are copied all the same, more slowly. Raise the limit of locked memory (ulimit -l; in a container "
            "--ulimit memlock=-1), or choose a smaller bucket_bytes",
            RuntimeWarning,
            stacklevel=2,
        )
        return _nothing


def _nothing() -> None:
    pass
