"""Strides of tensors: their layout in memory."""

from collections.abc import Sequence

import torch


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether several elements lie in one place (an expanded tensor), so that torch does not write there."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def strides_of(tensor: torch.Tensor) -> list[int] | None:
    """Return the strides that a copy of this tensor needs, or None if it needs none: rows lie one after another.

    LAPACK returns columns one after another, and `memory_format` permutes axes: products of equal values, laid out
    otherwise, are summed in another order. A tensor with gaps between its elements (a slice) is copied without them.
    """
    if tensor.layout is not torch.strided or (tensor.is_contiguous() and 1 not in tensor.shape):
        return None
    extent = 1
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    for stride, size in sorted((stride, size) for size, stride in pairs if size > 1):
        if stride != extent:
            return None  # gaps, or elements in one place
        extent *= size
    strides = list(tensor.stride())
    return strides if strides != _row_by_row(tensor.shape) else None


def has_gaps(tensor: torch.Tensor) -> bool:
    """Return whether other memory lies between elements of this tensor (a slice), which a copy leaves out."""
    if tensor.layout is not torch.strided or tensor.is_contiguous() or overlaps(tensor):
        return False
    return strides_of(tensor) is None


def laid_out(tensor: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """Return this tensor, or its values with the strides that `strides_of` returned."""
    if strides is None:
        return tensor if strides_of(tensor) is None else with_strides(tensor, _row_by_row(tensor.shape))
    return tensor if tensor.stride() == tuple(strides) else with_strides(tensor, strides)


def _row_by_row(shape: Sequence[int]) -> list[int]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return strides


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
