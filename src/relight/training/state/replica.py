"""The state that all ranks with the same part share: flattened, digested, and adopted from a copy."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
import xxhash
from torch import nn

from relight.errors import UsageError
from relight.training.state.division import Division
from relight.training.state.handed import objects
from relight.training.state.handed.handed import Handed
from relight.training.state.modules.layouts import Layouts
from relight.training.state.modules.slots import Slots
from relight.training.state.optimizers.members import OptimizerMembers
from relight.training.state.optimizers.optimizer_tree import adopt_optimizer, optimizer_tree
from relight.training.state.optimizers.parameter_groups import named
from relight.training.state.rank_private import RankPrivate
from relight.training.state.shared_memory import Groups, SharedMemory
from relight.transfer.io.codec import Flat, digest_of, local_part, members_of, tensor_digests, unflatten
from relight.transfer.plan.plan import Bucket
from relight.transfer.restore.offer import plan_state
from relight.transfer.tensors.weights import TensorReader


class Replica:
    """Parameters, replicated buffers, optimizer state and objects of one rank."""

    def __init__(
        self, handed: Handed, slots: Slots, division: Division, members: OptimizerMembers, private: RankPrivate
    ) -> None:
        self._handed = handed
        self._slots = slots
        self._division = division
        self._members = members
        self._private = private
        self.memory = SharedMemory(handed, slots)
        self._built_groups = _describe_groups(handed)
        self.layouts: Layouts | None = None  # of DDP's buckets, which decide in which order gradients are added up

    def flat(self) -> Flat:
        """Flatten it. The tensors are the live ones, not copies."""
        self._division.sharded.reshard()
        layouts = self.layouts.describe() if self.layouts is not None else []
        return Flat(
            {
                "modules": {name: self._module_tree(name, module) for name, module in self._handed.modules.items()},
                "optimizers": {name: self._optimizer_tree(name) for name in self._handed.optimizers},
                "objects": objects.trees_of(self._handed.objects, self._handed),
                **({"buckets": layouts} if layouts else {}),
            }
        )

    def destination(self) -> dict[str, torch.Tensor]:
        """Return the live tensors by path: where a replacement receives. Tensors that share memory are left out."""
        flat, together = self.flat(), self.memory.paths()
        return {path: one for path, one in zip(flat.paths, flat.tensors, strict=True) if path not in together}

    def module_bytes(self) -> int:
        """Return the size of parameters and buffers, in bytes. A new job has no optimizer state yet."""
        flat = self.flat()
        return sum(t.nbytes for path, t in zip(flat.paths, flat.tensors, strict=True) if path.startswith("modules."))

    def _module_tree(self, owner: str, module: nn.Module) -> dict[str, Any]:
        copies, private = self._division.copies, self._private.buffers
        tensors: dict[str, Any] = {n: p for n, p in self._parameters_of(owner, module) if id(p) not in copies}
        tensors.update((n, b) for n, b in module.named_buffers() if (owner, n) not in private)
        extra = {
            name: child.get_extra_state()
            for name, child in module.named_modules()
            if type(child).get_extra_state is not nn.Module.get_extra_state
        }
        return {"tensors": tensors, "extra": extra}

    def _parameters_of(self, owner: str, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return its parameters by their names, and in the order, as handed over: steps may have pruned it since."""
        live = {id(parameter): (name, parameter) for name, parameter in module.named_parameters()}
        known = ((name, live.pop(id(p), None)) for (of, name), p in self._slots.parameters.items() if of == owner)
        return [*((name, found[1]) for name, found in known if found is not None), *live.values()]

    def _optimizer_tree(self, name: str) -> dict[str, Any]:
        has_own_numbers = name in self._private.with_own_numbers
        tree = optimizer_tree(self._handed.optimizers[name], has_own_numbers, self._slots.by_id)
        members = self._members.changes(name)
        return tree if members is None else {**tree, "members": members}

    # --- digests --------------------------------------------------------------------------------------------------
    def digest(self, known: dict[int, int] | None = None, flat: Flat | None = None) -> str:
        """Return the digest of all of it, as hex. `known` holds digests computed already, by bucket.

        `flat`: a state that was flattened before, to be digested instead.

        Goes from the last bucket to the first: a source sends in the other direction, so that each digest is computed
        once, by the first of the two to need it. Uses as many threads as the script lets torch compute with: a core
        reads the state no faster than memory lets it, and the cores of this rank are idle meanwhile.
        """
        flat = flat or self.flat()
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
        """Return 64-bit digests by path: one a tensor, and one for what is no tensor in each entry."""
        flat = self.flat()
        found = {
            path: xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(tensor_digests(local_part(tensor))))
            for path, tensor in zip(flat.paths, flat.tensors, strict=True)
        }
        plain = {path: xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(value)) for path, value in _entries(flat.values)}
        return found | plain

    def layout(self) -> str:
        """Return a digest of names, shapes and dtypes: equal on ranks that built the same model and optimizer.

        Optimizers count as they were handed over: groups that a script adds later belong to the state.
        """
        handed = self._handed
        shapes = {
            name: [(n, str(p.dtype), list(p.shape)) for n, p in self._parameters_of(name, module)]
            for name, module in handed.modules.items()
        }
        return digest_of(Flat([shapes, self._built_groups, sorted(handed.objects), sorted(handed.per_rank)]), [])

    # --- from a copy ------------------------------------------------------------------------------------------------
    def adopt(self, tree: Any, private_buffers: list[list[str]], memory: Groups | None = None) -> str:
        """Make a verified copy this rank's state. Tensors received in place are already where they belong.

        `private_buffers` and `memory` are what `RankPrivate.named_buffers` and `SharedMemory.describe` returned where
        the copy was made (None: unknown). Returns the tensors that
        share memory there and cannot here, or the other way round.
        """
        if memory is not None:
            self.memory.separate(memory)
        self._refuse_other_structure(tree["modules"])
        with torch.no_grad():
            for name, part in tree["modules"].items():
                module = self._handed.modules[name]
                for tensor_name, tensor in part["tensors"].items():
                    self._slots.set((name, tensor_name), tensor)
                children = dict(module.named_modules())
                for child, extra in part["extra"].items():
                    children[child].set_extra_state(extra)
            self._members.adopt(tree["optimizers"])
            for name, part in tree["optimizers"].items():
                adopt_optimizer(self._handed.optimizers[name], part, self._slots)
        objects.load(self._handed.objects, tree["objects"], self._handed)
        if self.layouts is not None:
            self.layouts.adopt(tree.get("buckets", []))
        self._private.adopt_names(private_buffers)
        return "" if memory is None else self.memory.join(memory, set(Flat(tree).paths))

    def _refuse_other_structure(self, modules: dict[str, Any]) -> None:
        for name, part in modules.items():
            unknown = [tensor for tensor in part["tensors"] if not self._slots.has_place((name, tensor))]
            if unknown:
                raise UsageError(
                    f"steps have changed how {name} is built: it has a {unknown[0]} where it was trained, and none in "
                    "a process that has just built it, so that no failure can be survived any more. Build (and prune, "
                    "wrap, fuse) modules before relight.Training(...)"
                )

    def parameters_in(self, tree: Any, count: int) -> dict[int, torch.Tensor]:
        """Find the tensors of a copy that are a parameter, a buffer, or an optimizer's state of a parameter.

        Keys are the numbers (0 to `count` - 1) of the copy's tensors; values are the live parameter or buffer. An
        optimizer's state of a parameter that is divided is divided alike.
        """
        numbered = unflatten(tree, [_Number(number) for number in range(count)])  # type: ignore[misc]
        found: dict[int, torch.Tensor] = {}
        for owner, part in numbered["modules"].items():
            module = self._handed.modules[owner]
            own = {**dict(self._parameters_of(owner, module)), **dict(module.named_buffers())}
            found |= {number: own[name] for name, number in part["tensors"].items() if name in own}
        for owner, part in numbered["optimizers"].items():
            parameters = self._members.in_copy(owner, part)
            for index, values in part["state"].items():
                found |= {number: parameters[index] for number in values.values() if isinstance(number, _Number)}
            for name, values in part.get("resting", {}).items():
                (parameter,) = named([[name]], self._slots.parameters)
                found |= {number: parameter for number in values.values() if isinstance(number, _Number)}
        return found


class _Number(int):
    """A tensor's number, in place of the tensor in a tree."""


def _describe_groups(handed: Handed) -> dict[str, Any]:
    return {
        name: [
            type(o).__qualname__,
            [[len(g["params"]), sorted(k for k in g if k != "params")] for g in o.param_groups],
        ]
        for name, o in handed.optimizers.items()
    }


def _entries(tree: Any, path: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Find the values of a flattened tree by paths such as `objects.scheduler.last_epoch`."""
    members = members_of(tree) if depth else None
    if not members:
        yield path, tree
        return
    for key, value in members:
        yield from _entries(value, f"{path}.{key}" if path else str(key), depth - 1)
