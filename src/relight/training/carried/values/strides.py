"""How tensors lie in memory."""

from collections.abc import Sequence

import torch


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether several elements lie in one place (an expanded tensor), so that torch does not write there."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def with_strides(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return equal values, laid out with other strides: sums go through a tensor in the order of its memory."""
    core = value
    for axis, stride in enumerate(strides):
        if stride == 0 and core.shape[axis] > 1:  # expanded: one value many times
            core = core.narrow(axis, 0, 1)
    made = torch.empty_strided(core.shape, list(strides), dtype=value.dtype, device=value.device)
    try:
        made.copy_(core)
    except RuntimeError:  # windows that overlap
        return value
    return made.as_strided(value.shape, list(strides))
