"""Targets of an engine's buckets: a copy beside the live weights, or these themselves."""

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from relight.device.choose import accelerator_of
from relight.errors import TransferError
from relight.transfer.io.messages import Begin
from relight.transfer.plan.manifest import Manifest
from relight.transfer.plan.plan import Bucket
from relight.transfer.tensors.device import is_on_device, settle
from relight.transfer.tensors.device_buffers import ImportedBuffers
from relight.transfer.tensors.device_staging import DeviceStaging
from relight.transfer.tensors.staging import Staging
from relight.transfer.tensors.weights import TensorWriter, allocate, describe

Pairs = Iterable[tuple[str, torch.Tensor]]


class Target(Protocol):
    """Takes buckets. `Receiver` calls these from one thread."""

    wants: Manifest | None
    in_place: bool
    needs_buffers: str  # why it takes buckets out of buffers only; empty: it reads what is lent as well

    def prepare(self) -> None:
        """An update may come: allocate what it will need, as far as that is known."""

    def begin_update(self, manifest: Manifest) -> None:
        """An update begins. Raises TransferError or UsageError to refuse it; nothing of the engine has changed."""

    def import_buffers(self, begin: Begin) -> str:
        """Import the buffers on a device of another process; return why that cannot be, empty if they are there."""

    def load_on_device(self, bucket: Bucket, buffer: int) -> int:
        """Take the bucket out of an imported buffer; returns the digest that the device has computed."""

    def load(self, bucket: Bucket, view: memoryview) -> int:
        """Take the bucket; returns the digest of what arrived."""

    def accept(self, bucket: Bucket) -> None:
        """The bucket loaded last has the digest of the one that was sent."""

    def commit(self) -> None:
        """Every bucket is loaded: make them the live version. No request is served meanwhile."""

    def abandon(self) -> None:
        """Forget what was loaded."""


class _InHostMemory:
    """Does without buffers on devices."""

    def import_buffers(self, begin: Begin) -> str:
        return f"it takes weights into host memory, and not on {begin.device}"

    def load_on_device(self, bucket: Bucket, buffer: int) -> int:
        raise TransferError(f"bucket {bucket.index} came in buffer {buffer} of a device")


class _Staged(_InHostMemory):
    """Loads into a second copy of the weights, which later updates use again."""

    in_place = False
    needs_buffers = ""

    def __init__(self, wants: Manifest | None) -> None:
        self.wants = wants
        self._staging: Staging | DeviceStaging | None = None
        self._populating: Sequence[threading.Thread] = ()

    def prepare(self) -> None:
        if self._staging is None and self.wants is not None:
            with contextlib.suppress(TransferError):  # the update itself will say so
                self._staging = self._make(self.wants)
                self._populating = self._staging.populate()

    def begin_update(self, manifest: Manifest) -> None:
        if self._staging is None or not self._staging.reuse_for(manifest):
            self._staging = None  # before the next one is allocated
            self._staging = self._make(manifest)
            self._populating = self._staging.populate()

    def _make(self, manifest: Manifest) -> Staging | DeviceStaging:
        return Staging(manifest)

    def load(self, bucket: Bucket, view: memoryview) -> int:
        assert self._staging is not None
        return self._staging.load(bucket, view)

    def accept(self, bucket: Bucket) -> None:
        pass

    def abandon(self) -> None:
        pass


class StagedTensors(_Staged):
    """A second copy of the live tensors, and an exchange of the two."""

    def __init__(self, live: Mapping[str, torch.Tensor], *, in_host_memory: bool = False) -> None:
        """The copy lies where the live tensors lie, unless it is to be `in_host_memory`."""
        super().__init__(describe(live))
        self._staged_like = live if is_on_device(live.values()) and not in_host_memory else None
        if self._staged_like is not None:
            self.needs_buffers = "its weights lie on a device, which copies out of buffers by itself"
        distinct = {id(tensor): (name, tensor) for name, tensor in live.items()}  # tied: one under several names
        self._live = list(distinct.values())
        self._imported: ImportedBuffers | None = None
        self._current: Staging | None = None  # whose memory is live
        self._following: Staging | None = None  # for the update after the first one, which keeps the first's memory

    def prepare(self) -> None:
        is_first = self._staging is None and self._current is None and self._following is None
        super().prepare()
        if is_first and isinstance(self._staging, Staging) and self._replaceable():
            with contextlib.suppress(TransferError):
                self._following = Staging(self._staging.manifest)
                self._following.populate(after=self._populating)

    def _make(self, manifest: Manifest) -> Staging | DeviceStaging:
        following, self._following = self._following, None
        if following is not None and following.reuse_for(manifest):
            return following
        return Staging(manifest) if self._staged_like is None else DeviceStaging(manifest, self._staged_like)

    def commit(self) -> None:
        """Make the staged values those of the live tensors."""
        assert self._staging is not None
        settle(live for _, live in self._live)  # kernels of the last requests may still read what changes here
        if isinstance(self._staging, Staging):
            self._exchange(self._staging)
        else:  # captured graphs and compiled code know a device's tensors by their address
            for name, live in self._live:
                live.data.copy_(self._staging.tensors[name])
        settle(live for _, live in self._live)  # on whatever stream the next request runs
        self.prepare()  # a second copy after the first update: its memory is found while the engine works
        self._following = None

    def import_buffers(self, begin: Begin) -> str:
        places = {tensor.device for _, tensor in self._live}
        if self._staged_like is None:
            return super().import_buffers(begin)
        if len(places) > 1:
            return "its weights lie on several devices"
        place = places.pop()
        kind = accelerator_of(place)
        device = kind.device_named(begin.device)
        if device is None:
            return f"it does not see {begin.device}, where the weights are"
        if device != place and (why := begin.near):
            return f"its weights lie on another device, and {why}"
        if device != place and not kind.reaches(place, device):
            return f"{place}, where its weights lie, cannot read the memory of {device} by itself"
        if self._imported is None or self._imported.handles != begin.handles:
            try:
                self._imported = ImportedBuffers(begin.handles, device, place, begin.bucket_bytes)
            except TransferError as error:
                return str(error)
        return ""

    def load_on_device(self, bucket: Bucket, buffer: int) -> int:
        if self._imported is None or not isinstance(self._staging, DeviceStaging):
            return super().load_on_device(bucket, buffer)
        return self._staging.load_on_device(bucket, self._imported, buffer)

    def _exchange(self, staging: Staging) -> None:
        """Give live tensors the staged ones' memory where that can be done without a copy.

        The memory of the update before, which was live until now, is the next update's staging; unless anything live
        still uses it. If this breaks off, neither is used again.
        """
        self._staging = None
        previous, self._current = self._current, None
        replaceable = self._replaceable()
        given: set[int] = set()
        for name, live in self._live:
            staged = staging.tensors[name]
            if name in replaceable and id(staged) not in given:
                given.add(id(staged))
                live.data = staged
            else:
                live.data.copy_(staged)
        for memory in (staging, previous):
            if memory is None:
                continue
            if memory.holds_any(live for _, live in self._live):
                self._current = self._current or memory
            else:
                self._staging = self._staging or memory

    def _replaceable(self) -> set[str]:
        """Names of the live tensors whose memory can be replaced by staged memory without a copy."""
        users = Counter(live.untyped_storage().data_ptr() for _, live in self._live)
        return {
            name
            for name, live in self._live
            if users[live.untyped_storage().data_ptr()] == 1
            and _owns_its_storage(live)
            and live.device.type == "cpu"
            and live.is_contiguous()
        }


def _owns_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is all of its storage; a slice must stay where its owner looks for it."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


class StagedCallback(_Staged):
    """A copy in host memory, handed to `load` as a whole when it is complete."""

    def __init__(self, load: Callable[[Pairs], object]) -> None:
        super().__init__(None)
        self._callback = load

    def commit(self) -> None:
        assert isinstance(self._staging, Staging)
        self._callback(self._staging.pairs())


class InPlaceCallback(_InHostMemory):
    """No second copy: `load` gets each tensor once its last byte is verified.

    Only tensors whose bytes are still arriving are held here: those of one bucket, and one that spans several; if
    the weights are divided, those of one bucket for each group of sources.
    """

    in_place = True
    needs_buffers = ""

    def __init__(self, load: Callable[[Pairs], object]) -> None:
        self.wants: Manifest | None = None  # only the callback knows
        self._callback = load
        self._manifest = Manifest(())
        self._missing: dict[int, int] = {}  # entry -> bytes to come
        self._tensors: dict[int, torch.Tensor] = {}
        self._ties: dict[str, list[str]] = {}  # other names of a tensor

    def prepare(self) -> None:
        pass

    def begin_update(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._missing = {index: entry.nbytes for index, entry in enumerate(manifest.entries)}
        self._tensors = {}
        self._ties = defaultdict(list)
        for entry in manifest.entries:
            if entry.same_as:
                self._ties[entry.same_as].append(entry.name)

    def load(self, bucket: Bucket, view: memoryview) -> int:
        for piece in bucket.pieces:
            if piece.tensor not in self._tensors:
                self._tensors[piece.tensor] = allocate(self._manifest.entries[piece.tensor])
        return TensorWriter(self._tensors).load(bucket, view)

    def accept(self, bucket: Bucket) -> None:
        complete = []
        for piece in bucket.pieces:
            self._missing[piece.tensor] -= piece.nbytes
            if not self._missing[piece.tensor]:
                complete.append((self._manifest.entries[piece.tensor].name, self._tensors.pop(piece.tensor)))
        if complete:
            self._callback(self._with_ties(complete))

    def _with_ties(self, complete: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in complete:
            yield name, tensor
            for other in self._ties.get(name, ()):
                yield other, tensor

    def commit(self) -> None:
        empty = [(e.name, allocate(e)) for e in self._manifest.entries if not e.nbytes and not e.same_as]
        if empty:
            self._callback(self._with_ties(empty))

    def abandon(self) -> None:
        self._tensors.clear()
