"""An update whose tensors are made one after the other, such as gathered ones: no more than three exist at a time.

The script's own thread makes the tensors, since that may need collectives; the publisher's writer takes each as it
needs it. What was taken is gone: if an engine needs a bucket written again, the update ends, and is to be sent again.
"""

import queue
from collections.abc import Iterable

import torch

from relight.errors import TransferError, UsageError
from relight.transfer.plan.manifest import Entry, Manifest, make_manifest
from relight.transfer.plan.plan import Piece
from relight.transfer.plan.update.result import Published
from relight.transfer.publish.handle import Handle
from relight.transfer.publish.publisher import Publisher
from relight.transfer.tensors.device import settle
from relight.transfer.tensors.weights import TensorReader

_LOOK_SECONDS = 0.05  # between two looks at whether the other side has given up

Pairs = Iterable[tuple[str, torch.Tensor]]


def entry_of(name: str, dtype: torch.dtype, shape: Iterable[int]) -> Entry:
    """Describe one tensor of an update."""
    return Entry(name, str(dtype).removeprefix("torch."), tuple(shape))


def send_stream(publisher: Publisher, entries: Iterable[Entry], tensors: Pairs, *, version: int) -> Published:
    """Send an update whose tensors are made one by one, and return its result. All of `tensors` are made in any case.

    Args:
        publisher: no other update of it may be under way.
        entries: description of all tensors, in the order in which they come.
        tensors: names and tensors; each may be changed or freed once the next one has been asked for.
        version: version of the weights.

    Raises:
        UsageError: a tensor is not the one that was described.
    """
    stream = _WeightStream(make_manifest(entries))
    handle = publisher.begin(stream, version=version)
    try:
        stream.feed(tensors, handle)
    except BaseException as error:
        stream.stop(f"the tensors ended with {type(error).__name__}: {error}")
        handle.cancel("its tensors were not made")
        raise
    result = handle.wait()
    assert result is not None
    return result


class _WeightStream(TensorReader):
    """A source (`transfer.source.Source`) that is given its tensors while it fills buckets."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._given: queue.Queue[tuple[int, torch.Tensor]] = queue.Queue(1)
        self._index, self._tensor = -1, torch.empty(0, device="cpu")  # that is being read
        self._stopped = ""
        super().__init__([])

    # --- for the thread that makes tensors --------------------------------------------------------------------------
    def feed(self, tensors: Pairs, handle: Handle) -> None:
        """Give all tensors. Raises UsageError."""
        entries = self.manifest.entries
        index = -1
        for index, (name, tensor) in enumerate(tensors):
            found = entry_of(name, tensor.dtype, tensor.shape)
            if index >= len(entries) or found != entries[index]:
                wanted = entries[index] if index < len(entries) else "none any more"
                raise UsageError(f"tensor {index} was described as {wanted}, and is {found}")
            self._give(index, tensor.detach(), handle)
        if index + 1 < len(entries):
            raise UsageError(f"{len(entries)} tensors were described, and {index + 1} came")

    def _give(self, index: int, tensor: torch.Tensor, handle: Handle) -> None:
        settle([tensor])
        while not handle.over:
            try:
                self._given.put((index, tensor), timeout=_LOOK_SECONDS)
            except queue.Full:
                continue
            return

    def stop(self, why: str) -> None:
        """No more tensors come."""
        self._stopped = why

    # --- for the writer -----------------------------------------------------------------------------------------
    def _find(self, piece: Piece) -> tuple[torch.Tensor, int]:
        while self._index < piece.tensor:
            self._index, self._tensor = self._next()
        if self._index > piece.tensor:
            raise TransferError("a bucket was to be written again, and its tensors are gone: send the update again")
        return self._tensor, piece.start

    def _next(self) -> tuple[int, torch.Tensor]:
        while True:
            try:
                return self._given.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if self._stopped:
                    raise TransferError(self._stopped) from None
