"""The two IPC buffers in a device's own memory, exported to other processes, and digests that a device computes.

A bucket goes from the source's tensors into such a buffer, and from there into the engine's. An engine on another
device copies it into a buffer there first, once, and then to its places; no byte goes through host memory.
An export orders nothing between two processes: each waits for its own copies before it tells the other.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash

from relight.device.choose import accelerator_of
from relight.errors import TransferError
from relight.transfer.io.codec import raw_bytes
from relight.transfer.plan.manifest import describe_bytes
from relight.transfer.plan.plan import DEVICE_BUCKET_BYTES, Bucket, Piece
from relight.transfer.plan.schedule import IPC_BUFFERS
from relight.transfer.tensors.device import CopyStreams, bytes_on_device
from relight.transfer.tensors.weights import TensorSource

_WORD_BYTES = 8
ROOM_BYTES = 4 * 2**30  # free on the source's device, so that processes on other devices may use it as well
_ROW_WORDS = 2**16  # of which each sum is taken
_ROWS = 64  # multiplied at a time: that takes as much memory again, which a large device's cache holds
_ODD = 0x1E3779B97F4A7C15  # any odd number whose multiples look random

Store = Callable[[CopyStreams, Piece, torch.Tensor], None]  # launches the copy of a piece to its place
Find = Callable[[Piece], tuple[torch.Tensor, int]]  # the tensor of a piece, and where it begins there, in bytes


class DeviceBuffers:
    """Two buffers on one device, which other processes import by their handles. Used for every update.

    Whatever used their memory before is over when an update begins, for a source settles first.
    """

    def __init__(self, device: torch.device, nbytes: int = DEVICE_BUCKET_BYTES) -> None:
        """Raises TransferError: no room on the device, or its memory cannot be exported."""
        kind = accelerator_of(device)
        self.identity = kind.identity(device)
        free = kind.free_bytes(device)
        # Each process that uses a device takes some of its memory, half a gigabyte on some: training must not lack it.
        self.near = (
            f"only {describe_bytes(free)} are free on {device}, which it would need a part of"
            if free is not None and free < ROOM_BYTES
            else ""
        )
        self.nbytes = nbytes
        self._device = device
        try:
            self._tensors = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(IPC_BUFFERS)]
            handles = [kind.export(tensor) for tensor in self._tensors]
        except RuntimeError as error:  # a device's own kind is one of these
            raise TransferError(f"no buffers of {describe_bytes(nbytes)} on {device}: {error}") from error
        self.handles = tuple(handle for handle in handles if handle is not None)
        if len(self.handles) != IPC_BUFFERS:
            raise TransferError(f"memory of {device} cannot be exported to other processes")

    def write(self, bucket: Bucket, index: int, find: Find) -> int:
        """Copy a bucket into a buffer, zeros in the gaps; return its digest once it is there."""
        buffer, end = self._tensors[index], 0
        streams = CopyStreams()
        with streams.on(self._device):
            for piece in bucket.pieces:
                tensor, start = find(piece)
                values = tensor.detach().resolve_conj().resolve_neg().contiguous()
                buffer[end : piece.offset].zero_()
                end = piece.offset + piece.nbytes
                buffer[piece.offset : end].copy_(bytes_on_device(values, start, piece.nbytes), non_blocking=True)
            buffer[end : _padded(end)].zero_()
            sums = _sums(buffer[: _padded(bucket.nbytes)])
        streams.mark()()
        return _digest(sums)


class SourceOnDevice(TensorSource):
    """Named tensors on one device as the source of an update, with buffers there. They must not change meanwhile."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], buffers: DeviceBuffers) -> None:
        """`buffers`: on the device of the tensors; those of the update before."""
        super().__init__(tensors)
        self._buffers = buffers
        self.device, self.handles, self.near = buffers.identity, buffers.handles, buffers.near

    def place(self, bucket: Bucket, buffer: int) -> int:
        """Copy a bucket into a buffer on the device; return its digest, computed there."""
        return self._buffers.write(bucket, buffer, self._find)


class ImportedBuffers:
    """The buffers of another process, on a device that this one sees."""

    def __init__(self, handles: Sequence[bytes], device: torch.device, place: torch.device, nbytes: int) -> None:
        """`device`: where they lie; `place`: where buckets of at most `nbytes` are to go.

        Raises TransferError: the other process is gone, the driver refuses, or `place` has no room for a bucket.
        """
        self.handles = tuple(handles)
        self._place = place
        try:
            self._tensors = [accelerator_of(device).import_memory(handle, device) for handle in handles]
        except RuntimeError as error:
            raise TransferError(f"memory of another process cannot be imported on {device}: {error}") from error
        self._landing: torch.Tensor | None = None  # of buckets that come from another device
        if device != place:
            try:
                with CopyStreams().on(place):  # its memory is used on this stream alone
                    self._landing = torch.empty(_padded(nbytes), dtype=torch.uint8, device=place)
            except RuntimeError as error:
                raise TransferError(f"no room on {place} for a bucket of {describe_bytes(nbytes)}: {error}") from error

    def load(self, bucket: Bucket, index: int, store: Store) -> int:
        """Have `store` take each piece out of a buffer; return the bucket's digest, computed where the pieces go.

        The buffer is not read any more when this returns.
        """
        streams = CopyStreams()
        with streams.on(self._place):
            buffer = self._tensors[index][: _padded(bucket.nbytes)]
            if self._landing is not None:
                buffer = self._landing[: len(buffer)].copy_(buffer, non_blocking=True)
            for piece in bucket.pieces:
                store(streams, piece, buffer[piece.offset : piece.offset + piece.nbytes])
            sums = _sums(buffer)
        streams.mark()()
        return _digest(sums)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _WORD_BYTES) * _WORD_BYTES


def _sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row of words, each multiplied by the odd number of its place: no flipped bit is lost."""
    words, keys = values.view(torch.int64), _keys(values.device)
    whole = len(words) // _ROW_WORDS
    rows = words[: whole * _ROW_WORDS].view(whole, _ROW_WORDS)
    found = [(rows[first : first + _ROWS] * keys).sum(1) for first in range(0, whole, _ROWS)]
    rest = words[whole * _ROW_WORDS :]
    return torch.cat([*found, (rest * keys[: len(rest)]).sum().view(1)])


def _digest(sums: torch.Tensor) -> int:
    """Return the digest of what was summed. The sums have been computed."""
    found = sums.cpu()  # kept: its bytes do not keep it
    return xxhash.xxh3_64_intdigest(raw_bytes(found))


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    # Made on the stream of copies when it is first needed, and used on no other one.
    return (torch.arange(1, _ROW_WORDS + 1, device="cpu") * _ODD * 2 + 1).to(device)
