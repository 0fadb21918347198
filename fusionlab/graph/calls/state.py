"""Arguments that a function changes in place: the objects of flax's nnx, taken apart into arrays and put together again.

nnx itself does both (`nnx.split_context`, `nnx.merge_context`): shared Variables stay shared, and added, deleted or returned objects keep
their identity. These are flax's public calls for this purpose; see `nnx.update_context`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax


def is_object(x: Any) -> bool:
    """Whether a value is an object of nnx, a Module, an Optimizer, Rngs, a Variable, that `nnx.jit` takes apart.

    One whose Variables are objects to JAX itself (hijax) is not: `jax.jit` takes it as it is, and `nnx.jit` does not take it.
    """
    kinds = _kinds()
    return bool(kinds) and isinstance(x, kinds) and not _is_known_to_jax(x)


def _is_known_to_jax(x: Any) -> bool:
    nnx = sys.modules["flax.nnx"]
    nodes = (x,) if isinstance(x, nnx.Variable) else (node for _, node in nnx.iter_graph(x))
    first = next((node for node in nodes if isinstance(node, nnx.Variable)), None)
    return bool(getattr(first, "hijax", False))


def _kinds() -> tuple[type, ...]:
    """The classes of such objects; () if nnx has not been imported."""
    nnx = sys.modules.get("flax.nnx")
    return tuple(k for name in ("Pytree", "Object", "Variable") if isinstance(k := getattr(nnx, name, None), type))


def may_be_there() -> bool:
    """Whether nnx has been imported."""
    return bool(_kinds())


def is_value(x: Any) -> bool:
    """Whether a value is an `nnx.State`: a pytree of Variables, made to be taken and returned."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.State)


def variables_of(tree: Any) -> list[Any]:
    """The Variables in a pytree, and in the objects in it, each once."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    found: dict[int, Any] = {}
    for x in jax.tree.leaves(tree, is_leaf=is_object):
        nodes = (node for _, node in nnx.iter_graph(x)) if is_object(x) else ()
        found |= {id(node): node for node in nodes if isinstance(node, nnx.Variable)}
    return list(found.values())


def are_of_another_trace(tree: Any) -> bool:
    """Whether objects in a pytree were made outside the current trace, where they are read-only."""
    nnx = _nnx()
    for x in jax.tree.leaves(tree, is_leaf=is_object):
        nodes = (node for _, node in nnx.iter_graph(x)) if is_object(x) else iter(())
        variable = next((node for node in nodes if isinstance(node, nnx.Variable)), None)
        try:
            if variable is not None:
                variable.set_raw_value(held_by(variable))
        except sys.modules["flax.errors"].TraceContextError:
            return True
    return False


def held_by(variable: Any) -> Any:
    """The value of a Variable."""
    return variable.get_raw_value()


def named(path: Sequence[Any]) -> str:
    """The path of an array in an object as a reader would write it: ".layers[0].kernel"."""
    keys = [next((getattr(key, kind) for kind in ("key", "idx", "name") if hasattr(key, kind)), key) for key in path]
    text = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in keys)
    return text.removesuffix(".value")


@dataclass(frozen=True, eq=False)
class Objects:
    """Objects of arguments, which may share Variables.

    Attributes:
      objects: the user's own objects; only `give_back` changes them.
      names: of each array in them, (which object, path in it): (0, ".layers[0].kernel").
      arrays: those arrays.
    """

    objects: tuple[Any, ...]
    names: tuple[tuple[int, str], ...] = field(init=False)
    arrays: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        state = _nnx().split(self.objects)[1]
        flat = jax.tree_util.tree_flatten_with_path(state)[0]
        object.__setattr__(self, "names", tuple((path[0].key, named(path[1:])) for path, _ in flat))
        object.__setattr__(self, "arrays", tuple(x for _, x in flat))

    def call(self, arrays: Sequence[Any], fn: Any) -> tuple[Any, Left]:
        """`fn` of copies of the objects that hold these arrays -> (its result without objects, the final state of the objects).

        `fn` gives its result as (anything, the objects in it).
        """
        nnx, tag = _nnx(), object()
        with nnx.update_context(tag):
            with nnx.split_context(tag) as outside:
                graph, state = outside.split(self.objects)
            before = nnx.graphdef(self.objects)
            with nnx.merge_context(tag, True) as inside:
                copies = inside.merge(graph, jax.tree.unflatten(jax.tree.structure(state), arrays))
            out, returned = fn(copies)
            after = nnx.graphdef(copies)
            kept = _places(copies, returned)
            with nnx.split_context(tag) as inside:
                graph, state = inside.split((copies, tuple(returned)))
        flat, tree = jax.tree_util.tree_flatten_with_path(state)
        names = tuple((path[0].key, path[1].key, named(path[2:])) for path, _ in flat)
        return out, Left(tuple(x for _, x in flat), names, graph, tree, before != after, kept)

    def give_back(self, left: Left, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Updates the objects to their state after a call; returns the objects in its result."""
        nnx, tag = _nnx(), object()
        with nnx.update_context(tag):
            with nnx.split_context(tag) as outside:
                outside.split(self.objects)
            with nnx.merge_context(tag, False) as outside:
                return outside.merge(left.graph, jax.tree.unflatten(left.tree, arrays))[1]


@dataclass(frozen=True, eq=False)
class Left:
    """The state of objects after a call, and the objects in its result.

    Attributes:
      arrays: theirs.
      names: of each array: (0 for an argument's object and 1 for one of the result, which, path in it).
      graph, tree: nnx's description of the objects, and how their arrays are kept.
      returned: (which, path in it) of the arrays of an argument's objects that the result holds as well.
      restructured: whether an argument's object has gained or lost Variables, or a non-array attribute has changed.
    """

    arrays: tuple[Any, ...]
    names: tuple[tuple[int, int, str], ...]
    graph: Any
    tree: Any
    restructured: bool
    returned: frozenset[tuple[int, str]] = frozenset()


def _places(objects: tuple, returned: Sequence[Any]) -> frozenset[tuple[int, str]]:
    """Where in the objects those Variables are that the result holds as well."""
    kept = {id(v) for v in variables_of(returned)}
    nodes = _nnx().iter_graph(objects) if kept else ()
    return frozenset((path[0], named(path[1:])) for path, node in nodes if id(node) in kept)


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def variables_of_values(trees: Sequence[Any]) -> list[Any]:
    """The Variables that `nnx.State`s hold in these pytrees."""
    values = [x for x in jax.tree.leaves(trees, is_leaf=lambda x: is_value(x) or is_object(x)) if is_value(x)]
    return [x for x in jax.tree.leaves(values, is_leaf=is_object) if is_object(x)]  # a state may hold arrays as well


def not_in(out: Any, variables: Sequence[Any]) -> list[Any]:
    """Those Variables that a result does not hold."""
    returned = {id(v) for v in (*variables_of(out), *variables_of_values([out]))}
    return [v for v in variables if id(v) not in returned]
