"""Silent corruption, seen from a worker: what is compared before the barrier, and how a test plants it."""

from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash

_MAX_NAMED = 3  # tensors, in a message
_MAX_NAMES_BYTES = 1024  # for all of them
_MAX_COMPARED = 2**22  # digests in one all-reduce
_DIGEST_BITS = 60  # of a digest, as an element of an all-reduce: int64 with a sign


class DigestExchange:
    """One rank's entries in the all-reduce that shows every rank the digest of every other.

    Each rank writes into its own element and leaves the others zero, so the sum is all of them.
    """

    def __init__(self, digest: Callable[[], str]) -> None:
        """`digest`: of this rank's state, as hex."""
        self._digest = digest

    def entries(self, rank: int, world_size: int, shard: str) -> list[int]:
        """This rank's row.

        Args:
            rank: this one.
            world_size: ranks in the job.
            shard: the part of a divided state that this rank holds, which it writes as well; empty: all of it.
        """
        entries = [0] * (2 * world_size if shard else world_size)
        entries[rank] = int(self._digest(), 16) >> 64 - _DIGEST_BITS
        if shard:
            entries[world_size + rank] = _hash(shard)
        return entries


def differ(sums: Sequence[int], world_size: int) -> bool:
    """Return whether two ranks that hold the same part of the state hold different bits, by the sum of all entries."""
    digests, parts = sums[:world_size], sums[world_size:] or [0] * len(sums)
    return len(set(zip(parts, digests, strict=True))) > len(set(parts))


def differing_tensors(
    own: Mapping[str, int], shard: str, rank: int, world_size: int, add_up: Callable[[list[int]], list[int]]
) -> tuple[str, ...]:
    """The first tensors that differ between ranks which hold the same part of the state, for people.

    All ranks call this together and get the same names; none if they cannot be found out.

    Args:
        own: digests of this rank's by their paths.
        shard: which part of the state that is.
        rank: this one's.
        world_size: ranks in the job.
        add_up: an all-reduce.
    """
    heads = [0] * (3 * world_size)
    heads[rank::world_size] = [_hash(shard), _hash("\n".join(own)), len(own)]
    sums = add_up(heads)
    parts, names, counts = sums[:world_size], sums[world_size : 2 * world_size], sums[2 * world_size :]
    if len(set(zip(parts, names, strict=True))) > len(set(parts)):
        return ("which tensors there are",)
    width = max(counts)  # ranks with other parts may hold more tensors, or fewer
    if width * world_size > _MAX_COMPARED:
        return ()
    table = [0] * (width * world_size)
    table[rank * width : rank * width + len(own)] = [digest >> 64 - _DIGEST_BITS for digest in own.values()]
    sums = add_up(table)
    for part in dict.fromkeys(parts):
        holders = [other for other in range(world_size) if parts[other] == part]
        columns = zip(*(sums[other * width : (other + 1) * width] for other in holders), strict=True)
        different = [number for number, column in enumerate(columns) if len(set(column)) > 1][:_MAX_NAMED]
        if different:
            paths = list(own) if rank == holders[0] else []  # the others may have no tensors of these names
            return tuple(_tell_all("\n".join(paths[number] for number in different if paths), add_up).split("\n"))
    return ()


def _tell_all(text: str, add_up: Callable[[list[int]], list[int]]) -> str:
    """Return the text of one rank on all ranks; the others come with an empty one."""
    said = add_up([*text.encode()[:_MAX_NAMES_BYTES].ljust(_MAX_NAMES_BYTES, b"\0")])
    return bytes(said).rstrip(b"\0").decode(errors="replace")


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) >> 64 - _DIGEST_BITS


def flip_bit(tensors: Sequence[torch.Tensor]) -> None:
    """Change the lowest bit of the middle element of the largest tensor, unnoticed by any hook."""
    tensor = max(tensors, key=lambda tensor: tensor.numel(), default=None)
    if tensor is None or not tensor.numel():
        return
    item = tensor.element_size()
    # `.data` has a version counter of its own: autograd and relight's own watch see nothing.
    flat = tensor.data.view(-1).view(torch.uint8)
    flat[tensor.numel() // 2 * item] ^= 1
