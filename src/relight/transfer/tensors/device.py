"""Weights in a device's own memory: copied between it and buffers of host memory that processes share.

Each copy goes straight from the tensor to the buffer, or back, on a stream that its device has for copies, beside the
kernels of a training step or of an engine. `buffers` pins the shared memory in processes that use a GPU, so the device
moves bytes by itself. For tensors in host memory everything here works too, in order and at once; relight has faster
ways for these.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash

from relight.device.choose import accelerator_of, is_accelerated
from relight.transfer.plan.plan import Bucket, Piece

LIFT_BYTES = 4 * 2**20  # digested while the next ones are under way


@functools.cache
def _stream_of(device: torch.device) -> Any:
    """Return the one stream for all copies of a device."""
    return accelerator_of(device).new_stream(device)


class CopyStreams:
    """The streams for copies, one for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Launch kernels inside on these streams; the host does not wait for them."""
        kind = accelerator_of(device)
        if kind.is_host:
            yield
            return
        stream = self._streams[device] = _stream_of(device)
        with kind.launching_on(stream):
            yield

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for everything launched so far."""
        events = [stream.record_event() for stream in self._streams.values()]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait


class Lift:
    """The pieces of a bucket on their way from devices into host memory."""

    def __init__(self, view: memoryview) -> None:
        """`view`: where the bucket goes."""
        self._host = torch.frombuffer(view, dtype=torch.uint8)
        self._streams = CopyStreams()
        self._marks: deque[tuple[int, Callable[[], None]]] = deque()
        self._arrived = 0
        self._unmarked_bytes = 0

    def __enter__(self) -> "Lift":
        return self

    def __exit__(self, *_: object) -> None:
        """No device writes there any more, also after an error."""
        self._streams.mark()()

    def add(self, tensor: torch.Tensor, start: int, count: int, offset: int) -> None:
        """Launch the copy of `count` bytes to `offset`: a tensor's values side by side, from byte `start` on.

        In rising order of `offset`.
        """
        with self._streams.on(tensor.device):
            # If this makes a copy, its memory is used again on this stream alone, after it was read.
            values = tensor.detach().resolve_conj().resolve_neg().contiguous()
            source = bytes_on_device(values, start, count)
            for done in range(0, count, LIFT_BYTES):
                end = min(done + LIFT_BYTES, count)
                self._host[offset + done : offset + end].copy_(source[done:end], non_blocking=True)
                self._unmarked_bytes += end - done
                if self._unmarked_bytes >= LIFT_BYTES:
                    self.mark(offset + end)

    def mark(self, end: int) -> None:
        """Mark that the pieces taken so far end before `end`: `wait` can wait for them."""
        self._marks.append((end, self._streams.mark()))
        self._unmarked_bytes = 0

    def wait(self, end: int) -> None:
        """Wait until every piece that goes before `end` is there, as far as there are marks."""
        while self._arrived < end and self._marks:
            self._arrived, wait = self._marks.popleft()
            wait()


class DeviceWriter:
    """Contiguous tensors on any devices, by their index in a manifest, to be filled where they lie.

    Devices copy a bucket out of host memory while the host digests it there: what is verified is what they were given
    to read, not what they wrote.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        settle(tensors.values())  # whatever used that memory before

    def load(self, bucket: Bucket, view: memoryview) -> int:
        """Take the bucket out of `view`; returns its digest. It is not read any more when this returns."""
        streams = CopyStreams()
        bytes_here = view[: bucket.nbytes]
        host = torch.frombuffer(bytes_here, dtype=torch.uint8)
        try:
            for piece in bucket.pieces:
                self.store(streams, piece, host[piece.offset : piece.offset + piece.nbytes])
            return xxhash.xxh3_64_intdigest(bytes_here)
        finally:
            streams.mark()()

    def store(self, streams: CopyStreams, piece: Piece, values: torch.Tensor) -> None:
        """Launch the copy of a piece to its place."""
        tensor = self._tensors[piece.tensor]
        with streams.on(tensor.device):
            if not piece.stride:
                bytes_on_device(tensor, piece.start, piece.nbytes).copy_(values, non_blocking=True)
                return
            runs = piece.nbytes // piece.run
            span = bytes_on_device(tensor, piece.start, (runs - 1) * piece.stride + piece.run)
            places = span.as_strided((runs, piece.run), (piece.stride, 1))
            places.copy_(values.view(runs, piece.run), non_blocking=True)


def bytes_on_device(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Some bytes of a contiguous tensor, shape `[count]`, dtype uint8, where they lie."""
    offset = tensor.storage_offset() * tensor.element_size() + start
    found = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    found.set_(tensor.untyped_storage(), offset, (count,), (1,))
    return found


def is_on_device(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether one of them lies elsewhere than in host memory."""
    return any(tensor.device.type != "cpu" for tensor in tensors)


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all that was launched on their devices, by this process."""
    for device in {tensor.device for tensor in tensors if is_accelerated(tensor)}:
        accelerator_of(device).synchronize(device)
