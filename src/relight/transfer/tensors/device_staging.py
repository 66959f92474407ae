"""A whole set of weights beside the live ones in the memory of their devices, for an engine on a GPU.

Each tensor has memory of its own on the live one's device; `staging` is one piece of host memory.
"""

import threading
from collections.abc import Mapping, Sequence

import torch

from relight.errors import TransferError
from relight.transfer.plan.manifest import Entry, Manifest, describe_bytes
from relight.transfer.plan.plan import Bucket
from relight.transfer.tensors.device import DeviceWriter
from relight.transfer.tensors.device_buffers import ImportedBuffers
from relight.transfer.tensors.weights import dtype_of


class DeviceStaging:
    """A whole set of weights beside the live ones, each tensor on the live one's device (`staging` has the other kind).

    A bucket's digest is that of the shared buffer, where it is read by the host and by the device at the same time.
    """

    def __init__(self, manifest: Manifest, live: Mapping[str, torch.Tensor]) -> None:
        """Raises TransferError: no memory on a device, or a type that this torch lacks."""
        self.manifest = manifest
        self.tensors: dict[str, torch.Tensor] = {}
        for entry in manifest.entries:
            own = self.tensors[entry.same_as] if entry.same_as else _allocate(entry, live[entry.name].device, manifest)
            self.tensors[entry.name] = own
        self._writer = DeviceWriter({i: self.tensors[entry.name] for i, entry in enumerate(manifest.entries)})

    def load(self, bucket: Bucket, view: memoryview) -> int:
        """Take the bucket out of `view`; returns its digest. It is not read any more when this returns."""
        return self._writer.load(bucket, view)

    def load_on_device(self, bucket: Bucket, imported: ImportedBuffers, buffer: int) -> int:
        """Take the bucket out of a buffer in device memory; return its digest, computed by this process's device."""
        return imported.load(bucket, buffer, self._writer.store)

    def reuse_for(self, manifest: Manifest) -> bool:
        """Return whether buckets of these weights can be loaded here, whole or divided: the same tensors."""
        return manifest.entries == self.manifest.entries

    def populate(self) -> Sequence[threading.Thread]:
        """Do nothing: a device's memory has no page faults."""
        return ()


def _allocate(entry: Entry, device: torch.device, manifest: Manifest) -> torch.Tensor:
    try:
        return torch.empty(entry.shape, dtype=dtype_of(entry), device=device)
    except RuntimeError as error:  # a device's own kind is one of these
        raise TransferError(
            f"no room on {device} for a second copy of the weights, {describe_bytes(manifest.total_bytes)}: give the "
            'Receiver staging="host", or load= and mode="in-place"'
        ) from error
