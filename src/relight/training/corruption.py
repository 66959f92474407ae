"""Silent corruption, seen from a worker: what is compared at the barrier, and how a test plants it."""

from collections.abc import Callable, Sequence

import torch

_DIGEST_BITS = 60  # of a digest, as an element of an all-reduce: int64 with a sign


class Ballot:
    """The part of a barrier's all-reduce in which every rank sees the digest of every other.

    Each rank writes into its own element and leaves the others zero, so the sum is all of them.
    """

    def __init__(self, every: int, digest: Callable[[], str]) -> None:
        """`every`: steps from one comparison to the next; 0: never. `digest`: of the replicated state, as hex."""
        self._every = every
        self._digest = digest

    def entries(self, version: int, rank: int, world_size: int) -> list[int]:
        """What this rank adds to the barrier of the step that starts from `version`; nothing for most steps."""
        if not self._every or version % self._every:
            return []
        entries = [0] * world_size
        entries[rank] = int(self._digest(), 16) >> 64 - _DIGEST_BITS
        return entries


def flip_bit(tensors: Sequence[torch.Tensor]) -> None:
    """Change the lowest bit of the middle element of the largest tensor, as a cosmic ray would: no hook hears of it."""
    tensor = max(tensors, key=lambda tensor: tensor.numel(), default=None)
    if tensor is None or not tensor.numel():
        return
    item = tensor.element_size()
    # `.data` has a version counter of its own: autograd and relight's own watch see nothing.
    flat = tensor.data.view(-1).view(torch.uint8)
    flat[tensor.numel() // 2 * item] ^= 1
