"""Weights as tensors: where an update's bytes come from, and where they go, bucket by bucket."""

import ctypes
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import xxhash

from relight.errors import TransferError, UsageError
from relight.transfer.codec import Flat, digest_of, host_copy, tensor_digests
from relight.transfer.manifest import Entry, Manifest, make_manifest
from relight.transfer.plan import Bucket

# Copied and digested in steps that stay in a core's own cache: the digest reads what the copy has just written.
_CHUNK_BYTES = 2**18


class Source(Protocol):
    """Whoever can fill buckets."""

    @property
    def manifest(self) -> Manifest: ...

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        """Write the bucket's pieces into `view`; returns their digest. May raise OSError or TransferError."""


class TensorSource:
    """Named tensors, read where they lie. They must not change while an update reads them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Any device, dtype and layout; what is not contiguous host memory is copied, one tensor at a time."""
        self._tensors = [tensor.detach() for tensor in tensors.values()]
        self.manifest = describe(tensors)
        self._copied: tuple[int, torch.Tensor] | None = None

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        target = address_of(view)
        digest = xxhash.xxh3_64()
        for piece in bucket.pieces:
            host = self._host(piece.tensor)
            source = host.data_ptr() + piece.start
            copy_and_digest(target + piece.offset, source, view[piece.offset : piece.offset + piece.nbytes], digest)
        return digest.intdigest()

    def _host(self, index: int) -> torch.Tensor:
        tensor = self._tensors[index]
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor
        if self._copied is None or self._copied[0] != index:
            self._copied = (index, host_copy(tensor))
        return self._copied[1]


def describe(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """The manifest of named tensors; a tensor met again under another name is moved once.

    Raises UsageError for what cannot be moved: sparse, quantized or nested tensors, unknown types.
    """
    entries = []
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{name} is a {type(tensor).__qualname__}, not a tensor")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise UsageError(f"{name} is a {tensor.layout} tensor; relight moves dense ones")
        if tensor.is_meta:
            raise UsageError(f"{name} has no data (device meta)")
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        same_as = seen.setdefault(key, name) if tensor.numel() else name
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, dtype, tuple(tensor.shape), "" if same_as == name else same_as))
    return make_manifest(entries)


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters and persistent buffers by name, without the prefix that DDP or compile puts in front."""
    tensors = module.state_dict(keep_vars=True)
    return {plain_name(name): value.detach() for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def plain_name(name: str) -> str:
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def digest_weights(tensors: Mapping[str, torch.Tensor]) -> str:
    """One digest for a set of weights, whatever moved them: names, types, shapes and bytes."""
    flat = Flat({name: tensors[name].detach() for name in sorted(tensors)})
    return digest_of(flat, [tensor_digests(tensor) for tensor in flat.tensors])


class Staging:
    """Host memory for a whole set of weights, which buckets are loaded into."""

    def __init__(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Use `tensors` (contiguous, on the host, as the manifest says), or allocate. Raises TransferError."""
        self.manifest = manifest
        self.tensors: dict[str, torch.Tensor] = {}
        for entry in manifest.entries:
            if entry.same_as:
                self.tensors[entry.name] = self.tensors[entry.same_as]
            elif tensors is not None:
                self.tensors[entry.name] = tensors[entry.name]
            else:
                self.tensors[entry.name] = allocate(entry)
        self._addresses = [self.tensors[entry.name].data_ptr() for entry in manifest.entries]

    def load(self, bucket: Bucket, view: memoryview) -> int:
        """Take the bucket out of `view`; returns the digest of what arrived here."""
        source = address_of(view)
        digest = xxhash.xxh3_64()
        for piece in bucket.pieces:
            target = self._addresses[piece.tensor] + piece.start
            arrived = memoryview((ctypes.c_char * piece.nbytes).from_address(target)).cast("B")
            copy_and_digest(target, source + piece.offset, arrived, digest)
        return digest.intdigest()

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every name with its tensor, tied ones too."""
        yield from self.tensors.items()


def allocate(entry: Entry) -> torch.Tensor:
    """An uninitialized host tensor for this entry. Raises TransferError: no memory, or a type this torch lacks."""
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise TransferError(f"{entry.name}: this torch has no type {entry.dtype}")
    try:
        return torch.empty(entry.shape, dtype=dtype)
    except RuntimeError as error:
        raise TransferError(f"{entry.name}: no memory for {entry.nbytes} bytes") from error


def copy_and_digest(target: int, source: int, arrived: memoryview, digest: "xxhash.xxh3_64") -> None:
    """Copy as many bytes as `arrived` has, which is the memory at `target`, and digest them there."""
    for start in range(0, len(arrived), _CHUNK_BYTES):
        count = min(_CHUNK_BYTES, len(arrived) - start)
        ctypes.memmove(target + start, source + start, count)
        digest.update(arrived[start : start + count])


def address_of(view: memoryview) -> int:
    """Where a writable view begins. Keep the view alive while the address is used."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
