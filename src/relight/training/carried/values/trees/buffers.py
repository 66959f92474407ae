"""Memory that NumPy arrays share with one another or with tensors: storage and its views. It is shared again where it
is read."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from relight.training.carried.values.trees.words import TAG, Unsupported
from relight.training.state.values.kinds import kind_of
from relight.transfer.io.codec import dtype_of, dtype_text


class _Stretch(NamedTuple):
    """Bytes that one array or tensor reaches, from `first` to before `end`, and where its first element is."""

    first: int
    end: int
    start: int
    value: Any


class Buffer:
    """The bytes that several values reach."""

    def __init__(self, number: int, stretches: list[_Stretch]) -> None:
        self.number = number
        self.first = min(one.first for one in stretches)
        self.end = max(one.end for one in stretches)
        self._stretches = stretches
        self.is_written = False

    def contents(self) -> torch.Tensor:
        """A copy, as uint8 of one dimension; zeros where no value reaches."""
        import numpy as np

        made = np.zeros(self.end - self.first, np.uint8)
        for first, end, _, _ in self._stretches:
            made[first - self.first : end - self.first] = _bytes_at(first, end - first)
        return torch.from_numpy(made)


class Buffers:
    """The memory of all arrays that are to be written, and of the tensors in it."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._found: dict[int, Buffer] | None = None

    def add(self, blocks: Iterable[Any]) -> None:
        """Look at these arrays and tensors."""
        self._found = None
        self._values.update((id(one), one) for one in blocks)

    def of(self, value: Any) -> Buffer | None:
        """The memory that a value shares with an array, or an array with another value; None: it shares none."""
        if self._found is None:
            self._found = self._search()
        return self._found.get(id(value))

    def _search(self) -> dict[int, Buffer]:
        found: dict[int, Buffer] = {}
        if not any(kind_of(one) == "array" for one in self._values.values()):
            return found
        group: list[_Stretch] = []
        end = 0
        stretches = sorted(filter(None, map(_stretch_of, self._values.values())), key=lambda one: one[:2])
        for stretch in [*stretches, None]:
            if stretch is None or stretch.first >= end:
                if len(group) > 1 and any(kind_of(one.value) == "array" for one in group):
                    buffer = Buffer(len(found), group)
                    found.update((id(one.value), buffer) for one in group)
                group = []
            if stretch is not None:
                group.append(stretch)
                end = max(end, stretch.end)
        return found


def _stretch_of(value: Any) -> _Stretch | None:
    """None: it has no bytes in the memory of the host."""
    if kind_of(value) == "array":
        start, shape, strides, item = value.ctypes.data, value.shape, value.strides, value.itemsize
    elif type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu":
        start, shape, item = value.data_ptr(), value.shape, value.element_size()
        strides = [stride * item for stride in value.stride()]
    else:
        return None
    if 0 in shape:
        return None
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return _Stretch(
        start + sum(min(0, one) for one in reach), start + sum(max(0, one) for one in reach) + item, start, value
    )


def write_view(value: Any, buffer: Buffer) -> dict[str, Any]:
    """A view of bytes that other values see too; the bytes themselves come with the first of these."""
    is_array = kind_of(value) == "array"
    item = value.itemsize if is_array else value.element_size()
    stretch = _stretch_of(value)
    assert stretch is not None
    strides = list(value.strides) if is_array else [stride * item for stride in value.stride()]
    node: dict[str, Any] = {
        TAG: "view",
        "m": buffer.number,
        "d": dtype_text(value.dtype) if is_array else str(value.dtype).removeprefix("torch."),
        "a": [list(value.shape), strides, stretch.start - buffer.first],
        "is_array": is_array,
        "g": not is_array and value.requires_grad and value.is_leaf,
    }
    if not buffer.is_written:
        buffer.is_written = True
        node["v"] = buffer.contents()
    return node


class BufferReader:
    """Makes the views of one writer's buffers."""

    def __init__(self) -> None:
        self._buffers: dict[int, Any] = {}  # uint8 arrays of one dimension

    def read(self, node: Any, home: Any) -> Any:
        """`home`: what this process began with in this place; its memory is used if it has room for all."""
        if "v" in node:
            self._buffers[node["m"]] = _filled(node, home)
        shape, strides, offset = node["a"]
        memory = self._buffers[node["m"]]
        made = _view(memory, node["d"], shape, strides, offset, is_array=node["is_array"])
        if type(home) is type(made) and _place_of(home) == _place_of(made):
            return home
        return made.requires_grad_() if node["g"] else made


def _filled(node: Any, home: Any) -> Any:
    contents = node["v"].numpy()
    own = _owner_of(home) if kind_of(home) in ("array", "tensor") else None
    stretch = _stretch_of(home) if own is not None else None
    if own is not None and stretch is not None:
        first = stretch.start - node["a"][2] - own.ctypes.data
        if first >= 0 and first + len(contents) <= len(own) and own.flags.writeable:
            own[first : first + len(contents)] = contents
            return own[first : first + len(contents)]
    return contents.copy()


def _owner_of(value: Any) -> Any:
    """All of the memory in which a value lies, as bytes. None: it belongs to neither an array nor a tensor."""
    import numpy as np

    while isinstance(value, np.ndarray) and value.base is not None:
        value = value.base
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    if not isinstance(value, np.ndarray) or not (value.flags.c_contiguous or value.flags.f_contiguous):
        return None
    return value.ravel(order="K").view(np.uint8)


def _view(memory: Any, dtype: str, shape: list[int], strides: list[int], offset: int, *, is_array: bool) -> Any:
    import numpy as np

    if is_array:
        return np.ndarray(shape, dtype_of(dtype), memory, offset, strides)
    kind = getattr(torch, dtype)
    try:
        flat = torch.from_numpy(memory[offset:])
        flat = flat[: flat.numel() // kind.itemsize * kind.itemsize].view(kind)
        return flat.as_strided(shape, [stride // kind.itemsize for stride in strides])
    except RuntimeError as problem:
        raise Unsupported(f"a tensor in the memory of an array ({problem})") from None


def _place_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    return value.ctypes.data, value.shape, value.strides, value.dtype


def _bytes_at(address: int, count: int) -> Any:
    import ctypes

    import numpy as np

    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))
