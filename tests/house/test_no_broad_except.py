"""The graph and the passes catch no error they do not name, so that a mistake of FusionLab's own is never told as the user's."""

import ast
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fusionlab
from fusionlab.errors import ArgumentError, TraceError
from fusionlab.graph.interpret import promote
from fusionlab.graph.program import trace

PACKAGE = Path(fusionlab.__file__).parent
FILES = sorted(p for room in ("graph", "fusers") for p in (PACKAGE / room).rglob("*.py"))
BROAD = {"Exception", "BaseException", "ExceptionGroup", "BaseExceptionGroup"}
# The one broad handler there is: it tells the error, and in the tests it raises it.
BOUNDARY = "graph/program/boundary.py"
X = jnp.ones(3)


def names_in(*expressions: ast.AST) -> set[str]:
    """The last parts of the names in expressions: {"TypeError", "Exception"} of `(TypeError, builtins.Exception)`."""
    parts = [n for expression in expressions for n in ast.walk(expression)]
    return {p.id for p in parts if isinstance(p, ast.Name)} | {p.attr for p in parts if isinstance(p, ast.Attribute)}


def broad_handlers(code: str) -> Iterator[int]:
    """The lines that catch every error: a bare except, one of Exception, and `suppress(Exception)`."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None or names_in(node.type) & BROAD:
                yield node.lineno
        elif isinstance(node, ast.Call) and "suppress" in names_in(node.func) and names_in(*node.args) & BROAD:
            yield node.lineno


@pytest.mark.parametrize(
    "code",
    [
        "try: f()\nexcept: pass",
        "try: f()\nexcept Exception: raise",
        "try: f()\nexcept (TypeError, builtins.BaseException) as e: pass",
        "try: f()\nexcept* Exception: pass",
        "with contextlib.suppress(Exception): f()",
    ],
)
def test_a_broad_handler_is_seen(code):
    assert list(broad_handlers(code))


def test_a_handler_of_named_errors_is_not_a_broad_one():
    code = "try: f()\nexcept (TypeError, MyException): pass\nwith suppress(ValueError): isinstance(e, Exception)"
    assert not list(broad_handlers(code))


@pytest.mark.whole
@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_file_of_the_graph_and_the_passes_catches_every_error(path):
    handlers = list(broad_handlers(path.read_text(encoding="utf-8")))
    assert len(handlers) == (path.relative_to(PACKAGE).as_posix() == BOUNDARY)


@pytest.mark.parametrize("verb", [trace.trace, promote.promote])
@pytest.mark.parametrize(
    "kind", [RuntimeError, jax.errors.UnexpectedTracerError, AssertionError, KeyError, ExceptionGroup]
)
def test_whatever_the_users_function_raises_is_a_trace_error_with_its_cause(verb, kind):
    error = kind("boom", [ValueError("inner")]) if kind is ExceptionGroup else kind("boom")

    def model(x):
        raise error

    told = rf"model does not trace: {kind.__name__}: .*boom.* \(raised from test_no_broad"
    with pytest.raises(TraceError, match=told) as caught:
        verb(model, X)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("verb", [trace.trace, promote.promote])
@pytest.mark.parametrize("kind", [ArgumentError, KeyboardInterrupt, SystemExit])
def test_an_error_that_is_clear_already_and_an_interruption_come_through(verb, kind):
    def model(x):
        raise kind("stop")

    with pytest.raises(kind, match="stop"):
        verb(model, X)


def test_a_mistake_of_our_own_is_not_told_as_the_users(monkeypatch):
    def broken(*args, **kwargs):
        raise IndexError("ours")

    monkeypatch.setattr(trace, "graph_of_jaxpr", broken)
    with pytest.raises(IndexError, match="ours"):
        trace.trace(jnp.sin, X)


def test_arguments_that_jax_cannot_flatten_are_a_trace_error():
    with pytest.raises(TraceError, match="does not trace"):
        trace.trace(lambda d: d, {1: X, "a": X})
