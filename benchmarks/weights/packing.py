"""Tensors packed into flat buckets and taken out of them again: what people write around a collective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def packed(tensors: Iterable[torch.Tensor], limit_bytes: int) -> list[list[torch.Tensor]]:
    """Flat views of the tensors, in order, in buckets of at most `limit_bytes`; a larger one has a bucket alone."""
    buckets: list[list[torch.Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if buckets[-1] and filled + tensor.nbytes > limit_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(tensor.view(-1))
        filled += tensor.nbytes
    return buckets


def flat_for(bucket: Sequence[torch.Tensor], *, fill: bool) -> torch.Tensor:
    """One tensor as large as the bucket: with its values (`fill`, who sends), or with none yet (who receives)."""
    if fill:
        return torch.cat(list(bucket))
    return torch.empty(sum(tensor.numel() for tensor in bucket), dtype=bucket[0].dtype)


def unpack(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> None:
    """Copy each tensor of the bucket out of `flat`."""
    start = 0
    for tensor in bucket:
        tensor.copy_(flat[start : start + tensor.numel()])
        start += tensor.numel()
