"""Names of one function or module of a script, and the code in which they mean the same."""

import ast
from collections.abc import Callable, Iterator

Scope = ast.FunctionDef | ast.Module
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of some code that run in its own scope, less bodies of functions and comprehensions."""
    yield node
    for inner in ast.iter_child_nodes(node):
        if not isinstance(inner, (*_SCOPES, *_COMPREHENSIONS)):
            yield from own(inner)
        else:
            yield inner


def parts(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the same for several statements."""
    for statement in body:
        if isinstance(statement, _SCOPES):
            yield statement
        else:
            yield from own(statement)


def stored(body: list[ast.stmt]) -> set[str]:
    """Return names that these statements bind as plain variables."""
    return {
        node.id for node in parts(body) if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del))
    }


def bound_otherwise(body: list[ast.stmt]) -> set[str]:
    """Return names that cannot be anything but names: of functions, imports, exceptions, `:=`, patterns, `global`."""
    names: set[str] = set()
    for statement in body:
        for node in ast.walk(statement):
            match node:
                case ast.Import() | ast.ImportFrom():
                    names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
                case ast.NamedExpr(target=ast.Name(id=name)):
                    names.add(name)
                case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                    names.add(name)
                case ast.Global():
                    names |= set(node.names)
    names |= {node.name for node in parts(body) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return names


def _parameters(arguments: ast.arguments) -> set[str]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return {one.arg for one in every}


class Rename(ast.NodeTransformer):
    """Put an expression in the place of names, in all scopes in which they mean those of the function around."""

    def __init__(self, names: set[str], expression: Callable[[str, ast.expr_context], ast.expr]) -> None:
        self._names = names
        self._expression = expression

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._expression(node.id, node.ctx) if node.id in self._names else node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.stmt:
        left = [name for name in node.names if name not in self._names]
        return ast.Nonlocal(left) if left else ast.Pass()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        node.decorator_list = [self.visit(one) for one in node.decorator_list]
        self._visit_defaults(node.args)
        outer = {name for one in ast.walk(node) if isinstance(one, ast.Nonlocal) for name in one.names}
        hidden = (_parameters(node.args) | stored(node.body) | bound_otherwise(node.body)) - outer
        inside = Rename(self._names - hidden, self._expression)
        node.body = [inside.visit(statement) for statement in node.body]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        self._visit_defaults(node.args)
        node.body = Rename(self._names - _parameters(node.args), self._expression).visit(node.body)
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        return self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.expr:
        return self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> ast.expr:
        return self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.expr:
        return self._comprehension(node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> ast.expr:
        hidden = {
            one.id for generator in node.generators for one in ast.walk(generator.target) if isinstance(one, ast.Name)
        }
        first = node.generators[0]
        first.iter = self.visit(first.iter)  # it is evaluated outside
        inside = Rename(self._names - hidden, self._expression)
        for number, generator in enumerate(node.generators):
            if number:
                generator.iter = inside.visit(generator.iter)
            generator.target = inside.visit(generator.target)
            generator.ifs = [inside.visit(one) for one in generator.ifs]
        for field in ("elt", "key", "value"):
            if (part := getattr(node, field, None)) is not None:
                setattr(node, field, inside.visit(part))
        return node

    def _visit_defaults(self, arguments: ast.arguments) -> None:
        arguments.defaults = [self.visit(one) for one in arguments.defaults]
        arguments.kw_defaults = [one and self.visit(one) for one in arguments.kw_defaults]
