"""State that must survive: the part that all replicas share, and the little that belongs to one rank alone.

Replicated state (`Replica`) is copied from a peer. Rank-private state (`RankPrivate`: buffers that change in forward,
such as BatchNorm's statistics, and `per_rank` objects; the data position and random streams are added by `data/`) is
kept beside the position page, where it outlives the process.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from relight.core.protocol.fault import Action
from relight.training.state.corruption import flip_bit
from relight.training.state.division import Division
from relight.training.state.handed.handed import Identities, sort_by_kind
from relight.training.state.handed.refusals import refuse_averages_of_zero, refuse_untrackable
from relight.training.state.modules.attributes import AttributeLog
from relight.training.state.modules.averages import Averages
from relight.training.state.modules.layouts import Layouts, Versioned
from relight.training.state.modules.modes import Modes, adopt_modes, make_gradients, modes_of
from relight.training.state.modules.references import References
from relight.training.state.modules.slots import Slots
from relight.training.state.modules.structure import Structure
from relight.training.state.optimizers.gradients import Gradients
from relight.training.state.optimizers.members import OptimizerMembers
from relight.training.state.optimizers.optimizer_tree import adopt_order, order_of
from relight.training.state.pruned import Pruned
from relight.training.state.rank_attributes import RankAttributes
from relight.training.state.rank_private import RankPrivate
from relight.training.state.replica import Replica
from relight.training.state.shared_memory import groups_in
from relight.training.state.torch_settings import TorchSettings, adopt_settings, shared_settings
from relight.training.torch_private.distributed.ddp import wrappers_made
from relight.training.torch_private.distributed.zero import state_of
from relight.transfer.io.codec import local_part


class TrackedState:
    """The modules, optimizers and other objects that a script handed over, and the parts of their state.

    The parts are `identities`, `division`, `members`, `rank_private`, `replica`, `slots`, `attributes`, `averages` and
    `gradients`; a method here needs several of them.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        optimizers: dict[str, Optimizer],
        objects: dict[str, Any],
        per_rank: dict[str, Any],
        pipeline: Any = None,
    ) -> None:
        """See `relight.Training` for the arguments. Raises UsageError for an object that cannot be tracked."""
        handed = sort_by_kind(modules, optimizers, objects, per_rank)
        refuse_untrackable(handed)
        self.modules, self.optimizers = handed.modules, handed.optimizers
        self.objects, self.per_rank = handed.objects, handed.per_rank
        self.parameters = handed.parameters
        self.slots = slots = Slots(handed.modules)
        self.division = Division(handed, slots, pipeline)
        self.sharded, self.pipelines, self.zero = self.division.sharded, self.division.pipelines, self.division.zero
        refuse_averages_of_zero(handed, self.zero)
        self.references = References(handed.modules, handed.optimizers, {**self.objects, **per_rank}, slots)
        self.members = OptimizerMembers(handed, slots)
        self.attributes = AttributeLog(handed.modules)
        self.averages = Averages(handed.modules, self.members.trained(), slots)
        self.rank_attributes = RankAttributes(self.attributes)
        self.rank_private = RankPrivate(handed, slots, self.attributes, self.rank_attributes, self.averages)
        self.replica = Replica(handed, slots, self.division, self.members, self.rank_private)
        self.identities = Identities(handed, slots, self.zero)
        self.settings = TorchSettings()
        self.structure = Structure(handed.modules, handed.optimizers)
        self.pruned = Pruned(handed.modules)
        self.ends_late = False  # the barrier of an epoch's last step stands at the end, on all ranks
        self.rank_values: dict[str, Any] = {}  # what a replacement needs to know of values made from ranks
        modules_of_rank = [thing for thing in per_rank.values() if isinstance(thing, nn.Module)]
        own = [parameter for module in modules_of_rank for parameter in module.parameters()]
        keepers = [thing for thing in per_rank.values() if hasattr(type(thing), "kept_gradients")]
        self.gradients = Gradients(handed.parameters, own, self.objects, slots, self.members, keepers=keepers)

    # --- objects ----------------------------------------------------------------------------------------------------
    def name_of_writer(self, thing: Any) -> str | None:
        """Return the name under which this very object was handed over, also in `per_rank`; or None."""
        own = (f"per_rank[{name!r}]" for name, one in self.per_rank.items() if one is thing)
        return self.identities.name_of(thing) or next(own, None)

    def wrappers(self) -> list[DistributedDataParallel]:
        """Return the DDP wrappers among the modules, and those around modules that were handed over without them."""
        parts = (part for module in self.modules.values() for part in module.modules())  # the compiler wraps it
        handed = [part for part in parts if isinstance(part, DistributedDataParallel)]
        tracked = {id(parameter) for parameter in self.parameters}
        others = (made for made in wrappers_made() if not any(made is one for one in handed))
        return [*handed, *(made for made in others if any(id(p) in tracked for p in made.parameters()))]

    # --- replicated ---------------------------------------------------------------------------------------------------
    def track_layouts(self, progress: Versioned) -> Layouts:
        """Make the layouts of DDP's gradient buckets part of the replica. `progress`: of this state."""
        self.replica.layouts = Layouts(self.wrappers(), progress, fixed=bool(self.pipelines))
        return self.replica.layouts

    def adopt(self, tree: Any, meta: dict[str, Any]) -> str:
        """Make a verified copy this rank's replica. `meta`: what `describe` returned where it was made.

        Returns why the bits cannot be those of an undisturbed run, or "".
        """
        if self.pruned.adopt(meta.get("pruned", {})):
            self.slots.refresh()
        memory = groups_in(meta["memory"]) if "memory" in meta else None
        differing = self.replica.adopt(tree, meta["private_buffers"], memory)
        for name, order in meta.get("orders", {}).items():
            adopt_order(self.optimizers[name], order)
        self.replica.memory.lay_out(meta.get("gaps", {}))
        left_out = self.pruned.adopt_results(meta.get("pruned_results", ""))
        if not differing:
            return left_out
        return (
            f"{differing}: tensors that share memory where the state was copied from, and cannot in its replacement, "
            "or the other way round. Give each memory of its own (clone, deepcopy)"
        )

    def flip(self, action: Action) -> None:
        """Flip one bit of the replica, a planned fault, unnoticed by any hook or version counter."""
        if action is Action.FLIP_PARAMETER:
            copies = self.division.copies
            flip_bit([local_part(parameter) for parameter in self.parameters if id(parameter) not in copies])
        elif action is Action.FLIP_OPTIMIZER:
            states = [state for o in self.optimizers.values() for state in state_of(o).values()]
            values = [value for state in states if isinstance(state, dict) for value in state.values()]
            flip_bit([local_part(value) for value in values if isinstance(value, torch.Tensor)])
        else:
            private = self.rank_private.buffers
            flip_bit([buffer for key, buffer in self.slots.buffers.items() if key not in private])

    # --- in no tensor, but in every copy ------------------------------------------------------------------------------
    def describe(self, lineage: str, until: int) -> dict[str, Any]:
        """Return what a copy of the replica carries besides its tensors."""
        return {
            "lineage": lineage,
            "until": until,
            "private_buffers": self.rank_private.named_buffers(),
            "gradients_to_none": self.gradients.to_none,
            "missing_gradients": self.gradients.missing(),
            **self.besides(),
        }

    def besides(self) -> dict[str, Any]:
        """Return modes, structure, settings, attributes, orders, the layout of memory, and values made from ranks."""
        return {
            "rank_values": self.rank_values,
            "ends_late": self.ends_late,
            "memory": self.replica.memory.describe(),
            "gaps": self.replica.memory.gaps(),
            "modes": modes_of(self.modules),
            "structure": self.structure.described(),
            "pruned": self.pruned.described(),
            "pruned_results": self.pruned.results(),
            "settings": shared_settings(),
            "orders": {name: order_of(optimizer) for name, optimizer in self.optimizers.items()},
            "attributes": self.rank_attributes.describe(),
            "code_between": self.rank_private.describe_code(),
        }

    def adopt_besides(self, meta: dict[str, Any]) -> str:
        """Take on modes and torch's settings of a copy of the same layout, after `adopt`.

        Returns why the bits cannot be those of an undisturbed run, or "".
        """
        self.gradients.to_none = meta["gradients_to_none"]
        self.ends_late = meta.get("ends_late", False)
        modes: Modes = meta.get("modes", {})
        adopt_modes(self.modules, modes)
        if not self.gradients.to_none:
            make_gradients(self.modules, modes)
        adopt_settings(meta.get("settings", {}))
        if not (differing := self.structure.differs(meta.get("structure", {}))):
            return ""
        return (
            f"{differing}: built or hooked otherwise in this process than where its state comes from. Change modules "
            "before relight.Training(...), or in every step anew"
        )

    def adopt_attributes(self, meta: dict[str, Any]) -> None:
        """Take on the source's attributes, for a rank whose own are lost, if they were the same on all ranks."""
        if "attributes" in meta:
            self.rank_attributes.adopt_copy(meta["attributes"])
            self.rank_private.adopt_code(meta["code_between"])
