"""Small functions of a module written out where they are called, so that an example of a test reads as one program."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping

_SIMPLE = ast.Name | ast.Constant | ast.Attribute | ast.Lambda


class Inlining(ast.NodeTransformer):
    """Replaces calls of functions that only return an expression, and of lambdas, by that expression."""

    def __init__(self, module: ast.Module) -> None:
        self.functions = {s.name: s for s in module.body if isinstance(s, ast.FunctionDef) and not s.decorator_list}

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        found = self._called(node.func)
        inlined = None if found is None else _applied(*found, node)
        return node if inlined is None else self.visit(inlined)

    def _called(self, func: ast.expr) -> tuple[ast.arguments, ast.expr] | None:
        """The parameters and the expression of what is called."""
        if isinstance(func, ast.Lambda):
            return func.args, func.body
        function = self.functions.get(func.id) if isinstance(func, ast.Name) else None
        if function is None:
            return None
        body = function.body[1:] if ast.get_docstring(function) else function.body
        last = body[0] if len(body) == 1 else None
        return (function.args, last.value) if isinstance(last, ast.Return) and last.value else None


def _applied(params: ast.arguments, body: ast.expr, call: ast.Call) -> ast.expr | None:
    """The body with the arguments in it; None where that would change what it computes, or compute a part twice."""
    given = _given(params, call)
    if given is None or any(isinstance(n, ast.NamedExpr) for n in ast.walk(body)):
        return None
    named, rest = given
    bound = {a.arg for n in ast.walk(body) if isinstance(n, ast.Lambda) for a in n.args.args}
    for name, value in named.items():
        uses = sum(isinstance(n, ast.Name) and n.id == name for n in ast.walk(body))
        if (uses > 1 and not isinstance(value, _SIMPLE)) or bound & _free(value):
            return None
    return _Substitution(named, params.kwarg.arg if params.kwarg else "", rest).visit(copy.deepcopy(body))


def _given(params: ast.arguments, call: ast.Call) -> tuple[dict[str, ast.expr], list[ast.keyword]] | None:
    """Parameter -> argument, and the keywords that `**` takes; None where a call is not as plain as that."""
    if params.vararg or params.kwonlyargs or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    names = [a.arg for a in params.args]
    defaults = dict(zip(names[len(names) - len(params.defaults) :], params.defaults, strict=True))
    keywords = {k.arg: k.value for k in call.keywords if k.arg in names}
    named = {**defaults, **dict(zip(names, call.args, strict=False)), **keywords}
    rest = [k for k in call.keywords if k.arg not in names]
    return None if set(named) != set(names) or (rest and not params.kwarg) else (named, rest)  # type: ignore[return-value]


def _free(value: ast.expr) -> set[str]:
    """The names that an expression reads from around it."""
    bound = {a.arg for n in ast.walk(value) if isinstance(n, ast.Lambda) for a in n.args.args}
    return {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} - bound


class _Substitution(ast.NodeTransformer):
    """Arguments in the place of parameters, and keywords in the place of `**rest`."""

    def __init__(self, named: Mapping[str, ast.expr], rest_name: str, rest: list[ast.keyword]) -> None:
        self.named, self.rest_name, self.rest = named, rest_name, rest

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.named[node.id]) if node.id in self.named else node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        of_rest = [
            k for k in node.keywords if k.arg is None and isinstance(k.value, ast.Name) and k.value.id == self.rest_name
        ]
        if of_rest:
            node.keywords = [k for k in node.keywords if k not in of_rest] + self.rest
        self.generic_visit(node)
        return node
