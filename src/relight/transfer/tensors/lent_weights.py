"""A whole set of weights in shared memory, laid out as the buckets are, which engines read where it lies.

Tensors can be moved there: they get that memory instead of their own, so their owner trains in it. What cannot be
moved, such as a buffer of which another process has the memory, is copied there before each update.
"""

from collections.abc import Callable, Mapping

import torch
import xxhash

from relight.errors import TransferError
from relight.transfer.io.codec import is_plain
from relight.transfer.io.lent import LentMemory
from relight.transfer.plan.manifest import describe_bytes
from relight.transfer.plan.plan import Bucket, offsets_of
from relight.transfer.tensors.populate import is_memory_plentiful
from relight.transfer.tensors.torch_private import set_memory, users_of_storage
from relight.transfer.tensors.weights import TensorReader, describe, dtype_of

_OWN_USERS = 2  # of the storage of a place in which no tensor lies: the place, and what is read of it
_MOST_COPIED = 16  # at most this part of the bytes is copied before an update, or else lending gains too little


class LentWeights(TensorReader):
    """Named tensors as a source, read in place by engines. They must not change while an update reads them."""

    unlendable = ""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], may_move: Callable[[torch.Tensor], bool] = lambda _: True
    ) -> None:
        """Move the tensors, of those that `may_move` allows, and copy the others. Their values stay the same.

        Raises TransferError if that cannot be: not enough memory, or too much would have to be copied. Then no tensor
        has moved.
        """
        self.manifest = describe(tensors)
        self._offsets, nbytes = offsets_of(self.manifest)
        movable = {name for name, tensor in tensors.items() if may_move(tensor) and is_alone(tensor)}
        self._check(tensors, movable, nbytes)
        self.memory = LentMemory(nbytes)
        self._places: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for entry, offset in zip(self.manifest.entries, self._offsets, strict=True):
                if not entry.nbytes:
                    continue
                dtype = dtype_of(entry)
                count = entry.nbytes // dtype.itemsize
                # Not a view of one large tensor: each has a storage of its own size, as before.
                flat = torch.frombuffer(self.memory.view, dtype=dtype, count=count, offset=offset)
                # And not a view of `flat`, which would count as a user.
                place = torch.empty(0, dtype=dtype, device="cpu").set_(flat.untyped_storage()).resize_(entry.shape)
                self._places[entry.name] = place
                place.copy_(tensors[entry.name])
                if entry.name in movable:
                    set_memory(tensors[entry.name], place)
        super().__init__(
            [self._places.get(entry.name, torch.empty(0, device="cpu")) for entry in self.manifest.entries]
        )

    def take(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Copy, before an update, tensors that were given other memory since.

        Returns why the update cannot lend; empty: it can.
        """
        if describe(tensors) != self.manifest:
            return "the tensors are not those that were moved into shared memory"
        away = {name: place for name, place in self._places.items() if tensors[name].data_ptr() != place.data_ptr()}
        is_much = sum(place.nbytes for place in away.values()) * _MOST_COPIED > self.memory.nbytes
        if is_much or any(
            users_of_storage(place) > _OWN_USERS for place in away.values()
        ):  # it is another tensor's now
            return f"{len(away)} tensors have left shared memory: they were given other memory (.data)"
        with torch.no_grad():
            for name, place in away.items():
                place.copy_(tensors[name])
        return ""

    def lend(self, bucket: Bucket) -> int:
        """Return the digest of the bucket, which others may read from now on."""
        start = place_of(bucket, self._offsets)
        return xxhash.xxh3_64_intdigest(self.memory.view[start : start + bucket.nbytes])

    def _check(self, tensors: Mapping[str, torch.Tensor], movable: set[str], nbytes: int) -> None:
        stays = {e.name: e.nbytes for e in self.manifest.entries if e.nbytes and e.name not in movable}
        if nbytes < 1:
            raise TransferError("there is nothing to lend")
        if sum(stays.values()) * _MOST_COPIED > nbytes:
            name = max(stays, key=lambda key: stays[key])
            raise TransferError(f"{name} {_why_it_stays(tensors[name])}")
        if not is_memory_plentiful(nbytes):
            raise TransferError(f"not enough memory is free to move {describe_bytes(nbytes)} into shared memory")


def place_of(bucket: Bucket, offsets: "list[int]") -> int:
    """Return where a bucket begins in memory that has the whole set of weights (`offsets_of`)."""
    first = bucket.pieces[0]
    return offsets[first.tensor] + first.start - first.offset


def is_alone(tensor: torch.Tensor) -> bool:
    """True if the tensor can get other memory: nothing else knows its own, which is exactly as large as it is."""
    return is_plain(tensor) and _is_whole(tensor) and users_of_storage(tensor) == 1


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _why_it_stays(tensor: torch.Tensor) -> str:
    if not is_plain(tensor):
        return "does not lie side by side in host memory"
    return "cannot be moved into shared memory: another tensor has the same memory, or it is a buffer"
