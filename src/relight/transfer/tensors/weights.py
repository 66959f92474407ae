"""Weights as tensors: read and written bucket by bucket."""

import contextlib
import copy
import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import xxhash

from relight.errors import TransferError, UsageError
from relight.transfer.io.codec import Flat, digest_of, host_copy, is_plain, is_side_by_side, raw_bytes, tensor_digests
from relight.transfer.plan.division import LocalOffsets, ShardSpec
from relight.transfer.plan.manifest import Entry, Manifest, make_manifest
from relight.transfer.plan.plan import Bucket, Piece
from relight.transfer.tensors.device import LIFT_BYTES, DeviceWriter, Lift, is_on_device, settle
from relight.transfer.tensors.torch_private import COMPILED

# Copied and digested in steps that stay in a core's own cache: the digest reads what the copy has just written.
CHUNK_BYTES = 2**18


class TensorReader:
    """Tensors by their index in a manifest, read where they lie."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Any device, dtype and layout; what is not contiguous host memory is copied, a bucket's part at a time."""
        self._tensors = [tensor.detach() for tensor in tensors]
        self._is_on_device = is_on_device(self._tensors)
        self.settle()

    def settle(self) -> None:
        """Wait for what was launched on the tensors' devices: their values are those of all that came before."""
        if self._is_on_device:
            settle(self._tensors)

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        """Write the bucket into `view`, zeros in the gaps between pieces; returns the digest of all of it."""
        digest = xxhash.xxh3_64()
        self._write(bucket, view, digest.update)
        return digest.intdigest()

    def write(self, bucket: Bucket, view: memoryview) -> None:
        """Write the bucket into `view` like `fill`, for a bucket whose digest is known."""
        self._write(bucket, view, lambda _: None)

    def _write(self, bucket: Bucket, view: memoryview, report: Callable[[memoryview], None]) -> None:
        """Write the bucket; `report` gets all that is written, in its order, a part at a time."""
        if self._is_on_device:
            self._write_from_device(bucket, view, report)
            return
        target = address_of(view)
        reported = written = 0
        for piece in bucket.pieces:
            if piece.offset > written:
                view[written : piece.offset] = bytes(piece.offset - written)
            host, start = self._host(piece)
            source = host.data_ptr() + start
            for done in range(0, piece.nbytes, CHUNK_BYTES):
                count = min(CHUNK_BYTES, piece.nbytes - done)
                ctypes.memmove(target + piece.offset + done, source + done, count)
                written = piece.offset + done + count
                if written - reported >= CHUNK_BYTES:
                    report(view[reported:written])
                    reported = written
        report(view[reported:written])

    def _write_from_device(self, bucket: Bucket, view: memoryview, report: Callable[[memoryview], None]) -> None:
        """Write like `_write` from a device: launch every copy, then report each part as it arrives."""
        with Lift(view) as lift:
            end = 0
            for piece in bucket.pieces:
                view[end : piece.offset] = bytes(piece.offset - end)
                tensor, start = self._find(piece)
                if not is_side_by_side(tensor):
                    tensor, start = _rows(tensor, start, piece.nbytes)
                lift.add(tensor, start, piece.nbytes, piece.offset)
                end = piece.offset + piece.nbytes
            lift.mark(end)
            for start in range(0, end, LIFT_BYTES):
                until = min(start + LIFT_BYTES, end)
                lift.wait(until)
                report(view[start:until])

    def digest(self, bucket: Bucket) -> int:
        """Return the digest that `fill` returns, without a copy."""
        return self.copy(bucket, {})

    def copy(self, bucket: Bucket, addresses: Mapping[int, int]) -> int:
        """Return the digest of a bucket; copy each piece of a tensor that has a twin at `addresses[tensor]` there.

        Twins have as many bytes, side by side, in host memory.
        """
        digest = xxhash.xxh3_64()
        end = 0
        for piece in bucket.pieces:
            host, start = self._host(piece)
            source, twin = host.data_ptr() + start, addresses.get(piece.tensor)
            digest.update(bytes(piece.offset - end))
            if twin is None:
                digest.update(bytes_at(source, piece.nbytes))
            else:
                copy_and_digest(twin + piece.start, source, bytes_at(twin + piece.start, piece.nbytes), digest)
            end = piece.offset + piece.nbytes
        return digest.intdigest()

    def views(self, bucket: Bucket) -> Iterator[memoryview]:
        """The bucket's pieces in order, to be read where they lie, and zeros for the gaps between them."""
        end = 0
        for piece in bucket.pieces:
            if piece.offset > end:
                yield memoryview(bytes(piece.offset - end))
            host, start = self._host(piece)
            yield bytes_of(host, start, piece.nbytes)
            end = piece.offset + piece.nbytes

    def _host(self, piece: Piece) -> tuple[torch.Tensor, int]:
        """Contiguous host memory that holds the piece, and where it begins there.

        Nothing is kept from one call to the next: by then the tensor may have changed.
        """
        tensor, start = self._find(piece)
        if is_plain(tensor):
            return tensor, start
        tensor, start = _rows(tensor, start, piece.nbytes)
        return host_copy(tensor), start

    def _find(self, piece: Piece) -> tuple[torch.Tensor, int]:
        """The tensor that holds the piece, side by side, and where it begins there, in bytes."""
        return self._tensors[piece.tensor], piece.start


def _rows(tensor: torch.Tensor, start: int, count: int) -> tuple[torch.Tensor, int]:
    """Return the rows to make contiguous for these bytes, and where the bytes begin in them."""
    while tensor.dim() and len(tensor) == 1:
        tensor = tensor[0]
    if not tensor.dim():
        return tensor, start
    row = tensor.numel() * tensor.element_size() // len(tensor)
    first = start // row
    return tensor[first : -(-(start + count) // row)], start - first * row


class TensorWriter:
    """Contiguous tensors by their index in a manifest, to be filled where they lie."""

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Those of buckets that will come."""
        self._tensors = dict(tensors)  # keeps the memory
        self._device = DeviceWriter(tensors) if is_on_device(tensors.values()) else None
        self._addresses = {index: tensor.data_ptr() for index, tensor in tensors.items()}

    def load(self, bucket: Bucket, view: memoryview) -> int:
        """Take the bucket out of `view`; returns the digest of what arrived here."""
        if self._device is not None:
            return self._device.load(bucket, view)
        return load_pieces(bucket, view, self._addresses)

    @contextlib.contextmanager
    def places(self, bucket: Bucket) -> Iterator[Iterator[memoryview]]:
        """Give the memory that a bucket is written to: its pieces in order, and places for what fills the gaps.

        At the end of the block it is in the tensors, unless the block raised: then they may hold some of it.
        """
        if self._device is None:
            yield self._views(bucket)
            return
        received = memoryview(bytearray(bucket.nbytes))
        yield iter([received])
        self._device.load(bucket, received)

    def _views(self, bucket: Bucket) -> Iterator[memoryview]:
        end = 0
        for piece in bucket.pieces:
            if piece.offset > end:
                yield memoryview(bytearray(piece.offset - end))
            yield bytes_of(self._tensors[piece.tensor], piece.start, piece.nbytes)
            end = piece.offset + piece.nbytes


class TensorSource(TensorReader):
    """Named tensors as the source of an update. They must not change while an update reads them."""

    unlendable = "the weights do not lie in shared memory"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.manifest = describe(tensors)
        super().__init__(list(tensors.values()))


class PartSource(TensorReader):
    """Parts of named tensors as one of several sources of an update. They must not change while it reads them."""

    unlendable = "the weights are divided over ranks"

    def __init__(self, held: ShardSpec, tensors: Mapping[int, torch.Tensor], changing: Collection[int] = ()) -> None:
        """`held`: parts as `division.parts_of` gives them. `tensors`: the box that the parts of a tensor make up.

        By the tensor's index, as in `changing`: those that may change while an update reads the others.
        """
        self.held = held
        self.manifest = Manifest(held.manifest.entries)
        self._holding = LocalOffsets(held.manifest.parts)
        self._boxes = {index: tensor.detach() for index, tensor in tensors.items()}
        self._changing = [index for index in self._boxes if index in changing]
        super().__init__(list(self._boxes.values()))

    def frozen(self) -> "PartSource":
        """Return a source with copies of the tensors that may change, as they are now."""
        if not self._changing:
            self.settle()
            return self
        found = copy.copy(self)
        found._boxes = {**self._boxes, **{index: self._boxes[index].clone() for index in self._changing}}
        found.settle()
        return found

    def _find(self, piece: Piece) -> tuple[torch.Tensor, int]:
        start = self._holding.find(piece.tensor, piece.start)
        return self._boxes[piece.tensor], start


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
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        key = (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())
        same_as = seen.setdefault(key, name) if tensor.numel() else name
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, dtype, tuple(tensor.shape), "" if same_as == name else same_as))
    return make_manifest(entries)


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters and persistent buffers by name, without the prefix that DDP or compile puts in front."""
    return {name: tensor.detach() for name, tensor in own_tensors(module).items()}


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Like `weights_of`, but the module's own objects, whose memory can be exchanged."""
    named = module.state_dict(keep_vars=True)
    return {plain_name(name): value for name, value in named.items() if isinstance(value, torch.Tensor)}


def plain_name(name: str) -> str:
    parts = [part for part in name.split(".") if part != COMPILED]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def digest_weights(tensors: Mapping[str, torch.Tensor]) -> str:
    """One digest for a set of weights, whatever moved them: names, types, shapes and bytes."""
    flat = Flat({name: tensors[name].detach() for name in sorted(tensors)})
    return digest_of(flat, [tensor_digests(tensor) for tensor in flat.tensors])


def dtype_of(entry: Entry) -> torch.dtype:
    """Raises TransferError for a type this torch lacks."""
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise TransferError(f"{entry.name}: this torch has no type {entry.dtype}")
    return dtype


def allocate(entry: Entry) -> torch.Tensor:
    """An uninitialized host tensor for this entry. Raises TransferError: no memory, or a type this torch lacks."""
    dtype = dtype_of(entry)
    try:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise TransferError(f"{entry.name}: no memory for {entry.nbytes} bytes") from error


def load_pieces(bucket: Bucket, view: memoryview, addresses: Mapping[int, int]) -> int:
    """Copy each piece to its place in its tensor, which begins at `addresses[tensor]`; returns what to verify.

    That is the digest of the bucket as it arrived, in the order of its bytes.
    """
    source = address_of(view)
    digest = xxhash.xxh3_64()
    end = 0
    for piece in bucket.pieces:
        digest.update(view[end : piece.offset])
        target = addresses[piece.tensor] + piece.start
        if piece.stride:
            _scatter_and_digest(target, view[piece.offset : piece.offset + piece.nbytes], piece, digest)
        else:
            copy_and_digest(target, source + piece.offset, bytes_at(target, piece.nbytes), digest)
        end = piece.offset + piece.nbytes
    return digest.intdigest()


def _scatter_and_digest(target: int, packed: memoryview, piece: Piece, digest: "xxhash.xxh3_64") -> None:
    """Copy the runs of a piece to their places from `target` on, and digest them there, gathered again."""
    runs = piece.nbytes // piece.run
    memory = bytes_at(target, (runs - 1) * piece.stride + piece.run)
    places = torch.frombuffer(memory, dtype=torch.uint8).as_strided((runs, piece.run), (piece.stride, 1))
    values = torch.frombuffer(packed, dtype=torch.uint8).view(runs, piece.run)
    step = max(1, CHUNK_BYTES // piece.run)
    arrived = torch.empty(min(step, runs), piece.run, dtype=torch.uint8, device="cpu")
    for first in range(0, runs, step):
        count = min(step, runs - first)
        places[first : first + count].copy_(values[first : first + count])
        arrived[:count].copy_(places[first : first + count])
        digest.update(raw_bytes(arrived[:count]))


def copy_and_digest(target: int, source: int, arrived: memoryview, digest: "xxhash.xxh3_64") -> None:
    """Copy as many bytes as `arrived` has, which is the memory at `target`, and digest them there."""
    for start in range(0, len(arrived), CHUNK_BYTES):
        count = min(CHUNK_BYTES, len(arrived) - start)
        ctypes.memmove(target + start, source + start, count)
        digest.update(arrived[start : start + count])


def bytes_at(address: int, count: int) -> memoryview:
    """Memory as writable bytes. Keep its owner alive meanwhile."""
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


def bytes_of(tensor: torch.Tensor, start: int, count: int) -> memoryview:
    """Some bytes of a contiguous host tensor, writable; the view keeps the tensor's memory."""
    array = (ctypes.c_char * count).from_address(tensor.data_ptr() + start)
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def address_of(view: memoryview) -> int:
    """Return the address of a writable view. Keep the view alive while the address is used."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
