"""The `state_dict` of other objects than modules and optimizers, as trees that can be copied to another process.

A DTensor in one (an average of sharded parameters) travels as the part of this rank, with how it is divided. In a tree
it stands whole: a checkpoint needs to know which part of it this is.
"""

from collections.abc import Callable, Mapping
from typing import Any

from relight.training.state.handed.handed import Handed
from relight.training.state.handed.schedulers import own_state_dict
from relight.training.state.values.late import changed_likewise
from relight.training.torch_private.distributed.divided import describe_division, make_divided
from relight.training.torch_private.distributed.mesh import is_distributed
from relight.transfer.io.codec import decode_tree, encode_tree

_MOST_BYTES = 2**20  # of each object of which changes are passed on
_DIVIDED, _PART = "\x01divided", "\x01part"


def trees_of(objects: Mapping[str, Any], handed: Handed) -> dict[str, Any]:
    """Return the state of each object, for `load`. Without divided parameters there are no DTensors to look for."""
    states = {name: own_state_dict(thing) for name, thing in objects.items()}
    return _each(states, is_distributed, _described) if handed.is_divided else states


def load(objects: Mapping[str, Any], trees: Mapping[str, Any], handed: Handed) -> None:
    """Have each object load the state that `trees_of` returned. Raises LookupError for a mesh that is unknown here."""

    def made(node: Any) -> Any:
        return make_divided(node[_PART], node[_DIVIDED], handed.parameters)

    for name, tree in trees.items():
        state = _each(tree, lambda one: type(one) is dict and _DIVIDED in one, made) if handed.is_divided else tree
        objects[name].load_state_dict(state)


def changes(kept: Mapping[str, Any], objects: Mapping[str, Any], handed: Handed) -> bytes:
    """Return, for `with_changes`, those trees that were kept otherwise than they are now: both, for each.

    Those of an integration are left out: steps alone change them, and they only make sense as a whole.
    """
    now = trees_of({name: one for name, one in objects.items() if not hasattr(one, "join_training")}, handed)
    pairs = {name: [encode_tree(kept[name], name), encode_tree(tree, name)] for name, tree in now.items()}
    found = {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and len(pair[1]) <= _MOST_BYTES}
    return encode_tree(found, "changed objects") if found else b""


def with_changes(own: Mapping[str, Any], changed: bytes) -> dict[str, Any]:
    """Return the trees that a rank had kept, with what code has changed in those of another one, by `changes`."""
    pairs = decode_tree(changed) if changed else {}
    return {
        name: changed_likewise(tree, *map(decode_tree, pairs[name])) if name in pairs else tree
        for name, tree in own.items()
    }


def _described(tensor: Any) -> dict[str, Any]:
    return {_DIVIDED: describe_division(tensor), _PART: tensor}


def _each(tree: Any, is_meant: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Return a tree with some of its members changed. Containers of which none is changed stay the same objects."""
    if is_meant(tree):
        return change(tree)
    if isinstance(tree, dict):
        members = {key: _each(one, is_meant, change) for key, one in tree.items()}
        return tree if all(members[key] is one for key, one in tree.items()) else members
    if type(tree) in (list, tuple):
        parts = [_each(one, is_meant, change) for one in tree]
        return tree if all(map(lambda left, right: left is right, parts, tree)) else type(tree)(parts)
    return tree
