"""Parameters that steps unfreeze, by the code: a wrapper made before may average no gradients of theirs."""

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from relight.training.carried.code.refs import UNKNOWN
from relight.training.carried.reading.making import Made
from relight.training.carried.reading.syntax import constant_of, known
from relight.training.torch_private.modules import modules_in, parameters_in

if TYPE_CHECKING:
    from relight.training.carried.reading.reading import Reading


class Unfreezing:
    """Notes `X.requires_grad_(True)` and `X.requires_grad = True`, also in `for p in X.parameters()`."""

    def __init__(self, reading: "Reading") -> None:
        self._reading = reading
        self._noted: list[tuple[Made, list[torch.Tensor]]] = []

    def found(self) -> list[tuple[Made, list[torch.Tensor]]]:
        """Return the places that steps may come to, and the parameters there."""
        return [(made, unfrozen) for made, unfrozen in self._noted if made.may_be(self._reading.flow.writes)]

    def note(self, node: ast.stmt | ast.expr) -> None:
        """A call, an assignment or a loop was read."""
        match node:
            case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Attribute(value=owner, attr="parameters"))):
                for statement in node.body:  # a condition may choose some
                    inner = statement.value if isinstance(statement, ast.Expr) else statement
                    unfrozen = _unfrozen_by(inner)
                    if isinstance(unfrozen, ast.Name) and unfrozen.id == name:
                        self._note(owner, statement)
            case ast.Call() | ast.Assign() if (unfrozen := _unfrozen_by(node)) is not None:
                self._note(unfrozen, node)

    def _note(self, unfrozen: ast.expr, node: ast.AST) -> None:
        owner = self._owner(unfrozen)
        if isinstance(owner, (nn.Module, torch.Tensor)):
            parameters: list[torch.Tensor] = [*owner.parameters()] if isinstance(owner, nn.Module) else [owner]
            made = Made(type(owner), *self._reading.at(node), self._reading.making.never, ast.unparse(unfrozen))
            self._noted.append((made, parameters))

    def _owner(self, node: ast.expr) -> Any:
        """Return the module or parameter that an expression names, also one in a container of modules."""
        found = known(self._reading.refer(node))
        if found is not UNKNOWN or not isinstance(node, (ast.Attribute, ast.Subscript)):
            return found
        name = node.attr if isinstance(node, ast.Attribute) else constant_of(node.slice)
        owner = self._owner(node.value)
        return {**modules_in(owner), **parameters_in(owner)}.get(str(name)) if isinstance(owner, nn.Module) else UNKNOWN


def _unfrozen_by(node: ast.AST) -> ast.expr | None:
    """Return what a call or assignment certainly unfreezes, or None."""
    match node:
        case ast.Call(func=ast.Attribute(value=unfrozen, attr="requires_grad_"), args=args, keywords=keywords):
            return unfrozen if _is_true([*args, *(keyword.value for keyword in keywords)]) else None
        case ast.Assign(targets=[ast.Attribute(value=unfrozen, attr="requires_grad")], value=value):
            return unfrozen if _is_true([value]) else None
    return None


def _is_true(given: Sequence[ast.expr]) -> bool:
    return all(isinstance(one, ast.Constant) and one.value is True for one in given)
