"""Function -> raw Graph. `jit` calls are flattened, regions are kept, dead equations are dropped."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend import core as jex_core

from ...errors import ArgumentError, TraceError
from ..calls.binding import Bound, bind
from ..jax_compat import FLATTENED as FLATTENED
from ..jax_compat import child_jaxprs, split_closed
from ..settings import no_full_collections
from .captured import Captured
from .graph import Graph
from .ir import Atom, Block, Literal, Node, Value
from .meshes import sharding_of
from .scopes import source_of_error
from .symbolic import at_numbers, choices, numbered, symbols_of

_ERROR_LENGTH = 600  # of a message of JAX's; the longest that says something useful throughout


def trace(
    fn: Callable,
    *args: Any,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> Graph:
    """Traces `fn` at the shapes and dtypes of the arguments, without running it.

    Args:
      fn: any function `jax.jit` accepts.
      *args, **kwargs: example arguments: arrays or `jax.ShapeDtypeStruct`s, in any pytrees.
      static_argnums, static_argnames: arguments that are Python values rather than arrays, as in `jax.jit`.

    Returns:
      The raw Graph.

    Raises:
      ArgumentError: `fn` is not callable, or a static argument does not exist.
      TraceError: the function raised while JAX traced it; the original error is the cause.
    """
    bound = bind_users(fn, args, kwargs, static_argnums, static_argnames)
    return graph_of(bound, name_of(fn), lambda: users_code(fn))


def bind_users(fn: Callable, args: tuple, kwargs: dict, static_argnums: Any = (), static_argnames: Any = ()) -> Bound:
    """`bind`, with the errors of the user's function converted as in `trace`."""
    with users_code(fn), no_full_collections():  # which may trace it
        return bind(fn, args, kwargs, static_argnums, static_argnames)


def graph_of(
    bound: Bound, name: str, around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
) -> Graph:
    """The raw Graph of a bound call; errors of the user's function pass through `around`."""
    with around(), no_full_collections():
        found = jax.make_jaxpr(bound.fn, return_shape=True)(*bound.args, **bound.kwargs)
    graph = _graph_of(bound, name, bound.args, bound.kwargs, found)
    symbols = symbols_of(v.aval for v in graph.top.inputs)
    if not symbols:
        return graph
    for numbers in choices(symbols):
        args, kwargs = at_numbers((bound.args, bound.kwargs), numbers)
        found = None
        with contextlib.suppress(TraceError), users_code(bound.fn):  # a program may refuse some numbers
            found = jax.make_jaxpr(bound.fn, return_shape=True)(*args, **kwargs)
        if found is not None:
            return replace(graph, numbered=numbered(graph, symbols, _graph_of(bound, name, args, kwargs, found)))
    return replace(graph, numbered=numbered(graph, symbols, None))


def _graph_of(bound: Bound, name: str, args: tuple, kwargs: dict, found: tuple[Any, Any]) -> Graph:
    closed, out_shape = found
    flat, in_tree = jax.tree_util.tree_flatten((args, kwargs))
    if len(split_closed(closed)[0].invars) != len(flat):
        raise AssertionError("JAX flattened the arguments differently")
    return graph_of_jaxpr(
        closed,
        name=name,
        in_tree=in_tree,
        out_tree=jax.tree_util.tree_structure(out_shape),
        in_names=bound.leaf_names,
        in_shardings=tuple(map(sharding_of, flat)),
    )


def name_of(fn: Callable) -> str:
    """The name of a function; a partial has the name of its function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


class users_code(contextlib.AbstractContextManager):  # noqa: N801 - it is used as `contextlib.suppress` is
    """A context around only the call of the user's function: any error it raises becomes a TraceError.

    The function may raise anything. FusionLab's own errors on either side of that call are not the user's and stay
    unchanged. An ArgumentError passes, because a fused op called by the function reports the user's arguments with it.
    """

    def __init__(self, fn: Callable) -> None:
        self.name = name_of(fn)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, ArgumentError):
            raise _does_not_trace(self.name, error) from error


def _does_not_trace(name: str, error: Exception) -> TraceError:
    """The one error for a function of the user's that raised while JAX traced it."""
    advice = STATIC_ADVICE if _wants_static(error) else f"try jax.jit({name}) on them first."
    if _no_array(error):
        advice = f"convert arrays of other libraries with jax.numpy.asarray; {advice}"
    needed = f"a function jax.jit accepts with these arguments; {advice}"
    if isinstance(error, TypeError) and re.match(rf"(\S+\.)?{re.escape(name)}\(\) (missing|takes|got)\b", str(error)):
        needed = f"after {name}, the arguments of an ordinary call of it."
    return TraceError(f"{name} does not trace: {error_text(error)} Needed: {needed}")


STATIC_ADVICE = (
    "name Python-valued arguments in static_argnums or static_argnames, and use jnp.where or jax.lax.cond where the data "
    "decide."
)


def _wants_static(error: Exception) -> bool:
    """Whether JAX needed a Python value and got a traced array, or the reverse."""
    traced = jax.errors.ConcretizationTypeError | jax.errors.TracerIntegerConversionError
    return isinstance(error, traced) or _no_array(error)


def _no_array(error: Exception) -> bool:
    """Whether JAX was given something that it does not take for an array."""
    return isinstance(error, TypeError) and "abstract array" in str(error)


def error_text(error: Exception) -> str:
    """Type and message of an error of the user's code or of JAX, on one line, with the user's line that raised it.

    JAX's additions to its messages (links, remarks on its own traceback) and the folders of source files are removed.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    kept = itertools.takewhile(lambda line: not line.startswith(("See https://", "----")), lines)
    text = (
        " ".join(line if line.endswith((".", ",", ":", ";")) else f"{line}." for line in kept if line) or "no message"
    )
    text = re.sub(r" at \S*/([^/\s]+:\d+)", r" at \1", text)
    text = re.sub(r"<function (\S+) at 0x\w+>", r"\1", text)
    if len(text) > _ERROR_LENGTH:
        text = text[:_ERROR_LENGTH].rpartition(" ")[0] + " ..."
    text += "" if text.endswith((".", "!", "?", "...")) else "."
    source = source_of_error(error)
    where = f" (raised from {source}: {source.text})" if source is not None else ""
    return f"{type(error).__name__}: {text}{where}"


def graph_of_jaxpr(
    closed: Any,
    *,
    name: str,
    in_tree: Any,
    out_tree: Any,
    in_names: tuple[str, ...],
    in_shardings: tuple[Any, ...] = (),
) -> Graph:
    """A closed jaxpr -> Graph."""
    return Graph(name, block_of_jaxpr(closed), in_tree, out_tree, in_names, jax.__version__, in_shardings)


def block_of_jaxpr(closed: Any) -> Block:
    """A closed jaxpr as a block of its own, whose ids mean nothing outside it."""
    return _Flattener().block(closed, path="", label="top")


class _Flattener:
    """Hands out ids in program order and copies variables: one Jaxpr object may be shared by several call sites."""

    def __init__(self) -> None:
        self.value_ids = itertools.count()
        self.node_ids = itertools.count()
        self.captured = Captured()

    def value(self, aval: Any) -> Value:
        return Value(next(self.value_ids), aval)

    def block(self, closed: Any, path: str, label: str, calls: tuple = ()) -> Block:
        jaxpr, consts = split_closed(closed)
        constvars = jaxpr.constvars if consts else ()
        inputs = tuple(self.value(v.aval) for v in jaxpr.invars)
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
        const_values: dict[int, tuple[Value, Any]] = {}
        self._bind_consts(constvars, consts, env, const_values)
        eqns: list[tuple] = []
        self._flatten(jaxpr, env, calls, eqns, const_values)
        outputs = tuple(_read(env, v) for v in jaxpr.outvars)
        live = _live(eqns, outputs)
        nodes = tuple(self._node(eqn, ins, outs, around, path) for eqn, ins, outs, around in live)
        return Block(path, label, inputs, tuple(const_values.values()), nodes, outputs, closed)

    def _bind_consts(self, constvars: Sequence, consts: Sequence, env: dict, const_values: dict) -> None:
        for var, given in zip(constvars, consts, strict=True):
            const = self.captured.representative(given, var.aval)
            if id(const) not in const_values:
                const_values[id(const)] = (self.value(var.aval), const)
            env[var] = const_values[id(const)][0]

    def _flatten(self, jaxpr: Any, env: dict, calls: tuple, out: list, const_values: dict) -> None:
        for eqn in jaxpr.eqns:
            inputs = tuple(_read(env, v) for v in eqn.invars)
            child = _flattenable(eqn)
            if child is None:
                outputs = tuple(self.value(v.aval) for v in eqn.outvars)
                env.update(zip(eqn.outvars, outputs, strict=True))
                out.append((eqn, inputs, outputs, calls))
                continue
            inner, consts = split_closed(child)
            inner_env: dict[Any, Atom] = dict(zip(inner.invars, inputs, strict=True))
            self._bind_consts(inner.constvars if consts else (), consts, inner_env, const_values)
            self._flatten(inner, inner_env, (*calls, eqn), out, const_values)
            env.update((v, _read(inner_env, o)) for v, o in zip(eqn.outvars, inner.outvars, strict=True))

    def _node(self, eqn: Any, inputs: tuple, outputs: tuple, calls: tuple, path: str) -> Node:
        nid = next(self.node_ids)
        blocks = []
        for key, index, child in child_jaxprs(eqn):
            label = key if index is None else f"{key}[{index}]"
            child_path = f"{path}.n{nid}.{label}" if path else f"n{nid}.{label}"
            blocks.append(self.block(child, child_path, label, (*calls, eqn)))
        return Node(nid, eqn.primitive.name, inputs, outputs, eqn, tuple(blocks), calls)


def _read(env: dict, atom: Any) -> Atom:
    return Literal(atom.val, atom.aval) if isinstance(atom, jex_core.Literal) else env[atom]


def _flattenable(eqn: Any) -> Any | None:
    """The jaxpr to inline, or None. A jit with donation or shardings has a meaning, and stays a node."""
    if eqn.primitive.name not in FLATTENED:
        return None
    params = eqn.params
    if any(params.get("donated_invars", ())):
        return None
    for key in ("in_shardings", "out_shardings"):
        if any("Unspecified" not in type(s).__name__ for s in params.get(key, ()) if s is not None):
            return None
    return params.get("jaxpr", params.get("call_jaxpr"))


def _live(eqns: list[tuple], outputs: tuple[Atom, ...]) -> list[tuple]:
    """Drops unread equations without effects (differentiation leaves many)."""
    wanted = {a.id for a in outputs if isinstance(a, Value)}
    kept = []
    for entry in reversed(eqns):
        eqn, inputs, outs, _ = entry
        if eqn.effects or any(v.id in wanted for v in outs):
            kept.append(entry)
            wanted.update(a.id for a in inputs if isinstance(a, Value))
    return kept[::-1]
