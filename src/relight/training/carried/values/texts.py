"""Contents of small tensors, arrays and containers of numbers and texts as a text, and put into such ones."""

import ast
from collections import deque
from typing import Any

import torch

from relight.training.state.values.kinds import PLAIN, kind_of
from relight.training.torch_private.tensors import is_plain_memory

_DEEPEST = 3
_MOST_CONTENTS = 2**14  # bytes of a tensor
_FEW = 32  # items of a container
_MOST_TEXT = 1024


def text_of(value: Any) -> str:
    """Return the contents of a small tensor, array, or container of numbers and texts, for `refill`; "" for others."""
    if (tensor := _as_tensor(value)) is not None:
        return _head(tensor) + _memory_of(tensor).hex() if 0 < tensor.nbytes <= _MOST_CONTENTS else ""
    members = list(value) if type(value) is deque else value
    if type(members) not in (list, dict) or not _is_literal(members):
        return ""
    text = repr(members)
    try:
        return text if len(text) <= _MOST_TEXT and repr(ast.literal_eval(text)) == text else ""
    except (ValueError, SyntaxError):
        return ""


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor, or a NumPy array as one that shares its memory; None for another value."""
    kind = kind_of(value)
    if kind == "array":
        is_plain = value.dtype.kind in "fiub" and value.flags.writeable and value.dtype.isnative
        return torch.from_numpy(value) if is_plain else None
    return value if kind == "tensor" and not value.is_meta and is_plain_memory(value) else None


def _head(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} "


def _memory_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _fill(tensor: torch.Tensor, memory: bytes) -> bool:
    """Write these bytes into a tensor. False: it may not be written."""
    values = torch.frombuffer(bytearray(memory), dtype=tensor.dtype).view(tensor.shape)
    try:
        tensor.detach().copy_(values)
    except RuntimeError:  # several elements lie in one place, or it was made in inference mode
        return False
    return True


def _is_literal(value: Any, depth: int = 0) -> bool:
    """Return whether a value is a number or text, or a small container of these, which no code of the user's shows."""
    if type(value) in PLAIN:
        return True
    if depth > _DEEPEST or type(value) not in (list, tuple, dict) or len(value) > _FEW:
        return False
    members = [*value, *value.values()] if type(value) is dict else value
    return all(_is_literal(one, depth + 1) for one in members)


def refill(value: Any, text: str) -> bool:
    """Give a tensor, array or container other contents. False: it is not known which."""
    if (tensor := _as_tensor(value)) is not None:
        return text.startswith(_head(tensor)) and _fill(tensor, bytes.fromhex(text.removeprefix(_head(tensor))))
    try:
        members = ast.literal_eval(text)
    except (ValueError, SyntaxError):  # it is not known, or was a tensor
        return False
    if type(members) is not (list if type(value) is deque else type(value)):
        return False
    value.clear()
    if isinstance(value, dict):
        value.update(members)
    else:
        value.extend(members)
    return True
