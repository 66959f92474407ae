"""Other ways to write an attribute or a global, as the usual one: `setattr(t, "n", 1)` is `t.n = 1`.

Code of coroutines is written as that of functions, since it does the same in the same order: `await f(x)` is `f(x)`.
"""

import ast
from typing import TypeVar

_Node = TypeVar("_Node", bound=ast.AST)


class _Usual(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id="vars"), args=[thing], keywords=[]):
                return _attribute(node, thing, "__dict__")
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[thing, ast.Constant(value=str(name))]):
                return _attribute(node, thing, name)
            case ast.Call(func=ast.Name(id="getattr"), args=[thing, ast.Constant(value=str(name)), default]):
                either = ast.IfExp(ast.Constant(True), _attribute(node, thing, name), default)
                return _placed(either, node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        match node.value:
            case ast.Call(func=ast.Name(id="setattr"), args=[thing, ast.Constant(value=str(name)), value]):
                return _placed(ast.Assign([_attribute(node, thing, name, ast.Store())], value), node)
            case ast.Call(func=ast.Name(id="delattr"), args=[thing, ast.Constant(value=str(name))]):
                return _placed(ast.Delete([_attribute(node, thing, name, ast.Del())]), node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Subscript(ast.Attribute(thing, "__dict__"), ast.Constant(value=str(name))):
                return _attribute(node, thing, name, node.ctx)
            case ast.Subscript(ast.Call(func=ast.Name(id="globals"), args=[]), ast.Constant(value=str(name))):
                return _placed(ast.Name(name, node.ctx), node)
        return node

    def visit_Await(self, node: ast.Await) -> ast.AST:
        awaited: ast.AST = self.visit(node.value)
        return awaited

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._not_async(ast.FunctionDef, node)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        return self._not_async(ast.For, node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        return self._not_async(ast.With, node)

    def _not_async(self, kind: type[ast.stmt], node: ast.stmt) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(kind(**dict(ast.iter_fields(node))), node)


def _attribute(node: ast.AST, thing: ast.expr, name: str, context: ast.expr_context | None = None) -> ast.expr:
    return _placed(ast.Attribute(thing, name, context or ast.Load()), node)


def _placed(made: _Node, node: ast.AST) -> _Node:
    return ast.fix_missing_locations(ast.copy_location(made, node))


def in_usual_words(tree: ast.Module) -> ast.Module:
    """Return the module in the usual form, for reading."""
    _Usual().visit(tree)
    return tree
