"""The mark of a batch: equal for equal values, another one for others, whatever a batch is made of."""

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from relight.training.state.digest import batch_digest, edits_of


class Encoding(collections.UserDict[str, Any]):
    """A batch as tokenizers return it."""


@dataclasses.dataclass
class Graph:
    nodes: torch.Tensor
    edges: list[torch.Tensor]
    label: float


class Slotless:
    def __init__(self, value: Any) -> None:
        self.value, self.itself = value, self


class Image(torch.Tensor):
    """A subclass that torchvision's tv_tensors are like."""


Labelled = collections.namedtuple("Labelled", "image label")


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ragged(seed: int, layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([values(seed, 2, 3), values(seed + 1, 4, 3)], layout=layout)


MAKERS: dict[str, Callable[[int], Any]] = {
    "dense": lambda seed: values(seed, 4, 3),
    "empty beside": lambda seed: (torch.zeros(0, 3), values(seed, 2)),
    "scalar": lambda seed: values(seed, 1)[0],
    "complex, conjugated": lambda seed: torch.complex(values(seed, 3), values(seed + 1, 3)).conj(),
    "by columns": lambda seed: values(seed, 4, 3).t(),
    "half": lambda seed: values(seed, 4).bfloat16(),
    "boolean": lambda seed: values(seed, 64) > 0,
    "jagged": lambda seed: ragged(seed, torch.jagged),
    "nested": lambda seed: ragged(seed, torch.strided),
    "sparse": lambda seed: values(seed, 4, 3).to_sparse(),
    "sparse by rows": lambda seed: values(seed, 4, 3).to_sparse_csr(),
    "sparse by columns": lambda seed: values(seed, 4, 3).to_sparse_csc(),
    "sparse by blocks": lambda seed: values(seed, 4, 4).to_sparse_bsr((2, 2)),
    "quantized": lambda seed: torch.quantize_per_tensor(values(seed, 16), 0.1, 0, torch.qint8),
    "masked": lambda seed: torch.masked.masked_tensor(values(seed, 4), torch.tensor([True, False, True, True])),
    "packed": lambda seed: nn.utils.rnn.pack_sequence([values(seed, 3, 2), values(seed + 1, 2, 2)]),
    "in inference mode": lambda seed: torch.inference_mode()(values)(seed, 3),
    "image": lambda seed: values(seed, 4).as_subclass(Image),
    "named tuple": lambda seed: Labelled(values(seed, 3), seed),
    "encoding": lambda seed: Encoding(ids=values(seed, 3), mask=None),
    "data class": lambda seed: Graph(values(seed, 3), [values(seed, 2)], 0.5),
    "object that holds itself": lambda seed: Slotless(values(seed, 3)),
    "namespace": lambda seed: types.SimpleNamespace(x=values(seed, 3)),
    "array": lambda seed: np.arange(6.0) + seed,
    "records": lambda seed: np.array([(seed, 1.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "times": lambda seed: np.array([f"2020-01-0{seed}"], dtype="datetime64[D]"),
    "array of two axes, turned": lambda seed: np.arange(6.0).reshape(2, 3).T + seed,
    "empty array": lambda seed: [np.zeros((0, 3)), seed],
    "array of objects": lambda seed: np.array([values(seed, 2), "text"], dtype=object),
    "NumPy's number": lambda seed: [np.float32(seed)],
    "bytes": lambda seed: [bytes([seed, 7])],
    "text": lambda seed: {"text": f"{seed} \ud800"},
    "deque": lambda seed: collections.deque([1, seed]),
    "number": lambda seed: seed,
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.filterwarnings("ignore")
def test_mark(name: str) -> None:
    make = MAKERS[name]
    assert batch_digest(make(1)) == batch_digest(make(1))
    assert batch_digest(make(1)) != batch_digest(make(2))


def test_a_batch_without_values() -> None:
    assert batch_digest(torch.empty(3, device="meta")) == batch_digest(torch.empty(3, device="meta"))
    assert batch_digest(object()) == batch_digest(object())
    assert batch_digest(nn.Linear) == batch_digest(nn.Linear)


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda batch: batch["x"].mul_(2),
    "through a view": lambda batch: batch["x"][0].zero_(),
    "another tensor of the same values": lambda batch: batch.update(x=batch["x"].clone()),
    "another tensor": lambda batch: batch.update(x=batch["x"] / 255),
    "taken out": lambda batch: batch.pop("x"),
    "put in": lambda batch: batch.update(z=1),
    "number": lambda batch: batch.update(n=batch["n"] + 1),
    "end of an array": lambda batch: batch["a"].__setitem__(-1, 7.0),
    "byte": lambda batch: batch["b"].__setitem__(0, 3),
    "item of a list": lambda batch: batch["l"].append(batch["x"]),
    "attribute of an object": lambda batch: setattr(batch["o"], "value", batch["x"] * 2),
    "in an object, in place": lambda batch: batch["o"].value.add_(1),
}


@pytest.mark.parametrize("kind", [dict, Encoding])
@pytest.mark.parametrize("name", [*CHANGES, "nothing"])
def test_changes_of_a_batch_are_seen(name: str, kind: type[Any]) -> None:
    given = {"x": values(1, 4, 3), "n": 1, "a": np.zeros(2000), "b": bytearray(4), "l": [1]}
    given["o"] = Slotless(values(2, 3))
    batch = kind(given)
    before = edits_of(batch)
    CHANGES.get(name, lambda _batch: None)(batch)
    assert (edits_of(batch) == before) == (name == "nothing")


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.filterwarnings("ignore")
def test_a_batch_as_it_was_shows_no_change(name: str) -> None:
    batch = MAKERS[name](1)
    assert edits_of(batch) == edits_of(batch)
