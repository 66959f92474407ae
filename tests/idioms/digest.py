"""The final state of a script of the library, as one line that can be compared.

    finish(job, model=model, optimizer=optimizer, baseline=baseline)

prints `digest rank=1 4f0c... model=91ab... optimizer=77d0...`: the hash of everything, then one for each thing, so that
two lines that differ also say where.
"""

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor, nn


class _Ranked(Protocol):
    @property
    def rank(self) -> int:
        """The rank of this process."""


def finish(job: _Ranked, **things: Any) -> None:
    """Print the digest of what this rank ends with: modules, optimizers, tensors, arrays, plain values, or any of
    these in lists, tuples, sets and dicts; anything else by its `state_dict`."""
    parts = {name: _digest(thing) for name, thing in sorted(things.items())}
    whole = xxhash.xxh3_64_hexdigest(repr(parts).encode())
    words = [f"digest rank={job.rank} {whole}", *(f"{name}={part}" for name, part in parts.items())]
    sys.stdout.write(" ".join(words) + "\n")  # at once: other ranks may write into the same file
    sys.stdout.flush()


def _digest(thing: Any) -> str:
    hasher = xxhash.xxh3_64()
    _feed(hasher, thing)
    return hasher.hexdigest()[:8]


def _feed(hasher: xxhash.xxh3_64, thing: Any) -> None:
    if isinstance(thing, Tensor):
        _feed_tensor(hasher, thing.detach())
    elif isinstance(thing, nn.Module):
        _feed_module(hasher, thing)
    elif isinstance(thing, np.ndarray | np.generic):
        hasher.update(f"{thing.dtype}{thing.shape}".encode() + np.ascontiguousarray(thing).tobytes())
    elif isinstance(thing, Mapping):
        for key in sorted(thing, key=str):
            hasher.update(f"{key}:".encode())
            _feed(hasher, thing[key])
    elif isinstance(thing, list | tuple | deque):
        hasher.update(f"[{len(thing)}".encode())
        for element in thing:
            _feed(hasher, element)
    elif isinstance(thing, set | frozenset):
        _feed(hasher, sorted(thing, key=str))
    elif thing is None or isinstance(thing, bool | int | float | complex | str | bytes):
        hasher.update(f"{type(thing).__name__}{thing!r}".encode())
    elif isinstance(thing, torch.Generator):
        _feed_tensor(hasher, thing.get_state())
    elif hasattr(thing, "state_dict"):
        _feed(hasher, thing.state_dict())
    else:
        hasher.update(type(thing).__qualname__.encode())  # a function, say: its address says nothing


def _feed_module(hasher: xxhash.xxh3_64, module: nn.Module) -> None:
    """Also what no state_dict has: buffers that are not persistent, and whether parameters take gradients."""
    for name, parameter in module.named_parameters():
        hasher.update(f"{name}{parameter.requires_grad}".encode())
        _feed_tensor(hasher, parameter.detach())
    for name, buffer in module.named_buffers():
        hasher.update(name.encode())
        _feed_tensor(hasher, buffer)
    hasher.update(bytes(child.training for child in module.modules()))


def _feed_tensor(hasher: xxhash.xxh3_64, tensor: Tensor) -> None:
    if hasattr(tensor, "to_local"):  # a DTensor: this rank's part
        tensor = tensor.to_local()
    hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    hasher.update(tensor.to_dense().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
