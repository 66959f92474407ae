"""What must survive: the state that all replicas share, and the little that belongs to one rank alone.

Replicated state is copied from a peer. Rank-private state (buffers that change in forward, such as BatchNorm's
statistics; the data position; per_rank objects; random streams if they are to be preserved) is kept beside the
position page, where it outlives the process.
"""

import collections
import itertools
import operator
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from relight.core.fault import Action
from relight.errors import UsageError
from relight.training.shards import shard_key
from relight.training.state.attributes import AttributeLog
from relight.training.state.averages import Averages
from relight.training.state.corruption import flip_bit
from relight.training.state.layouts import Layouts
from relight.training.state.parameter_groups import (
    members_of_groups,
    named,
    names_in_groups,
    parameters_of,
    regroup,
    resting_of,
    settings_of,
)
from relight.training.state.references import References
from relight.training.state.slots import Key, Slots
from relight.training.state.structure import structure
from relight.training.state.torch_settings import shared_settings
from relight.training.torch_private.autograd import reset_scaler
from relight.training.torch_private.ddp import stateful_hooks, wrappers_made
from relight.training.torch_private.fsdp import ShardedModules
from relight.training.torch_private.mesh import as_part_like, batch_place, cuts_of, fit_part, is_distributed
from relight.training.torch_private.pipeline import Pipelines
from relight.training.torch_private.zero import ZeroOptimizers, is_zero, state_of
from relight.transfer.io.codec import Flat, decode_tree, digest_of, encode_tree, local_part, tensor_digests, unflatten
from relight.transfer.plan.plan import Bucket
from relight.transfer.restore.offer import plan_state
from relight.transfer.tensors.weights import TensorReader

# Of torch.distributed, by their names, so that nothing has to be imported for them.
_NO_ATTRIBUTES = encode_tree({}, "attributes").hex()
_LOOKED_INTO = 64  # members of a container, to see whether it holds state
_REFUSED = {
    "FullyShardedDataParallel": "use FSDP2 (torch.distributed.fsdp.fully_shard) with a replicate dimension",
}


@runtime_checkable
class Stateful(Protocol):
    """As torch.distributed.checkpoint.stateful.Stateful."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class TrackedState:
    """The modules, optimizers and other objects that a script handed over."""

    def __init__(
        self,
        modules: dict[str, nn.Module],
        optimizers: dict[str, Optimizer],
        objects: dict[str, Any],
        per_rank: dict[str, Any],
        pipeline: Any = None,
    ) -> None:
        for name in [name for name, thing in objects.items() if isinstance(thing, nn.Module)]:
            modules[name] = objects.pop(name)  # an averaged model, say: copied tensor by tensor
        self.modules = modules
        self.optimizers = optimizers = with_inner(optimizers, objects)
        self.objects = objects
        self.per_rank = per_rank
        for name, thing in {**objects, **per_rank}.items():
            if not isinstance(thing, Stateful):
                raise UsageError(
                    f"relight.Training({name}=...) got a {type(thing).__qualname__}, which has no state_dict() and "
                    "load_state_dict(): add them (as in torch.distributed.checkpoint's Stateful), or do not hand it "
                    "over"
                )
        for name in [name for name, thing in per_rank.items() if isinstance(thing, AveragedModel)]:
            raise UsageError(
                f"relight.Training(per_rank={{{name!r}: ...}}) got an AveragedModel: hand it over as ema=..., or by "
                "another keyword. Its parameters are equal on all ranks, and relight sees by itself which of its "
                "buffers are not"
            )
        self.parameters = [p for module in modules.values() for p in module.parameters()]
        self._check_kinds()
        self._check_optimizers()
        self.sharded = ShardedModules(modules.values())
        self.pipelines = Pipelines(pipeline, self.parameters)
        self.zero = ZeroOptimizers(optimizers)
        self._check_averages()
        self._names = {id(thing): name for things in (modules, optimizers, objects) for name, thing in things.items()}
        self._parts = self._own_parts()
        self._copies = self.zero.copies()  # parameters that another rank updates
        self.gradients_to_none = True  # whether gradients were None, not zeros, when the step under way started
        self.slots = Slots(modules)
        self.references = References(modules, optimizers, {**objects, **per_rank}, self.slots)
        self._built_with = {
            name: names_in_groups(optimizer, self.slots.by_id) for name, optimizer in optimizers.items()
        }
        self.attributes = AttributeLog(modules)
        # Buffers known to change in forward, by module and name: rank-private from then on.
        self.private_buffers: set[Key] = set()
        # Optimizers that keep numbers of Python which differ between ranks (LBFGS: the loss of its rank).
        self.with_own_numbers: set[str] = set()
        self.averages = Averages(modules, self.trained_parameters(), self.slots)
        self._trained_owners = self._owners_that_train()
        self._seen_members = {name: members_of_groups(optimizer) for name, optimizer in optimizers.items()}
        self._built_groups = self._describe_groups()
        self.layouts: Layouts | None = None  # of DDP's buckets, which decide in which order gradients are added up

    # --- replicated -------------------------------------------------------------------------------------------
    def shard(self, world_size: int) -> str:
        """The key of what this rank holds of the state: ranks with the same key hold the same bits. Empty: all of it.

        Raises UsageError if some tensor is not in a form that could be restored.
        """
        named = [
            (f"{owner}.{name}", tensor)
            for owner, module in self.modules.items()
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        ]
        own = [self.pipelines.cuts(), self.zero.cuts()]
        return shard_key([*own, *(cuts_of(tensor, world_size, name) for name, tensor in named)])

    def stages(self) -> str:
        """Which stages of a pipeline this rank holds; empty without one."""
        return shard_key([self.pipelines.cuts()])

    def namesakes(self) -> str:
        """Of what this rank's tensors are, where those of other ranks have the same names: stages, parts of ZeRO."""
        return shard_key([self.pipelines.cuts(), self.zero.cuts()])

    def batch_place(self, rank: int, world_size: int) -> int:
        """Which of a step's batches `rank` computes on; ranks of one tensor-parallel group or pipeline share theirs."""
        by_data = self.sharded.data_dimensions()
        if not self.pipelines:
            return batch_place(self.parameters, by_data, rank, world_size)
        for module in (part for handed in self.modules.values() for part in handed.modules()):
            if isinstance(module, DistributedDataParallel):
                return dist.get_rank(module.process_group)
        return batch_place(self.parameters, by_data, rank, world_size, pipelines=True) if self.sharded else 0

    def rebind(self) -> None:
        """This process has taken another rank than it was built as, so it holds other parts of what is divided."""
        self.sharded.rebind()
        self.zero.rebind()
        self._copies = self.zero.copies()
        fitted = self.sharded.parameters()
        for tensor in (*self.parameters, *self.slots.buffers.values()):
            if id(tensor) not in fitted:
                fit_part(tensor)

    def replicated(self) -> Flat:
        """The state that peers with the same key have too, flattened; its tensors are the live ones, not copies."""
        self.sharded.reshard()
        layouts = self.layouts.describe() if self.layouts is not None else []
        return Flat(
            {
                "modules": {name: self._module_tree(name, module) for name, module in self.modules.items()},
                "optimizers": {
                    name: {
                        **_optimizer_tree(optimizer, name in self.with_own_numbers, self.slots.by_id),
                        **({"members": now} if (now := self._names_in(name)) != self._built_with[name] else {}),
                    }
                    for name, optimizer in self.optimizers.items()
                },
                "objects": {name: thing.state_dict() for name, thing in self.objects.items()},
                **({"buckets": layouts} if layouts else {}),
            }
        )

    def parameter_bytes(self) -> int:
        """Bytes of the replicated parameters and buffers. Not of the optimizers' state: a new job has none yet."""
        flat = self.replicated()
        return sum(t.nbytes for path, t in zip(flat.paths, flat.tensors, strict=True) if path.startswith("modules."))

    def _module_tree(self, owner: str, module: nn.Module) -> dict[str, Any]:
        tensors: dict[str, Any] = {n: p for n, p in module.named_parameters() if id(p) not in self._copies}
        tensors.update((n, b) for n, b in module.named_buffers() if (owner, n) not in self.private_buffers)
        extra = {
            name: child.get_extra_state()
            for name, child in module.named_modules()
            if type(child).get_extra_state is not nn.Module.get_extra_state
        }
        return {"tensors": tensors, "extra": extra}

    def digest(self, known: dict[int, int] | None = None) -> str:
        """Digest of the replicated state. `known` holds digests computed already, by bucket.

        Goes from the last bucket to the first: a source sends in the other direction, and each digest is computed
        once, by whoever comes first. It takes as many threads as the script lets torch compute with: a core reads the
        state no faster than memory lets it, and those of this rank are idle meanwhile.
        """
        flat = self.replicated()
        reader, buckets = TensorReader(flat.tensors), plan_state(flat.specs)
        found = {} if known is None else known

        def digest(bucket: Bucket) -> None:
            if bucket.index not in found:
                found[bucket.index] = reader.digest(bucket)

        threads = min(torch.get_num_threads(), len(buckets))
        if threads > 1:
            with ThreadPoolExecutor(threads, thread_name_prefix="relight-digest") as pool:
                list(pool.map(digest, reversed(buckets)))
        else:
            for bucket in reversed(buckets):
                digest(bucket)
        return digest_of(flat, [found[bucket.index] for bucket in buckets])

    def digests_by_tensor(self) -> dict[str, int]:
        """Of each tensor of the replicated state by its path, and of all else in it, 64 bits each."""
        flat = self.replicated()
        found = {
            path: xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(tensor_digests(local_part(tensor))))
            for path, tensor in zip(flat.paths, flat.tensors, strict=True)
        }
        return {**found, "what is no tensor": int(digest_of(Flat(flat.tree), []), 16)}

    def flip(self, action: Action) -> None:
        """A planned fault: one bit of the state changes behind everybody's back."""
        if action is Action.FLIP_PARAMETER:
            flip_bit([local_part(parameter) for parameter in self.parameters if id(parameter) not in self._copies])
        elif action is Action.FLIP_OPTIMIZER:
            states = [state for o in self.optimizers.values() for state in state_of(o).values()]
            values = [value for state in states for value in state.values()]
            flip_bit([local_part(value) for value in values if isinstance(value, torch.Tensor)])
        else:
            flip_bit([buffer for key, buffer in self.slots.buffers.items() if key not in self.private_buffers])

    def layout(self) -> str:
        """Digest of names, shapes and dtypes: equal on ranks that built the same model and optimizer.

        Of the optimizer as it was built: groups that a script adds later belong to the state.
        """
        shapes = {
            name: [(n, str(p.dtype), list(p.shape)) for n, p in module.named_parameters()]
            for name, module in self.modules.items()
        }
        return digest_of(Flat([shapes, self._built_groups, sorted(self.objects), sorted(self.per_rank)]), [])

    def _describe_groups(self) -> dict[str, Any]:
        return {
            name: [
                type(o).__qualname__,
                [[len(g["params"]), sorted(k for k in g if k != "params")] for g in o.param_groups],
            ]
            for name, o in self.optimizers.items()
        }

    def destination(self) -> dict[str, torch.Tensor]:
        """The live tensors by path: where a replacement receives."""
        flat = self.replicated()
        return dict(zip(flat.paths, flat.tensors, strict=True))

    def adopt(self, tree: Any, private_buffers: list[list[str]]) -> None:
        """Make a verified copy this rank's state. Tensors received in place are already where they belong.

        `private_buffers` is what `named_private_buffers` was where the copy was made.
        """
        for name, part in tree["modules"].items():
            unknown = [tensor for tensor in part["tensors"] if (name, tensor) not in self.slots.index]
            if unknown:
                raise UsageError(
                    f"steps have changed how {name} is built: it has a {unknown[0]} where it was trained, and none in "
                    "a process that has just built it, so that no failure can be survived any more. Build (and prune, "
                    "wrap, fuse) modules before relight.Training(...)"
                )
        with torch.no_grad():
            for name, part in tree["modules"].items():
                module = self.modules[name]
                for tensor_name, tensor in part["tensors"].items():
                    self._set((name, tensor_name), tensor)
                children = dict(module.named_modules())
                for child, extra in part["extra"].items():
                    children[child].set_extra_state(extra)
            self._adopt_groups({n: part.get("members", self._built_with[n]) for n, part in tree["optimizers"].items()})
            for name, part in tree["optimizers"].items():
                _adopt_optimizer(self.optimizers[name], part, self.slots)
        for name, part in tree["objects"].items():
            self.objects[name].load_state_dict(part)
        if self.layouts is not None:
            self.layouts.adopt(tree.get("buckets", []))
        self.private_buffers = {(owner, name) for owner, name, *_ in private_buffers}
        self.averages.copied = {(owner, name) for owner, name, *copied in private_buffers if copied}

    def _names_in(self, optimizer: str) -> list[list[str]]:
        return names_in_groups(self.optimizers[optimizer], self.slots.by_id)

    def members_of(self, optimizer: str, tree: dict[str, Any]) -> list[torch.Tensor]:
        """Its parameters where `tree`, a copy of its state, was made."""
        return named(tree.get("members", self._built_with[optimizer]), self.slots.parameters)

    def _adopt_groups(self, names: dict[str, list[list[str]]]) -> None:
        """Give optimizers the parameters that they have where the copy was made."""
        own = {name: self._names_in(name) for name in names}
        for name, members in names.items():
            if members != own[name]:
                regroup(self.optimizers[name], members, self.slots.parameters)
                state_of(self.optimizers[name]).clear()  # of other parameters, or under other numbers
                self.see_groups(name)

    # --- rank-private -----------------------------------------------------------------------------------------
    def private(self) -> dict[str, Any]:
        """The rank-private part, as a tree (data position and random streams are added by the caller)."""
        tree = {
            "buffers": {
                f"{owner}/{name}": self.slots.get((owner, name)) for owner, name in sorted(self.private_buffers)
            },
            "per_rank": {name: thing.state_dict() for name, thing in self.per_rank.items()},
        }
        if counts := self.averages.counts(self.private_buffers):
            tree["averages"] = counts
        if self.with_own_numbers:
            tree["numbers"] = self.own_numbers()
        if self.attributes.has_state:
            tree["attributes"] = self.attributes.private()
        return tree

    def named_private_buffers(self) -> list[list[str]]:
        """Module and name of each rank-private buffer; a third word where an average took it over from its model."""
        copied = self.averages.copied
        return [[*key, "copied"] if key in copied else [*key] for key in sorted(self.private_buffers)]

    def describe(self, lineage: str, until: int) -> dict[str, Any]:
        """What a copy of this state needs to know besides its tensors."""
        return {
            "lineage": lineage,
            "until": until,
            "private_buffers": self.named_private_buffers(),
            "gradients_to_none": self.gradients_to_none,
            **self.besides(),
        }

    def besides(self) -> dict[str, Any]:
        """What every copy of this state has to bring along, as it is in no tensor."""
        return {
            "modes": self._modes(),
            "structure": structure(self.modules),
            "settings": shared_settings(),
            "attributes": encode_tree(self.attributes.private(), "attributes").hex(),
        }

    def _modes(self) -> dict[str, list[str]]:
        """Which modules are in training mode, and which parameters require gradients, as strings of 0 and 1."""
        return {
            owner: [
                "".join("01"[child.training] for child in module.modules()),
                "".join("01"[parameter.requires_grad] for parameter in module.parameters()),
            ]
            for owner, module in self.modules.items()
        }

    def adopt_modes(self, modes: dict[str, list[str]]) -> None:
        """The inverse of what `describe` says of them, for a copy of the same layout."""
        for owner, (training, trained) in modes.items():
            module = self.modules[owner]
            for child, mode in zip(module.modules(), training, strict=False):
                child.training = mode == "1"
            for parameter, trains in zip(module.parameters(), trained, strict=False):
                if parameter.requires_grad != (trains == "1"):
                    parameter.requires_grad_(trains == "1")

    @property
    def has_private(self) -> bool:
        """Whether there is anything that only this rank has."""
        return bool(self.private_buffers or self.per_rank or self.with_own_numbers or self.attributes.has_state)

    def adopt_attributes(self, meta: dict[str, Any]) -> None:
        """Attributes of the source, for a rank whose own are lost, if they were the same on all ranks."""
        self.attributes.adopt(decode_tree(bytes.fromhex(meta.get("attributes", _NO_ATTRIBUTES))))

    @property
    def follows_from_rank(self) -> bool:
        """Whether nothing belongs to this rank alone that another rank could not tell."""
        own = self.private_buffers or self.per_rank or self.with_own_numbers
        return not own and not (self.attributes.has_state and self.attributes.differ)

    def adopt_private(self, tree: dict[str, Any]) -> None:
        """What `private` was on this rank before the write with which its version came about. `adopt` comes first."""
        with torch.no_grad():
            for path, tensor in tree["buffers"].items():
                owner, name = path.split("/", 1)
                self._set((owner, name), tensor)
            self.averages.repeat(tree.get("averages", {}), self.private_buffers)
        for name, part in tree["per_rank"].items():
            self.per_rank[name].load_state_dict(part)
        for name, numbers in tree.get("numbers", {}).items():
            self.with_own_numbers.add(name)
            parameters = parameters_of(self.optimizers[name])
            for index, own in numbers.items():
                state_of(self.optimizers[name])[parameters[index]].update(own)
        self.attributes.adopt(tree.get("attributes", {}))

    def _set(self, key: Key, value: torch.Tensor) -> None:
        """Put a received value into a parameter or buffer; of one that is divided over ranks, into this one's part."""
        live = local_part(self.slots.get(key))
        if live.shape == value.shape and live.dtype == value.dtype:
            if live.data_ptr() != value.data_ptr():
                live.copy_(value)
        else:  # an observer's buffer, say, that takes its shape from the first batch
            self.slots.replace(key, value.to(live.device))

    # --- of the step under way ----------------------------------------------------------------------------------
    def see_gradients(self) -> None:
        """A step begins: whether gradients are None or zeros then."""
        first = next(iter(self.parameters), None)
        self.gradients_to_none = first is None or first.grad is None

    def see_own_numbers(self) -> None:
        """After the first writes: which optimizers keep numbers that only their rank has."""
        self.with_own_numbers |= {name for name, optimizer in self.optimizers.items() if _own_numbers(optimizer)}

    def own_numbers(self) -> dict[str, dict[int, dict[str, float]]]:
        """These numbers, by optimizer and number of the parameter."""
        return {name: _own_numbers(self.optimizers[name]) for name in sorted(self.with_own_numbers)}

    def wrappers(self) -> list[DistributedDataParallel]:
        """The DDP wrappers among the modules, and those around modules that were handed over without them."""
        parts = (part for module in self.modules.values() for part in module.modules())  # the compiler wraps it
        handed = [part for part in parts if isinstance(part, DistributedDataParallel)]
        tracked = {id(parameter) for parameter in self.parameters}
        others = (made for made in wrappers_made() if not any(made is one for one in handed))
        return [*handed, *(made for made in others if any(id(p) in tracked for p in made.parameters()))]

    def written_by(self, optimizer: str) -> list[Key]:
        """The parameters that an optimizer may write."""
        numbers = self.slots.by_id
        return [numbers[id(p)] for p in parameters_of(self.optimizers[optimizer]) if id(p) in numbers]

    def see_groups(self, optimizer: str) -> None:
        """An optimizer is about to write: the script may have given it other parameters by now.

        Raises UsageError if a replacement could not be given them.
        """
        groups, seen = self.optimizers[optimizer].param_groups, self._seen_members[optimizer]
        if len(groups) == len(seen) and all(
            len(group["params"]) == len(members) and all(map(operator.is_, group["params"], members))
            for group, members in zip(groups, seen, strict=True)
        ):
            return
        if is_zero(self.optimizers[optimizer]):
            raise UsageError(
                f"{optimizer}, a ZeroRedundancyOptimizer, was given other parameters after relight.Training(...): its "
                "ranks divide them anew, and a replacement could not. Give it all of them when it is made, and freeze "
                "those that are to wait (requires_grad_(False))"
            )
        self._check_groups(optimizer)
        self._seen_members[optimizer] = members_of_groups(self.optimizers[optimizer])
        self._trained_owners = self._owners_that_train()

    def trains(self, key: Key) -> bool:
        """Whether a buffer belongs to a module that some optimizer updates, so that forward passes may change it."""
        return key[0] in self._trained_owners

    def _owners_that_train(self) -> set[str]:
        trained = {id(parameter) for parameter in self.trained_parameters()}
        return {owner for owner, module in self.modules.items() if any(id(p) in trained for p in module.parameters())}

    def has_gradients(self) -> bool:
        """Whether gradients are waiting for an optimizer step."""
        return any(p.grad is not None and bool(local_part(p.grad).count_nonzero()) for p in self.parameters)

    def clear_gradients(self) -> None:
        for thing in self.objects.values():
            if isinstance(thing, torch.amp.GradScaler):
                reset_scaler(thing)
        for parameter in self.parameters:
            if self.gradients_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                # In a process that took another rank, a divided gradient may still have the size of another part.
                parameter.grad = torch.zeros_like(parameter if is_distributed(parameter) else parameter.grad)

    def trained_parameters(self) -> list[torch.Tensor]:
        """Those that an optimizer updates; an averaged model's are not among them."""
        return [parameter for optimizer in self.optimizers.values() for parameter in parameters_of(optimizer)]

    def keeps(self, thing: Any, depth: int = 3) -> bool:
        """Whether an object is part of the state, or a container that holds some of it (`optimizer.param_groups`)."""
        if id(thing) in self._parts or isinstance(thing, Optimizer):
            return True
        if isinstance(thing, torch.Tensor):
            return self.slots.holds(thing)
        if depth and isinstance(thing, dict):
            return any(self.keeps(member, depth - 1) for member in itertools.islice(thing.values(), _LOOKED_INTO))
        if depth and isinstance(thing, (list, tuple, set, collections.deque)):
            return any(self.keeps(member, depth - 1) for member in itertools.islice(thing, _LOOKED_INTO))
        return False

    def _own_parts(self) -> set[int]:
        """The ids of what was handed over, with the modules inside."""
        things = [thing for kind in (self.modules, self.objects, self.per_rank) for thing in kind.values()]
        inside = [part for thing in things for part in getattr(thing, "__dict__", {}).values()]
        modules = [thing for thing in (*things, *inside) if isinstance(thing, nn.Module)]
        states = [state_of(optimizer) for optimizer in self.optimizers.values()]
        parts = (part for module in modules for part in module.modules())
        return {id(thing) for thing in (*things, *self.optimizers.values(), *states, *parts)}

    def name_of(self, thing: Any) -> str | None:
        """Under which name this very object was handed over; None if it was not."""
        return self._names.get(id(thing)) or self.zero.owner_of(thing)

    def _check_kinds(self) -> None:
        """Refuse what looks replicated and is not."""
        for name, thing in (*self.modules.items(), *self.optimizers.items()):
            parts = thing.modules() if isinstance(thing, nn.Module) else [thing]
            for part in parts:
                instead = _REFUSED.get(type(part).__name__)
                if instead and type(part).__module__.startswith("torch.distributed."):
                    raise UsageError(f"{name} uses {type(part).__qualname__}, which relight cannot restore: {instead}")
                for hook in stateful_hooks(part):
                    raise UsageError(
                        f"{name} has a communication hook of DDP with a state of its own ({type(hook).__qualname__}): "
                        "each rank's is another, nobody else has it, and an aborted step changes it. Use a hook "
                        "without state, such as fp16_compress_hook, or none"
                    )

    def _check_groups(self, name: str) -> None:
        owned = {id(p) for p in self.parameters}
        for index, group in enumerate(self.optimizers[name].param_groups):
            if any(id(p) not in owned for p in group["params"]):
                raise UsageError(
                    f"parameter group {index} of {name} holds parameters of a module that was not handed over: "
                    "relight.Training(model={...}) must name every module that trains, also one that joins later"
                )

    def _check_optimizers(self) -> None:
        for name, optimizer in self.optimizers.items():
            self._check_groups(name)
            attached = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
            if attached and not any(isinstance(thing, LRScheduler) for thing in self.objects.values()):
                raise UsageError(
                    f"a learning-rate scheduler is attached to {name} but was not handed over: "
                    "relight.Training(..., scheduler=...)"
                )

    def _check_averages(self) -> None:
        """An average of parameters that a recovery cuts short, before they are all there, would stay wrong."""
        averages = [name for name, module in self.modules.items() if isinstance(module, AveragedModel)]
        if self.zero and averages:
            raise UsageError(
                f"{averages[0]} averages parameters that a ZeroRedundancyOptimizer sends to other ranks after its "
                "write: should a failure strike just there, the average would be of old ones. Use an optimizer that is "
                "not divided, or leave the average out"
            )

    def fingerprint(self) -> tuple[Any, ...]:
        """Sizes of groups, learning rates, places of schedulers: compared between two steps, when none may change."""
        sizes: list[int] = []
        rates: list[Any] = []
        for optimizer in self.optimizers.values():  # no comprehensions: each is a call, in every step twice
            for group in optimizer.param_groups:
                sizes.append(len(group["params"]))
                rate = group.get("lr")
                rates.append(rate._version if isinstance(rate, torch.Tensor) else rate)
        epochs: list[Any] = []
        for thing in self.objects.values():
            epochs.append(getattr(thing, "last_epoch", None))
        return tuple(sizes), tuple(rates), tuple(epochs)


def parameters_behind(state: TrackedState, tree: Any, count: int) -> dict[int, torch.Tensor]:
    """Which of the `count` tensors of a flattened state are a parameter, a buffer, or an optimizer's state of one.

    By their numbers in the tree. An optimizer's state of a parameter that is divided is divided alike.
    """
    numbered = unflatten(tree, [_Number(number) for number in range(count)])  # type: ignore[misc]
    found: dict[int, torch.Tensor] = {}
    for owner, part in numbered["modules"].items():
        module = state.modules[owner]
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        found |= {number: own[name] for name, number in part["tensors"].items() if name in own}
    for owner, part in numbered["optimizers"].items():
        parameters = state.members_of(owner, part)
        for index, values in part["state"].items():
            found |= {number: parameters[index] for number in values.values() if isinstance(number, _Number)}
        for name, values in part.get("resting", {}).items():
            (parameter,) = named([[name]], state.slots.parameters)
            found |= {number: parameter for number in values.values() if isinstance(number, _Number)}
    return found


def with_inner(handed: dict[str, Any], objects: dict[str, Any]) -> dict[str, Optimizer]:
    """The optimizers among what was handed over as such, and those inside them (SAM, Lookahead, a wrapper of any kind).

    One that is no torch.optim.Optimizer goes to `objects`, which asks for its `state_dict`, unless all that it keeps
    are optimizers and plain attributes. Raises UsageError if there is nothing in it that could be restored.
    """
    found = {name: thing for name, thing in handed.items() if isinstance(thing, Optimizer)}
    for name, thing in handed.items():
        inside = {f"{name}.{k}": v for k, v in getattr(thing, "__dict__", {}).items() if isinstance(v, Optimizer)}
        known = {id(optimizer) for optimizer in found.values()}
        if not is_zero(thing):
            found.update({key: optimizer for key, optimizer in inside.items() if id(optimizer) not in known})
        if not isinstance(thing, Optimizer):
            if isinstance(thing, Stateful):
                objects[name] = thing
            elif not inside:
                raise UsageError(
                    f"{name} is a {type(thing).__qualname__}, no torch.optim.Optimizer, and has no state_dict() and "
                    "load_state_dict(): add them (as in torch.distributed.checkpoint's Stateful), or a replacement "
                    "would train on without its state"
                )
    return found


class _Number(int):
    """Of a tensor, in place of it in a tree."""


def _own_numbers(optimizer: Optimizer) -> dict[int, dict[str, float]]:
    """Python's floats in an optimizer's state, by the number of the parameter."""
    parameters = parameters_of(optimizer)
    kept = state_of(optimizer)
    found = {
        i: {k: v for k, v in kept[p].items() if isinstance(v, float)} for i, p in enumerate(parameters) if p in kept
    }
    return {index: numbers for index, numbers in found.items() if numbers}


def _optimizer_tree(optimizer: Optimizer, has_own_numbers: bool, keys: Mapping[int, Key]) -> dict[str, Any]:
    kept = state_of(optimizer)
    if has_own_numbers:
        kept = {p: {k: v for k, v in values.items() if not isinstance(v, float)} for p, values in kept.items()}
    resting = resting_of(optimizer, kept, keys)
    return {
        "groups": settings_of(optimizer),
        # By number: a tensor's path must not depend on which other parameters have been used so far.
        "state": {i: dict(kept[p]) for i, p in enumerate(parameters_of(optimizer)) if p in kept},
        **({"resting": {name: dict(kept[p]) for name, p in resting.items()}} if resting else {}),
    }


def _adopt_optimizer(optimizer: Optimizer, tree: dict[str, Any], slots: Slots) -> None:
    parameters = parameters_of(optimizer)
    for group, saved in zip(optimizer.param_groups, tree["groups"], strict=True):
        for key in group.keys() - saved.keys() - {"params"}:
            del group[key]
        group.update(saved)
    received, kept = tree["state"], state_of(optimizer)
    for index, parameter in enumerate(parameters):
        if index not in received:
            kept.pop(parameter, None)
            continue
        own = kept[parameter]
        for key in [key for key in own if key not in received[index]]:
            del own[key]
        for key, value in received[index].items():
            own[key] = _placed(value, own.get(key), parameter)
    for parameter in resting_of(optimizer, kept, slots.by_id).values():
        del kept[parameter]
    for name, values in tree.get("resting", {}).items():
        (parameter,) = named([[name]], slots.parameters)
        kept[parameter] = {key: _placed(value, None, parameter) for key, value in values.items()}


def _placed(value: Any, own: Any, parameter: torch.Tensor) -> Any:
    """A received value on the device where the optimizer keeps it."""
    if not isinstance(value, torch.Tensor):
        return value
    mine = local_part(own) if isinstance(own, torch.Tensor) else None
    if mine is not None and mine.shape == value.shape and mine.dtype == value.dtype:
        if mine.data_ptr() != value.data_ptr():
            mine.copy_(value)
        return own
    divided = is_distributed(parameter) and value.shape == local_part(parameter).shape
    if divided and (value.ndim > 0 if own is None else is_distributed(own)):
        return as_part_like(value, parameter)
    return value.to(parameter.device) if value.shape == parameter.shape else value
