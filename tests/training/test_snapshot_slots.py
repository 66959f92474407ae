"""A snapshot in host memory has the digest of the state that it is a copy of."""

import pytest
import torch

from relight.training.checkpoint.snapshot_slots import MemorySlot
from relight.transfer.io.codec import Flat, digest_of
from relight.transfer.restore.offer import plan_state
from relight.transfer.tensors.weights import TensorReader

PRIVATE = torch.zeros(3)  # the last tensor: it counts for no digest


@pytest.mark.parametrize(
    "tensor", [torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3).t()], ids=["plain", "transposed"]
)
def test_a_snapshot_has_the_digest_of_its_state(tensor: torch.Tensor) -> None:
    state = Flat({"weight": tensor, "steps": [3, tensor.clone()]})
    whole = Flat({"weight": tensor, "steps": [3, tensor.clone()], "private": PRIVATE})
    slot = MemorySlot()
    slot.tree, slot.paths = state.tree, whole.paths
    slot.make_room(whole.specs)
    digests = slot.fill(dict(enumerate(state.tensors)))
    reader = TensorReader(state.tensors)
    assert slot.digest(digests) == digest_of(state, [reader.digest(bucket) for bucket in plan_state(state.specs)])
