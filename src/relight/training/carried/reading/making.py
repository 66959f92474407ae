"""Modules, optimizers, schedulers and functions that steps make and keep: a replacement would have none there."""

import ast
import copy
import dis
import itertools
import operator
import types
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from relight.script_files import is_script_file
from relight.training.carried.code.refs import UNKNOWN, Key, Ref
from relight.training.carried.reading.flow import Use
from relight.training.carried.reading.syntax import known
from relight.training.torch_private.modules import modules_in

if TYPE_CHECKING:
    from relight.training.carried.reading.reading import Reading

_KINDS = (nn.Module, torch.optim.Optimizer, LRScheduler)
_COPIES = (copy.copy, copy.deepcopy, torch.compile)
_SAME = frozenset(
    "eval train to cpu cuda float double half bfloat16 requires_grad_ compile".split()
)  # return themselves
_PLAIN = (bool, int, float, str, type(None))
_COMPARED = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


# Torch's own classes of modules that hold no tensors: they are carried as what their arguments were.
_STATELESS = tuple(
    f"torch.nn.modules.{name}"
    for name in "activation distance dropout flatten fold linear loss padding pixelshuffle pooling upsampling".split()
)
_WITH_STATE = (nn.PReLU, nn.MultiheadAttention, nn.Linear, nn.Bilinear)


def _returns_own_function(code: types.CodeType) -> bool:
    """Return whether a function of the script returns one that it has defined, and that remembers its variables."""
    is_own = is_script_file(code.co_filename)
    inner = [one for one in code.co_consts if is_own and isinstance(one, types.CodeType) and one.co_freevars]
    names = {one.co_name for one in inner} - {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
    for one, after in itertools.pairwise(dis.get_instructions(code)) if names else ():
        is_made = one.opname in ("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE") and "<lambda>" in names
        is_named = one.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and one.argval in names
        if after.opname == "RETURN_VALUE" and (is_made or is_named):
            return True
    return False


@dataclass(frozen=True)
class Made:
    """One place in the code that makes an object and keeps it."""

    kind: type
    file: str
    line: int
    never: tuple[frozenset[Key], ...]  # conditions that exclude it, unless some step writes what each depends on
    layer: str = ""  # the attribute of a module that was handed over, if it goes there; or what is unfrozen there

    def may_be(self, written: Collection[Key]) -> bool:
        """Return whether a step may come there, if steps write these places."""
        return all(not keys.isdisjoint(written) for keys in self.never)


class Making:
    """Notes what assignments and calls of `append` keep."""

    def __init__(self, reading: "Reading") -> None:
        self._reading = reading
        self._kept: dict[Key, list[Made]] = {}
        self._calls: dict[ast.expr, type] = {}  # that return something made
        self._layers: list[tuple[Key, Made]] = []
        self._made_again: set[Key] = set()  # of these: one is there before the first step, or has no tensors
        self._never: list[frozenset[Key]] = []  # around the statement that is read
        # Attributes that steps may set on modules; None: not known, so none has the value that it has now.
        self.set_on_modules: frozenset[str] | None = None

    def kept_at(self, key: Key) -> Made | None:
        """Return what steps may make and keep in a place."""
        return next((made for made in self._kept.get(key, ()) if made.may_be(self._reading.flow.writes)), None)

    def new_layer(self, *, is_absent: bool = False) -> Made | None:
        """Return a layer that some steps make, and put into a module which was handed over.

        `is_absent`: none is there, and it has tensors; False: also one instead of another.
        """
        flow = self._reading.flow
        layers = [(key, made) for key, made in self._layers if not (is_absent and key in self._made_again)]
        return next((made for key, made in layers if made.may_be(flow.writes) and flow.may_remain(key)), None)

    def new_writer(self) -> Made | None:
        """Return an optimizer or average that some steps make and keep, other than in local variables."""
        lasting = (made for key, every in self._kept.items() if key[0] in ("attribute", "global") for made in every)
        writers = (made for made in lasting if issubclass(made.kind, (torch.optim.Optimizer, AveragedModel)))
        return next((made for made in writers if made.may_be(self._reading.flow.writes)), None)

    @property
    def never(self) -> tuple[frozenset[Key], ...]:
        """The conditions around the statement that is read, as `Made` has them."""
        return tuple(self._never)

    # --- what makes something ---------------------------------------------------------------------------------------
    def note_call(self, node: ast.Call, ref: Ref) -> Ref:
        """A call that returns `ref` was read: return that with what it makes."""
        kind = ref.makes or self._made_by(node)
        if kind is None:
            return ref
        self._calls[node] = kind
        return replace(ref, makes=kind)

    def _made_by(self, node: ast.Call) -> type | None:
        function = node.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call) and function.attr in _SAME:
            return self._calls.get(function.value)
        maker = known(self._reading.refer(function))
        if isinstance(maker, type) and issubclass(maker, _KINDS):
            return maker
        if isinstance(maker, types.FunctionType) and _returns_own_function(maker.__code__):
            return types.FunctionType
        if any(maker is each for each in _COPIES) and node.args:
            copied = known(self._reading.refer(node.args[0]))
            return type(copied) if isinstance(copied, _KINDS) else None
        return None

    def named(self, ref: Ref) -> Ref:
        """Return a name with what was made for it before."""
        made = self._kept.get(ref.key) if ref.key is not None and ref.makes is None else None
        return replace(ref, makes=made[-1].kind) if made else ref

    # --- where it is kept -------------------------------------------------------------------------------------------
    def assign(self, targets: Sequence[ast.expr], node: ast.expr, value: Ref) -> None:
        """An assignment was read."""
        for target in targets:
            parts, values = (each.elts if isinstance(each, (ast.Tuple, ast.List)) else [] for each in (target, node))
            if parts and len(parts) == len(values):
                for part, one in zip(parts, values, strict=True):
                    self._keep(part, self._calls.get(one), node)
            else:
                is_function = isinstance(node, ast.Lambda)
                self._keep(target, types.FunctionType if is_function else self.named(value).makes, node)

    def put_into(self, into: Use, value: Ref, node: ast.expr) -> None:
        """A value was put into what is in these places."""
        kind = self.named(value).makes
        self._keep_at(into, kind if kind is not types.FunctionType else None, node)

    def _keep(self, target: ast.expr, kind: type | None, node: ast.expr) -> None:
        owner = known(self._reading.refer(target.value)) if isinstance(target, ast.Attribute) else None
        if (
            isinstance(target, ast.Attribute)
            and kind
            and kind is not types.FunctionType
            and isinstance(owner, nn.Module)
            and self._reading.is_foreign(owner)
        ):
            key = ("layer", id(owner), ast.unparse(target))
            where = self._reading.at(node)
            self._layers.append((key, Made(kind, *where, self.never, ast.unparse(target))))
            if isinstance(modules_in(owner).get(target.attr), nn.Module) or self._is_stateless(kind, node):
                self._made_again.add(key)
            self._reading.flow.write(Ref(key), where)
        self._keep_at(self._reading.into(target), kind, node)

    def _keep_at(self, into: Use, kind: type | None, node: ast.expr) -> None:
        if kind is not None and not self._is_stateless(kind, node):
            made = Made(kind, *self._reading.at(node), self.never)
            for key in into or ():
                self._kept.setdefault(key, []).append(made)

    def _is_stateless(self, kind: type, node: ast.expr) -> bool:
        """Return whether what a call in `node` makes has no tensors. Weights of a loss are a buffer."""
        if kind.__module__ not in _STATELESS or issubclass(kind, _WITH_STATE):
            return False
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call) and self._calls.get(each) is kind]
        weights = any(keyword.arg in ("weight", "pos_weight", None) for call in calls for keyword in call.keywords)
        return not (weights or (kind.__module__.endswith(".loss") and any(call.args for call in calls)))

    # --- conditions -------------------------------------------------------------------------------------------------
    @contextmanager
    def under(self, test: ast.expr | None, *, holds: bool) -> Iterator[None]:
        """Inside, statements are read that run if a condition holds, or if it does not."""
        truth, keys = (None, frozenset[Key]()) if test is None else self._truth(test)
        excludes = truth is not None and truth is not holds
        if excludes:
            self._never.append(keys)
        yield
        if excludes:
            self._never.pop()

    def _truth(self, test: ast.expr) -> tuple[bool | None, frozenset[Key]]:
        """Return the present truth of a condition, None if that is not known, and the places that it follows from."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                truth, keys = self._truth(inner)
                return (None if truth is None else not truth), keys
            case ast.BoolOp(op=op, values=values):
                parts = [self._truth(each) for each in values]
                decides = isinstance(op, ast.Or)
                for truth, keys in parts:
                    if truth is decides:
                        return truth, keys
                every = frozenset[Key]().union(*(keys for _, keys in parts))
                return (None if any(truth is None for truth, _ in parts) else not decides), every
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
                (one, keys), (other, more) = self._plain(left), self._plain(right)
                try:
                    truth = None if UNKNOWN in (one, other) else bool(_COMPARED[type(op)](one, other))
                except TypeError:
                    truth = None
                return truth, keys | more
        value, keys = self._plain(test)
        return (None if value is UNKNOWN else bool(value)), keys

    def _plain(self, node: ast.expr) -> tuple[Any, frozenset[Key]]:
        refs = [self._reading.refer(each) for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute))]
        keys = frozenset(one.key for ref in refs for one in (ref, ref.alias) if one is not None and one.key is not None)
        ref = self._reading.refer(node)
        has_place = ref.key is not None or isinstance(node, ast.Constant) or self._stays(node)
        return (known(ref) if has_place and isinstance(known(ref), _PLAIN) else UNKNOWN), keys

    def _stays(self, node: ast.expr) -> bool:
        """Return whether this is an attribute of a module that no step sets."""
        if self.set_on_modules is None or not isinstance(node, ast.Attribute) or node.attr in self.set_on_modules:
            return False
        return isinstance(known(self._reading.refer(node.value)), nn.Module)
