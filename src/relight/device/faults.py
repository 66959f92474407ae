"""Faults of GPUs, as their driver reports them: which ones mean that the device is broken. Pure.

The driver numbers its errors (XID). Most are of the device; the ones that a program alone can cause are those that
NVIDIA's device plugin for Kubernetes takes for errors of applications, after which the device is as good as before.
"""

from collections.abc import Mapping, Sequence

from relight.wire.status import Gpu

_OF_APPLICATIONS = frozenset(
    (
        13,  # graphics engine exception: an illegal instruction or address
        31,  # memory page fault
        43,  # stopped processing after an error of the program
        45,  # cleanup after an earlier error, or after the program was killed
        68,  # video processor exception
        109,  # context switch timeout
    )
)
_NAMES = {
    48: "a memory error that could not be corrected",
    63: "a row of memory is to be remapped",
    64: "a row of memory could not be remapped",
    74: "an NVLink error",
    79: "the device has fallen off the bus",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "an error of its system processor",
}
LOST = "the driver has lost the device"


def xid_fault(device: int, xid: int) -> str:
    """Describe an error of a device; an empty string: it is one of the program."""
    if xid in _OF_APPLICATIONS:
        return ""
    name = _NAMES.get(xid)
    return f"GPU {device}: XID {xid}, {name}" if name else f"GPU {device}: XID {xid}"


def memory_faults(known: Mapping[int, int], gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Describe the devices that have counted more uncorrected memory errors than is known.

    What was counted before the first look says nothing: the count is since the driver was loaded.
    """
    found = []
    for gpu in gpus:
        earlier = known.get(gpu.index)
        if earlier is not None and gpu.uncorrected_errors is not None and gpu.uncorrected_errors > earlier:
            more = gpu.uncorrected_errors - earlier
            found.append(f"GPU {gpu.index}: {more} uncorrected memory error{'s' if more > 1 else ''}")
    return tuple(found)
