"""The arguments of a call, and its result, split into arrays and the rest.

A leaf that is neither an array nor a number (a string, a function, an object that is not a pytree) is fixed, as in `equinox.filter_jit`;
objects that hold state are taken apart by `state.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from .passed import passed_through
from .state import Left, Objects, held_by, is_object, is_value, not_in, variables_of_values

keystr = jax.tree_util.keystr


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class Leaves:
    """The arrays of an argument whose other leaves are fixed, by the paths they had in it."""

    paths: tuple[str, ...]
    arrays: tuple[Any, ...]

    def tree_flatten_with_keys(self) -> tuple[list, tuple[str, ...]]:
        return [(_Path(p), a) for p, a in zip(self.paths, self.arrays, strict=True)], self.paths

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], arrays: Sequence[Any]) -> Leaves:
        return cls(paths, tuple(arrays))


class _Path(str):
    """A key of a pytree that is printed unchanged."""


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class CallResult:
    """A result that does not consist of arrays only, and the values that the function has left in its arguments.

    Attributes:
      arrays: the arrays of the result, then the values that were changed in place.
      leaf_names: a name for each: "out['loss']", "model.layers[0].kernel".
      rest: everything else needed for the user's result.
    """

    arrays: tuple[Any, ...]
    leaf_names: tuple[str, ...]
    rest: Any = field(repr=False)

    def tree_flatten(self) -> tuple[tuple, tuple]:
        return self.arrays, (self.leaf_names, _Aside(self.rest))

    @classmethod
    def tree_unflatten(cls, aside: tuple, arrays: Sequence[Any]) -> CallResult:
        return cls(tuple(arrays), aside[0], aside[1].value)


@dataclass(frozen=True, eq=False)
class _Aside:
    """A value carried in a pytree's structure without affecting equality: two traces of one function describe their objects differently."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Aside)

    def __hash__(self) -> int:
        return 0


def is_array(x: Any, numbers: bool = True) -> bool:
    """Whether JAX takes a leaf as an array; a Python number is one, unless `numbers` is False."""
    if isinstance(x, np.ndarray | np.generic):  # np.float64 is a float as well
        return x.dtype.kind not in "OSUMm"
    if isinstance(x, int | float | complex):
        return numbers
    return not isinstance(x, type) and ((hasattr(x, "shape") and hasattr(x, "dtype")) or hasattr(x, "__jax_array__"))


@dataclass(frozen=True, eq=False)
class Rest:
    """Everything besides arrays needed for the user's result: its structure, its fixed leaves, the final state of objects.

    Attributes:
      tree: of the result; leaves: of each of its leaves, `_ARRAY`, `OBJECT`, or (the value,).
      left: of objects, None without any; new: which of its arrays are among the results, the others are as they were.
    """

    tree: Any
    leaves: tuple[Any, ...]
    left: Left | None = None
    new: tuple[int, ...] = ()


_ARRAY, OBJECT = "array", "object"


@dataclass(frozen=True, eq=False)
class CallParts:
    """The arguments of a call taken apart.

    Attributes:
      fn: of the whole arguments; labels: a name for each.
      trees: of each argument, its structure; leaves: of each, (path, leaf).
      arrays: of each argument, which of its leaves are arrays.
      objects: those with state in all arguments; owners: of each, (which argument, which leaf).
      numbers: whether Python numbers are arrays.
      carries: whether a change of an `nnx.State` is carried, as that of an object is; else it has to be returned.
    """

    fn: Callable
    labels: tuple[str, ...]
    trees: tuple[Any, ...]
    leaves: tuple[tuple[tuple[str, Any], ...], ...]
    arrays: tuple[tuple[int, ...], ...]
    objects: Objects | None
    owners: tuple[tuple[int, int], ...]
    numbers: bool
    carries: bool

    @classmethod
    def of(
        cls, fn: Callable, args: tuple, kwargs: dict, labels: tuple[str, ...], numbers: bool | None, carries: bool
    ) -> CallParts:
        flat = [flattened(tree, carries) for tree in _in_order(args, kwargs)]
        if numbers is None:
            numbers = _are_arrays(flat)
        kinds = [_kinds(leaves, numbers) for leaves, _ in flat]
        owners = tuple((a, i) for a, own in enumerate(kinds) for i in _places(own, OBJECT))
        arrays = tuple(_places(own, _ARRAY) for own in kinds)
        leaves = tuple(tuple((keystr(path), x) for path, x in leaves) for leaves, _ in flat)
        trees = tuple(tree for _, tree in flat)
        return cls(fn, labels, trees, leaves, arrays, _objects_at(leaves, owners), owners, numbers, carries)

    @property
    def are_arrays(self) -> bool:
        return all(len(arrays) == len(leaves) for arrays, leaves in zip(self.arrays, self.leaves, strict=True))

    def _state_of(self, argument: int) -> list[tuple[int, str]]:
        """For the objects in an argument: (number among all their arrays, its path in the argument)."""
        assert self.objects is not None or not self.owners
        named = enumerate(self.objects.names) if self.objects is not None else ()
        mine = ((k, self.owners[o], path) for k, (o, path) in named)
        return [(k, self.leaves[a][i][0] + path) for k, (a, i), path in mine if a == argument]

    def arguments(self, width: int) -> tuple[tuple, dict]:
        """The arrays, as arguments of `run`; the first `width` are positional."""
        new = [self._argument(a) for a in range(len(self.labels))]
        return tuple(new[:width]), dict(zip(self.labels[width:], new[width:], strict=True))

    def _argument(self, a: int) -> Any:
        leaves, state = self.leaves[a], self._state_of(a)
        if len(self.arrays[a]) == len(leaves):
            return jax.tree.unflatten(self.trees[a], [x for _, x in leaves])
        paths = (*(leaves[i][0] for i in self.arrays[a]), *(path for _, path in state))
        held = self.objects.arrays if self.objects is not None else ()
        return Leaves(paths, (*(leaves[i][1] for i in self.arrays[a]), *(held[k] for k, _ in state)))

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each array."""
        return tuple(
            label + path
            for a, label in enumerate(self.labels)
            for path in (*(self.leaves[a][i][0] for i in self.arrays[a]), *(path for _, path in self._state_of(a)))
        )

    @property
    def state_inputs(self) -> list[tuple[int, tuple[int, str]]]:
        """For each array that objects hold: (its number among all arrays, its name in the objects)."""
        assert self.objects is not None
        at, found = 0, []
        for a, arrays in enumerate(self.arrays):
            state = self._state_of(a)
            at += len(arrays)
            found += [(at + i, self.objects.names[k]) for i, (k, _) in enumerate(state)]
            at += len(state)
        return found

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The call with these arrays in their places."""
        leaves = [[x for _, x in pairs] for pairs in self.leaves]
        held: dict[int, Any] = {}
        for a, tree in enumerate(_in_order(args, kwargs)):
            values = iter(jax.tree.leaves(tree))
            for i in self.arrays[a]:
                leaves[a][i] = next(values)
            held |= {k: next(values) for k, _ in self._state_of(a)}
        if self.objects is None:
            out = self._called(leaves, len(args))
            objects = _objects_in(out, self.carries)
            return self._result_of(out, Objects(()).call([], lambda _: (None, objects))[1] if objects else None)
        out, left = self.objects.call([held[k] for k in range(len(held))], partial(self._on_objects, leaves, len(args)))
        return self._result_of(out, left)

    def _on_objects(self, leaves: list[list], width: int, copies: tuple) -> tuple[Any, list[Any]]:
        for (a, i), copy in zip(self.owners, copies, strict=True):
            leaves[a][i] = copy
        out = self._called(leaves, width)
        return out, _objects_in(out, self.carries)

    def _called(self, leaves: list[list], width: int) -> Any:
        trees = self._trees(leaves)
        variables = [] if self.carries else variables_of_values(trees)
        held = [held_by(v) for v in variables]
        out = self._call(trees, width)
        set_ = [i for i, (v, x) in enumerate(zip(variables, held, strict=True)) if held_by(v) is not x]
        if set_ and (lost := self._lost(variables, set_, out, leaves, width)):
            raise LostValue(self._name_of(lost[0], trees))
        return out

    def _lost(self, variables: list, changed: list[int], out: Any, leaves: list[list], width: int) -> list[Any]:
        """Those of the Variables with these numbers whose value is a new one that the result does not hold."""
        missing = {id(v) for v in not_in(out, [variables[i] for i in changed])}
        same = self._unchanged(leaves, width) if missing and self.objects is None else ()
        return [variables[i] for i in changed if id(variables[i]) in missing and i not in same]

    def _trees(self, leaves: list[list]) -> list[Any]:
        return [jax.tree.unflatten(tree, values) for tree, values in zip(self.trees, leaves, strict=True)]

    def _call(self, trees: list, width: int) -> Any:
        return self.fn(*trees[:width], **dict(zip(self.labels[width:], trees[width:], strict=True)))

    def _unchanged(self, leaves: list[list], width: int) -> set[int]:
        """Which Variables of `nnx.State`s are set to the value they had, by number: a scan over layers sets all that it was given."""

        def before_and_after(arrays: list[list]) -> dict[int, tuple[Any, Any]]:
            whole = [list(own) for own in leaves]
            for own, places, values in zip(whole, self.arrays, arrays, strict=True):
                for i, x in zip(places, values, strict=True):
                    own[i] = x
            trees = self._trees(whole)
            variables = variables_of_values(trees)
            before = [held_by(v) for v in variables]
            self._call(trees, width)
            both = [(x, held_by(v)) for x, v in zip(before, variables, strict=True)]
            return {i: pair for i, pair in enumerate(both) if all(map(is_array, pair))}

        arrays = [[own[i] for i in places] for own, places in zip(leaves, self.arrays, strict=True)]
        closed, shapes = jax.make_jaxpr(before_and_after, return_shape=True)(arrays)
        origin = iter(passed_through(closed))
        return {i for i in shapes if (was := next(origin)) == next(origin) and was is not None}

    def _name_of(self, variable: Any, trees: list) -> str:
        """The name of a Variable in an `nnx.State` among the arguments."""
        for label, tree in zip(self.labels, trees, strict=True):
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_object)[0]:
                if leaf is variable:
                    return label + keystr(path)
        return "a Variable"

    def _result_of(self, out: Any, left: Left | None) -> Any:
        flat, tree = flattened(out, self.carries)
        kinds = _kinds(flat, self.numbers)
        if left is None and all(kind is _ARRAY for kind in kinds):
            return out
        mine = _named(flat, kinds, _ARRAY)
        if left is None:
            return _call_result(mine, Rest(tree, kinds))
        objects = [name for name, _ in _named(flat, kinds, OBJECT)]
        state = zip(left.names, left.arrays, strict=True)
        mine += [((objects[o] if side else self._owner(o)) + path, x) for (side, o, path), x in state]
        return _call_result(mine, Rest(tree, kinds, replace(left, arrays=()), tuple(range(len(left.names)))))

    def _owner(self, o: int) -> str:
        a, i = self.owners[o]
        return self.labels[a] + self.leaves[a][i][0]

    def finish(self, out: Any) -> Any:
        """The user's result; also updates the user's objects to their state after the call."""
        if not isinstance(out, CallResult):
            return out
        rest: Rest = out.rest
        count = sum(kind is _ARRAY for kind in rest.leaves)
        arrays, objects = iter(out.arrays[:count]), iter(())
        # Objects of which nothing has changed are not written to: they may be another trace's, which may only be read.
        if rest.left is not None and (rest.new or rest.left.restructured or OBJECT in rest.leaves):
            objects = iter(self._given_back(rest.left, dict(zip(rest.new, out.arrays[count:], strict=True))))
        places = {_ARRAY: arrays, OBJECT: objects}
        return jax.tree.unflatten(rest.tree, [k[0] if isinstance(k, tuple) else next(places[k]) for k in rest.leaves])

    def _given_back(self, left: Left, new: dict[int, Any]) -> tuple[Any, ...]:
        """The objects in the result, after all objects are updated: `new` arrays by number, the others are unchanged."""
        owned = self.objects if self.objects is not None else Objects(())
        old = dict(zip(owned.names, owned.arrays, strict=True))
        return owned.give_back(left, [new[i] if i in new else old[name[1:]] for i, name in enumerate(left.names)])


class LostValue(Exception):  # noqa: N818 - binding.py makes a sentence of it
    """A Variable of an `nnx.State`, by its name, that the function changes and does not return."""


def _in_order(args: tuple, kwargs: dict) -> tuple:
    """All arguments, those by name in the order of the names."""
    return *args, *(kwargs[key] for key in sorted(kwargs))


def _are_arrays(flat: Sequence[tuple[list, Any]]) -> bool:
    """Whether each leaf of some flattened trees is an array, a number, or an object with state."""
    return all(is_array(x) or is_object(x) for leaves, _ in flat for _, x in leaves)


def _kinds(leaves: Sequence[tuple[Any, Any]], numbers: bool) -> tuple[Any, ...]:
    """The kind of each leaf of some (path, leaf)."""
    return tuple(_kind(x, numbers) for _, x in leaves)


def _objects_at(leaves: Sequence[Sequence[tuple[str, Any]]], owners: Sequence[tuple[int, int]]) -> Objects | None:
    """The objects with state among the leaves of all arguments; None where there are none."""
    return Objects(tuple(leaves[a][i][1] for a, i in owners)) if owners else None


def _places(kinds: Sequence[Any], wanted: str) -> tuple[int, ...]:
    """Which leaves are of a kind."""
    return tuple(i for i, kind in enumerate(kinds) if kind is wanted)


def _named(flat: Sequence[tuple[Any, Any]], kinds: Sequence[Any], wanted: str) -> list[tuple[str, Any]]:
    """(name, leaf) of the leaves of a result that are of a kind."""
    return [("out" + keystr(path), x) for (path, x), kind in zip(flat, kinds, strict=True) if kind is wanted]


def _call_result(named: Sequence[tuple[str, Any]], rest: Rest) -> CallResult:
    return CallResult(tuple(x for _, x in named), tuple(name for name, _ in named), rest)


def _objects_in(out: Any, carries: bool) -> list[Any]:
    return [x for _, x in flattened(out, carries)[0] if is_object(x)]


def without_fixed(out: Any) -> Any:
    """A result as a pytree of arrays and objects with state: itself, or a `CallResult` if it has other leaves, including Python
    numbers."""
    flat, tree = flattened(out, carries=True)
    kinds = tuple(_ARRAY if is_object(x) else _kind(x, numbers=False) for _, x in flat)
    if all(kind is _ARRAY for kind in kinds):
        return out
    return _call_result(_named(flat, kinds, _ARRAY), Rest(tree, kinds))


def with_fixed(out: Any) -> Any:
    """The inverse of `without_fixed`."""
    if not isinstance(out, CallResult):
        return out
    arrays = iter(out.arrays)
    return jax.tree.unflatten(out.rest.tree, [k[0] if isinstance(k, tuple) else next(arrays) for k in out.rest.leaves])


def fixed_difference(before: Any, after: Any) -> str | None:
    """The difference between two results apart from their arrays; None if there is none."""
    if not (isinstance(before, CallResult) and isinstance(after, CallResult)):
        return None
    old, new = before.rest, after.rest
    if old.tree != new.tree:
        return f"got a result of structure {new.tree}, needed the original's, {old.tree}"
    for b, a in zip(old.leaves, new.leaves, strict=True):
        if (isinstance(b, tuple) or isinstance(a, tuple)) and not _is_same(a, b):
            return f"got {_leaf_text(a)} in the result, needed the original's {_leaf_text(b)}"
    return None


def _leaf_text(leaf: Any) -> str:
    return f"{leaf[0]!r:.80}" if isinstance(leaf, tuple) else f"an {leaf}"


def _is_same(a: Any, b: Any) -> bool:
    """Whether two fixed leaves are the same: 1, 1.0 and True differ, and NaN equals itself."""
    return type(a) is type(b) and type(a[0]) is type(b[0]) and (repr(a) == repr(b) or a == b)


def is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def flattened(tree: Any, carries: bool = True) -> tuple[list, Any]:
    """(path, leaf) of a pytree, and its structure. Objects with state are leaves, except the Variables of an `nnx.State` that is not
    carried, which is a plain value to JAX."""
    within: set[int] = set()

    def is_leaf(x: Any) -> bool:
        if not carries and is_value(x):  # it is asked of before what is in it
            within.update(map(id, jax.tree.leaves(x, is_leaf=is_object)))
        return is_object(x) and id(x) not in within

    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)


def _kind(x: Any, numbers: bool) -> Any:
    if is_object(x):
        return OBJECT
    return _ARRAY if is_array(x, numbers) else (x,)
