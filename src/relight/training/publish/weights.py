"""The weights that a training job publishes: their names, and the parts that this rank holds."""

from collections.abc import Callable, Mapping, Sequence

import torch

from relight.errors import TransferError, UsageError
from relight.training.state.tracked import TrackedState
from relight.training.torch_private.distributed.mesh import is_distributed, is_of_first_copy, place_in_whole
from relight.training.torch_private.distributed.pipeline import ranks_along
from relight.transfer.io.codec import local_part
from relight.transfer.plan.division import ShardSpec, parts_of
from relight.transfer.plan.manifest import Entry, Part, make_manifest
from relight.transfer.plan.plan import DEFAULT_BUCKET_BYTES, DEVICE_BUCKET_BYTES, bucket_bytes_for
from relight.transfer.publish.source import Source
from relight.transfer.tensors.device import is_on_device
from relight.transfer.tensors.device_buffers import DeviceBuffers, SourceOnDevice
from relight.transfer.tensors.lent_weights import LentWeights
from relight.transfer.tensors.weights import PartSource, TensorSource, own_tensors

Rename = Callable[[str, str], str]


class Weights:
    """The parameters and persistent buffers of some of the modules that were handed over."""

    def __init__(self, state: TrackedState, names: Sequence[str], rename: Rename | None) -> None:
        """`names`: of the modules. `rename(module, tensor)`: what engines call a tensor. Raises UsageError."""
        self._state = state
        self._names = names
        self._rename = rename or (lambda _, name: name)
        self._lent: LentWeights | None = None
        self._device_buffers: DeviceBuffers | None = None
        modules = [state.modules[name] for name in names]
        self._parameters = {id(parameter) for module in modules for parameter in module.parameters()}
        self._stages = state.pipelines.stages_in(modules)
        counts = {stage.num_stages for stage in self._stages}
        if len(counts) > 1:
            raise UsageError("publish(): the models are stages of different pipelines: say publish(model=...)")
        self._all_stages = max(counts, default=0)
        state.sharded.reshard()
        self._has_dtensors = any(is_distributed(parameter) for module in modules for parameter in module.parameters())

    @property
    def is_divided(self) -> bool:
        """True if ranks hold different parts of them."""
        return self._has_dtensors or bool(self._stages)

    def bucket_bytes(self) -> int:
        """Return how large buckets are to be, as the buffers, of which two lie on the device if the weights do."""
        tensors = self._tensors().values()
        if self.is_divided or not is_on_device(tensors):
            return DEFAULT_BUCKET_BYTES
        return bucket_bytes_for(sum(tensor.nbytes for tensor in tensors), DEVICE_BUCKET_BYTES)

    def whole(self) -> Source:
        """All of them as they are now: parameters, which change in writes only, where they lie; buffers copied."""
        tensors = self._tensors()
        if not (why := self._lend(tensors)):
            assert self._lent is not None
            return self._lent
        named = tensors.items()
        own = {n: t.detach() if id(t) in self._parameters else t.detach().clone() for n, t in named}
        devices = {tensor.device for tensor in own.values()}
        if len(devices) == 1 and is_on_device(own.values()):
            try:
                self._device_buffers = self._device_buffers or DeviceBuffers(devices.pop(), self.bucket_bytes())
                return SourceOnDevice(own, self._device_buffers)
            except TransferError as error:
                why = str(error)
        source = TensorSource(own)
        source.unlendable = why
        return source

    def move(self) -> None:
        """Move the parameters into shared memory, from which engines of this host can read them, if that can be."""
        self._lend(self._tensors())

    def _lend(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Have the weights lie in shared memory as they are now. Returns why not; empty: they do."""
        try:
            if self._lent is None:
                self._lent = LentWeights(tensors, lambda tensor: id(tensor) in self._parameters)
                self._state.slots.refresh()
            return self._lent.take(tensors)
        except TransferError as error:
            return str(error)

    def parts(self, rank: int) -> PartSource:
        """Return the parts of divided weights that this rank holds.

        Raises UsageError for a tensor that cannot be moved, or whose part is no box of the whole.
        """
        self._state.sharded.reshard()
        entries: list[Entry] = []
        parts: list[Part] = []
        boxes: dict[int, torch.Tensor] = {}
        names: dict[int, str] = {}
        buffers = set()
        pipeline = ranks_along(self._stages[0]) if self._stages else (rank,)
        for index, (name, tensor) in enumerate(self._tensors().items()):
            whole, offset = place_in_whole(tensor)
            first = names.setdefault(id(tensor), name)  # tied parameters are one object
            entry = Entry(name, str(tensor.dtype).removeprefix("torch."), whole, "" if first == name else first)
            entries.append(entry)
            if not entry.nbytes or not self._is_held(tensor, pipeline, name):
                continue
            box = local_part(tensor)
            if box.layout is not torch.strided or box.is_quantized:
                raise UsageError(f"publish(): {name} is a {box.layout} tensor; relight moves dense ones")
            if any(first + size > limit for first, size, limit in zip(offset, box.shape, whole, strict=True)):
                raise UsageError(f"publish(): what this rank holds of {name} is no box of the whole tensor")
            found = parts_of(index, whole, offset, tuple(box.shape), tensor.element_size())
            if found:
                parts += found
                boxes[index] = box
                if id(tensor) not in self._parameters:
                    buffers.add(index)
        manifest = make_manifest(entries, parts)
        stages = tuple(sorted(stage.stage_index for stage in self._stages))
        return PartSource(ShardSpec(manifest, stages, self._all_stages), boxes, buffers)

    def _is_held(self, tensor: torch.Tensor, pipeline: Sequence[int], name: str) -> bool:
        """Return whether this rank has a part of it that is the one to publish.

        Replicas hold parameters with the same bits, so any of them may write these. Buffers that forward changes
        differ between replicas (BatchNorm): there is one of whom engines get them, as if rank 0 had gathered a state
        dict. The same goes for parameters that are no DTensors where others are: nothing says how they are kept equal.
        """
        if id(tensor) in self._parameters and (is_distributed(tensor) or not self._has_dtensors):
            return True
        return is_of_first_copy(tensor, pipeline, name)

    def _tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for module in self._names:
            for own, tensor in own_tensors(self._state.modules[module]).items():
                name = self._rename(module, own)
                if name in found:
                    raise UsageError(
                        f"publish(): engines would get two tensors named {name!r}: name them apart, "
                        "training.publish(rename=lambda module, name: ...)"
                    )
                found[name] = tensor
        return found
