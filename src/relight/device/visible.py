"""The devices that processes on this host may use, without loading anything that drives them. No torch."""

import os
from pathlib import Path

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def restricted_to() -> list[str] | None:
    """Return the devices that the environment restricts processes to, in its order; None if it does not."""
    named = os.environ.get(_VARIABLE)
    if named is None:
        return None
    return [device.strip() for device in named.split(",") if device.strip() not in ("", "-1")]


def count_devices() -> int:
    """Return the number of devices that workers of this host may use: NVIDIA's, by their files in /dev."""
    devices = sum(1 for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())
    named = restricted_to()
    return devices if named is None else min(devices, len(named))
