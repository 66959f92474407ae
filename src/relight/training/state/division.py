"""The division of the state over ranks (FSDP2, tensor parallelism, pipelines, ZeRO), and the part of this rank."""

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from relight.training.shards import shard_key
from relight.training.state.handed.handed import Handed
from relight.training.state.modules.slots import Slots
from relight.training.torch_private.distributed.fsdp import ShardedModules
from relight.training.torch_private.distributed.mesh import batch_place, cuts_of, fit_part
from relight.training.torch_private.distributed.pipeline import Pipelines
from relight.training.torch_private.distributed.zero import ZeroOptimizers


class Division:
    """The division of one rank's state. `rebind` follows when the process takes another rank."""

    def __init__(self, handed: Handed, slots: Slots, pipeline: Any) -> None:
        """`pipeline`: see `relight.Training`. Raises UsageError if it is no schedule, or runs unknown modules."""
        self._handed = handed
        self._slots = slots
        self.sharded = ShardedModules(handed.modules.values())
        self.pipelines = Pipelines(pipeline, handed.parameters)
        self.zero = ZeroOptimizers(handed.optimizers)
        self.copies = self.zero.copies()  # ids of the parameters that another rank updates

    def shard(self, world_size: int) -> str:
        """Return the key of this rank's part: ranks with the same key hold the same bits. Empty: all of the state.

        Raises UsageError if some tensor is not in a form that could be restored.
        """
        named = [
            (f"{owner}.{name}", tensor)
            for owner, module in self._handed.modules.items()
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        ]
        own = [self.pipelines.cuts(), self.zero.cuts()]
        return shard_key([*own, *(cuts_of(tensor, world_size, name) for name, tensor in named)])

    def stages(self) -> str:
        """Return the key of the pipeline stages that this rank runs; empty without a pipeline."""
        return shard_key([self.pipelines.cuts()])

    def namesakes(self) -> str:
        """Return what tells this rank's tensors from those with the same names on other ranks (stages, ZeRO)."""
        return shard_key([self.pipelines.cuts(), self.zero.cuts()])

    def batch_index(self, rank: int, world_size: int) -> int:
        """Return which of a step's batches `rank` computes on; a tensor-parallel group or pipeline shares one."""
        by_data = self.sharded.data_dimensions()
        parameters = self._handed.parameters
        if not self.pipelines:
            return batch_place(parameters, by_data, rank, world_size)
        for module in (part for handed in self._handed.modules.values() for part in handed.modules()):
            if isinstance(module, DistributedDataParallel):
                return dist.get_rank(module.process_group)
        return batch_place(parameters, by_data, rank, world_size, pipelines=True) if self.sharded else 0

    def rebind(self) -> None:
        """Make room for the part of the rank that this process has taken; its contents come from a peer."""
        self.sharded.rebind()
        self.zero.rebind()
        self.copies = self.zero.copies()
        fitted = self.sharded.parameters()
        for tensor in (*self._handed.parameters, *self._slots.buffers.values()):
            if id(tensor) not in fitted:
                fit_part(tensor)
