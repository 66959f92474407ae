"""Trees of plain values and tensors, to bytes and back, without pickle.

A tree is made of dict, list, tuple, str, int, float, bool, bytes, None and tensors (NumPy arrays count as bytes
with a dtype), and of values whose class matters (`relight.transfer.io.typed`). Tensors are replaced by numbered
placeholders, with strides that are not the usual ones and the kind of their device if it is not the host; their bytes
travel beside the tree.
"""

import ast
import ctypes
import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
import xxhash

from relight.device.choose import accelerator
from relight.errors import UsageError
from relight.transfer.io.strides import laid_out, strides_of
from relight.transfer.io.typed import read_typed, write_typed

PIECE_BYTES = 4 * 2**20


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Type and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]


_USUAL = frozenset({float, int, torch.Tensor, torch.nn.Parameter, list, tuple, dict, set})
_AS_IS = frozenset({type(None), bool, str, bytes, float})
_WORDS = _AS_IS | {int}
_encode = msgspec.msgpack.Encoder().encode
_OF_TORCH = frozenset({torch.Tensor, torch.nn.Parameter})
# What decides how a tensor is flattened.
_FORMS = (
    operator.attrgetter("shape", "dtype", "is_cpu"),
    torch.Tensor.stride,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)
_bytes_of = operator.attrgetter("nbytes")
_TYPED = frozenset({"constant", "dataclass", "typed"})
_TAG = "\x00"  # a dict key no user writes; marks what msgpack has no type for


class Node:
    """A tree without tensors, flattened, to be put into others, any number of times."""

    __slots__ = ("flat",)

    def __init__(self, flat: Any) -> None:
        self.flat = flat


_FLAT = frozenset({Node})


class TensorTable:
    """Tensors by their names, such as buffers: flattened anew once they are others, or have other forms."""

    def __init__(self, path: str) -> None:
        """`path`: where the table stands in its tree."""
        self._path = path
        self.tree: dict[str, torch.Tensor] = {}
        self.live: list[torch.Tensor] = []
        self._forms: list[Any] = []
        self.flat: Flat | None = None  # of tensors that can all be read in place
        self.specs: list[TensorSpec] = []

    def look_at(self, tensors: dict[str, torch.Tensor]) -> "TensorTable":
        """These are the tensors now."""
        live = list(tensors.values())
        is_usual = _OF_TORCH.issuperset(map(type, live))
        forms = list(itertools.chain.from_iterable(map(one, live) for one in _FORMS)) if is_usual else []
        if not is_usual or forms != self._forms or [*tensors] != [*self.tree]:
            are_plain = is_usual and all(map(is_plain, live))
            self.flat = Flat(dict(tensors), self._path) if are_plain else None
            self.specs, self._forms = list(map(spec_of, live)), forms
        self.tree, self.live = tensors, live
        return self


class Flat:
    """A flattened tree: plain values with placeholders, and beside it each tensor with its path."""

    def __init__(self, tree: Any, path: str = "") -> None:
        """Flatten `tree`. Raises UsageError that names the path of a value that cannot be carried."""
        self.paths: list[str] = []
        self.leaves: list[torch.Tensor] = []  # as they stood in the tree
        self.tensors: list[torch.Tensor] = []
        self._has_places = False
        self.table: TensorTable | None = None  # whose tensors come first
        self.tree = self._flatten(tree, path)

    @property
    def specs(self) -> list[TensorSpec]:
        return [spec_of(tensor) for tensor in self.tensors]

    @property
    def values(self) -> Any:
        """The tree without strides and devices: a digest is one of values, wherever and however they lie in memory."""
        return _without_places(self.tree) if self._has_places else self.tree

    def _flatten(self, tree: Any, path: str) -> Any:
        kind = type(tree)
        if kind in _AS_IS:
            return tree
        if kind is dict:
            return {_TAG: "dict", "v": self._items(tree, path) if tree else []}
        if kind is list:
            return self._members(tree, path)
        if kind is tuple:
            return {_TAG: "tuple", "v": self._members(tree, path)}
        if kind is Node:
            return tree.flat
        if kind is torch.Tensor:
            return self._tensor(tree, path)
        if kind is TensorTable:
            return self._table(tree, path)
        if kind is int and -(2**63) <= tree < 2**64:
            return tree
        if kind not in _USUAL and (typed := write_typed(tree, path, self._flatten)) is not None:
            return {_TAG: typed[0], **typed[1]}
        if isinstance(tree, (str, bytes)) and type(tree).__module__ != "numpy":
            return tree
        if isinstance(tree, float) and type(tree).__module__ != "numpy":
            return float(tree)
        if isinstance(tree, int):
            return int(tree) if -(2**63) <= tree < 2**64 else {_TAG: "int", "v": str(int(tree))}
        if isinstance(tree, torch.Tensor):
            return self._tensor(tree, path)
        if isinstance(tree, (list, tuple)):
            members = self._members(tree, path)
            return members if isinstance(tree, list) else {_TAG: "tuple", "v": members}
        if isinstance(tree, (set, frozenset)):
            return {_TAG: "set", "v": [self._flatten(v, path) for v in sorted(tree, key=repr)]}
        if isinstance(tree, dict):
            return {_TAG: "dict", "v": self._items(tree, path)}
        array = _as_numpy(tree)
        if array is not None:
            shape = list(array.shape) if array is tree else None  # None: a scalar, whose type decides that of results
            by_column = {} if array.flags.c_contiguous or not array.flags.f_contiguous else {"f": True}
            return {_TAG: "numpy", "d": dtype_text(array.dtype), "s": shape, "v": array.tobytes(), **by_column}
        raise UsageError(
            f"{path or 'state'} is a {type(tree).__module__}.{type(tree).__qualname__}: state_dict() may hold tensors, "
            "numbers, strings, bytes, None, dates, members of enums, objects of data classes, and lists, tuples, sets, "
            "dicts and deques of these, so that it can be copied to a replacement without pickle"
        )

    def _members(self, tree: Sequence[Any], path: str) -> list[Any]:
        if _WORDS.issuperset(map(type, tree)):
            numbers = [one for one in tree if type(one) is int]
            if not numbers or (min(numbers) >= -(2**63) and max(numbers) < 2**64):
                return [*tree]
        return [one if type(one) in _AS_IS else self._flatten(one, f"{path}[{i}]") for i, one in enumerate(tree)]

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        """A placeholder. A tensor met twice (tied parameters) is carried twice: that costs bytes, never correctness."""
        part = tensor.detach() if type(tensor) is torch.Tensor else local_part(tensor)
        node: dict[str, Any] = {_TAG: "tensor", "v": len(self.tensors)}
        self.paths.append(path)
        self.leaves.append(tensor)
        self.tensors.append(part)
        if (strides := strides_of(part)) is not None:
            node["l"], self._has_places = strides, True
        if not part.is_cpu:
            node["p"], self._has_places = part.device.type, True
        return node

    def _table(self, table: TensorTable, path: str) -> Any:
        known = table.flat
        if known is None or self.tensors:
            return self._flatten(table.tree, path)
        self.table, self._has_places = table, known._has_places
        self.paths, self.leaves, self.tensors = [*known.paths], [*table.live], [*table.live]
        return known.tree

    def _items(self, tree: dict[Any, Any], path: str) -> list[list[Any]]:
        start = f"{path}." if path else ""
        return [
            [
                key if type(key) in _AS_IS else self._flatten(key, path),
                one if type(one) in _AS_IS else self._flatten(one, f"{start}{key}"),
            ]
            for key, one in tree.items()
        ]


def _without_places(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_without_places(one) for one in tree]
    if isinstance(tree, dict):
        return {key: _without_places(one) for key, one in tree.items() if key not in ("l", "p")}
    return tree


def members_of(tree: Any) -> list[tuple[Any, Any]] | None:
    """Keys and values of a flattened dict; None if `tree` stands for something else."""
    return tree["v"] if isinstance(tree, dict) and tree[_TAG] == "dict" else None


def unflatten(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """The tree that was flattened, with these tensors in place of the placeholders.

    A tensor that lay on a device is on this process's own device of that kind afterwards, if there is one.
    """
    if isinstance(tree, list):
        return [unflatten(v, tensors) for v in tree]
    if not isinstance(tree, dict):
        return tree
    kind, value = tree[_TAG], tree["v"]
    if kind in _TYPED:
        return read_typed(kind, tree, lambda node: unflatten(node, tensors))
    if kind == "tensor":
        found: Any = tensors[value]
        return laid_out(_placed(found, tree.get("p")), tree.get("l")) if isinstance(found, torch.Tensor) else found
    if kind == "tuple":
        return tuple(unflatten(v, tensors) for v in value)
    if kind == "set":
        return {unflatten(v, tensors) for v in value}
    if kind == "dict":
        return {unflatten(k, tensors): unflatten(v, tensors) for k, v in value}
    if kind == "int":
        return int(value)
    if kind == "numpy":
        import numpy as np

        array = np.frombuffer(value, dtype=dtype_of(tree["d"]))
        return array[0] if tree["s"] is None else array.reshape(tree["s"]).copy("F" if "f" in tree else "C")
    raise UsageError(f"unknown kind {kind!r} in a transferred tree")


def _placed(tensor: torch.Tensor, kind: str | None) -> torch.Tensor:
    return tensor if kind in (None, tensor.device.type) or kind != accelerator().type else tensor.to(kind)


def dtype_text(dtype: Any) -> str:
    """A NumPy dtype in words, with the names of its fields."""
    import numpy as np

    return repr(np.lib.format.dtype_to_descr(dtype)) if dtype.names else str(dtype.str)


def dtype_of(text: str) -> Any:
    """The inverse of `dtype_text`."""
    import numpy as np

    return np.lib.format.descr_to_dtype(ast.literal_eval(text)) if text.startswith("[") else np.dtype(text)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor on this rank, detached: of a DTensor its local part, else all of it. Not a copy."""
    detached = tensor.detach()
    to_local = getattr(detached, "to_local", None)
    if to_local is None:
        return detached
    with torch.no_grad():
        part: torch.Tensor = to_local()
    return part


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(_name_of(tensor.dtype), tuple(tensor.shape))


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def empty_like(spec: TensorSpec) -> torch.Tensor:
    """A CPU tensor of this type and shape. Raises UsageError for a dtype this torch does not have."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"unknown dtype {spec.dtype!r}")
    return torch.empty(spec.shape, dtype=dtype, device="cpu")


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The storage of a contiguous CPU tensor as writable bytes, without NumPy. Keep the tensor alive meanwhile."""
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its values are bytes side by side in host memory, to be read and written where they lie."""
    return tensor.is_cpu and is_side_by_side(tensor)


def is_side_by_side(tensor: torch.Tensor) -> bool:
    """Return whether its values are bytes side by side in the memory of its device."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its bytes can be read in place, otherwise a contiguous copy in host memory."""
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def pieces(count: int) -> Iterable[tuple[int, int]]:
    """Half-open byte ranges of at most PIECE_BYTES that cover `count` bytes."""
    for start in range(0, count, PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, count)


def piece_digest(data: memoryview) -> int:
    """64-bit digest of one piece (xxh3; not cryptographic: it guards against accidents, not against forgers)."""
    return xxhash.xxh3_64_intdigest(data)


def tensor_digests(tensor: torch.Tensor) -> list[int]:
    """Digests of the pieces of one tensor."""
    host = host_copy(tensor)
    view = raw_bytes(host)
    return [piece_digest(view[start:end]) for start, end in pieces(len(view))]


def digest_of(flat: Flat, digests: Sequence[int] | Sequence[list[int]]) -> str:
    """One digest for a flattened tree, given digests of the bytes of its tensors, however these were divided."""
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode((flat.values, flat.paths, flat.specs, digests)))


def encode_tree(tree: Any, path: str) -> bytes:
    """A whole tree as one byte string: for the small rank-private state."""
    flat = Flat(tree, path)
    if not flat.tensors:
        return _encode((flat.tree, [], []))
    hosts, specs = ([*flat.table.live], [*flat.table.specs]) if flat.table is not None else ([], [])
    others = [tensor if is_plain(tensor) else host_copy(tensor) for tensor in flat.tensors[len(hosts) :]]
    hosts += others
    specs += map(spec_of, others)
    contents = list(map(ctypes.string_at, map(torch.Tensor.data_ptr, hosts), map(_bytes_of, hosts)))
    return _encode((flat.tree, specs, contents))


def flatten(tree: Any, path: str) -> Node:
    """Flatten a tree without tensors."""
    return Node(tree if type(tree) in _AS_IS else Flat(tree, path).tree)


def flat_dict(items: Iterable[tuple[str, Any]]) -> Node:
    """Flatten a dict whose values are flat already, or plain values, or lists of such: in a tenth of the time."""
    pairs = [[key, one.flat if type(one) is Node else one] for key, one in items]
    return Node({_TAG: "dict", "v": pairs})


def joined(trees: dict[str, Any]) -> Any:
    """Flatten a dict of which all values are flat; any other one stays a tree, whose tensors are still to be found."""
    return flat_dict(trees.items()) if _FLAT.issuperset(map(type, trees.values())) else trees


def decode_tree(data: bytes) -> Any:
    """The inverse of `encode_tree`. Raises msgspec.DecodeError on garbage."""
    flat, specs, blobs = msgspec.msgpack.decode(data, type=tuple[Any, list[TensorSpec], list[bytes]])
    tensors = []
    for spec, blob in zip(specs, blobs, strict=True):
        tensor = empty_like(spec)
        raw_bytes(tensor)[:] = blob
        tensors.append(tensor)
    return unflatten(flat, tensors)


def _as_numpy(value: Any) -> Any:
    """`value` as a NumPy array of numbers, texts or records if it is one (or a NumPy scalar), else None."""
    if type(value).__module__ != "numpy":
        return None
    import numpy as np

    array = np.asarray(value)
    return None if array.dtype.hasobject or array.dtype.itemsize == 0 else array
