"""A function under a jit that holds non-array leaves of its arguments fixed, as `equinox.filter_jit` does."""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from ..errors import ArgumentError
from ..graph.calls.binding import as_tuple, label_of, positional_names, unhashable
from ..graph.calls.parts import is_array, with_fixed, without_fixed
from ..graph.calls.state import is_object


class MayChange(ArgumentError):  # noqa: N818 - an argument does
    """A fixed leaf that may be a different object at the next call although it compares equal to itself."""


class Filtered:
    """`fn` under `under`, which is `jax.jit` or `nnx.jit`, with non-array leaves held fixed.

    Args:
      static: arguments that are fixed as a whole, as keyword arguments of `jax.jit`.
      objects: whether `under` takes nnx objects, which are then not pytrees.
      numbers: whether Python numbers are fixed where nothing else is.
    """

    def __init__(
        self, fn: Callable, static: Mapping[str, Any], under: Callable, objects: bool, numbers: bool = False
    ) -> None:
        self._fn, self._is_leaf, self._numbers = fn, is_object if objects else None, numbers
        names, _ = positional_names(fn)
        nums = {n % max(len(names), 1) for n in as_tuple(static.get("static_argnums", ()))}
        self._names = {*as_tuple(static.get("static_argnames", ())), *(names[n] for n in nums if n < len(names))}
        self._nums = nums | {i for i, name in enumerate(names) if name in self._names}
        self._jitted = under(self._with_fixed, static_argnums=0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return with_fixed(self._jitted(*self._split(args, kwargs)))

    def lower(self, *args: Any, **kwargs: Any) -> _Staged:
        return _Staged(self, self._jitted.lower(*self._split(args, kwargs)))

    def trace(self, *args: Any, **kwargs: Any) -> _Staged:
        return _Staged(self, self._jitted.trace(*self._split(args, kwargs)))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return with_fixed(self._jitted.eval_shape(*self._split(args, kwargs)))

    def _split(self, args: tuple, kwargs: dict) -> tuple[_Fixed, list[Any]]:
        if self._nums or self._names:
            args, kwargs = self._with_whole(args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=self._is_leaf)
        kinds = [_ARRAY if type(x) in _ARRAYS else _kind_of(x) for x in leaves]
        if _OTHER in kinds:
            self._check(leaves, kinds, args, kwargs)
        moving = self._moving(kinds)
        keys = tuple(_ARRAY if m else _key(x) for m, x in zip(moving, leaves, strict=True))
        fixed = _Fixed(tree, keys, tuple(itertools.compress(leaves, map(operator.not_, moving))))
        try:
            hash(fixed)
        except TypeError:
            raise unhashable(self._fn, args, kwargs) from None
        return fixed, list(itertools.compress(leaves, moving))

    def _with_whole(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments, those that are fixed as a whole marked."""
        marked = tuple(_Whole(a) if i in self._nums else a for i, a in enumerate(args))
        return marked, {key: _Whole(a) if key in self._names else a for key, a in kwargs.items()}

    def _moving(self, kinds: list[str]) -> list[bool]:
        """Of leaves of these kinds, which are arrays of the call; the rest is fixed."""
        # Numbers are fixed beside what has to be, as filter_jit has it; alone they are arrays, as jax.jit has it.
        others = self._numbers or _OTHER in kinds
        return [kind is _ARRAY or (kind is _NUMBER and not others) for kind in kinds]

    def _check(self, leaves: list[Any], kinds: list[str], args: tuple, kwargs: dict) -> None:
        """Raises MayChange for a leaf that is to be fixed and may be another at the next call."""
        for kind, x in zip(kinds, leaves, strict=True):
            if kind is _OTHER and _may_change(x):
                raise self._may_change(x, args, kwargs)

    def _with_fixed(self, fixed: _Fixed, arrays: list[Any]) -> Any:
        given, held = iter(arrays), iter(fixed.values)
        leaves = [next(given) if key is _ARRAY else next(held) for key in fixed.keys]
        args, kwargs = jax.tree.unflatten(fixed.tree, leaves)
        args, kwargs = map(_bare, args), {key: _bare(a) for key, a in kwargs.items()}
        return without_fixed(self._fn(*args, **kwargs))

    def _may_change(self, x: Any, args: tuple, kwargs: dict) -> MayChange:
        labels = (*(label_of(self._fn, i) for i in range(len(args))), *kwargs)
        path = next(
            label + jax.tree_util.keystr(path)
            for label, arg in zip(labels, (*args, *kwargs.values()), strict=True)
            for path, leaf in jax.tree_util.tree_flatten_with_path(arg, is_leaf=is_object)[0]
            if leaf is x
        )
        method = getattr(self._fn, "__name__", "")
        own = f"; for a method, fuse that of the object (model.{method})" if hasattr(type(x), method) else ""
        return MayChange(
            f"{path}: got a {type(x).__name__}, which is neither an array nor a pytree and whose attributes may change from call to "
            f"call; needed a pytree (jax.tree_util.register_dataclass), a value compared by its contents (a frozen dataclass), "
            f"or static_argnames, which holds it fixed{own}"
        )


@dataclass(frozen=True)
class _Fixed:
    """The non-array leaves in the arguments of a call.

    Attributes:
      tree: their structure; keys: of each leaf, `_ARRAY` or the key of its value; values: of each leaf that is fixed.
    """

    tree: Any
    keys: tuple[Any, ...]
    values: tuple[Any, ...] = field(compare=False)


@dataclass(frozen=True)
class _Whole:
    """An argument that is fixed as a whole: no pytree."""

    value: Any


def _bare(arg: Any) -> Any:
    return arg.value if isinstance(arg, _Whole) else arg


def _key(x: Any) -> Any:
    """By its type as well: 1, 1.0 and True are equal, and make other programs; 0.0 and -0.0 too; NaN is not even equal to itself."""
    x = _bare(x)
    return type(x), repr(x) if isinstance(x, float | complex) else x


_FUNCTIONS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
)


@functools.cache
def _is_compared_by_identity(kind: type) -> bool:
    return kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__ and not issubclass(kind, _FUNCTIONS)


def _may_change(x: Any) -> bool:
    """Whether a leaf is an ordinary object with attributes, compared by identity alone."""
    ordinary = _is_compared_by_identity(type(x)) and bool(getattr(x, "__dict__", None))
    return ordinary and not hasattr(x, "__wrapped__")


_ARRAY, _NUMBER, _OTHER = "array", "number", "other"
_ARRAYS: set[type] = set()  # the classes all of whose objects are arrays, as they come


def _kind_of(x: Any) -> str:
    if is_object(x):
        return _ARRAY
    if is_array(x, numbers=False):
        if isinstance(x, jax.Array):
            _ARRAYS.add(type(x))
        return _ARRAY
    return _NUMBER if is_array(x) else _OTHER


class _Staged:
    """The result of `lower` or `trace`, or of its `compile`: called with the original arguments."""

    def __init__(self, filtered: Filtered, stage: Any) -> None:
        self._filtered, self._stage = filtered, stage

    def lower(self, *args: Any, **kwargs: Any) -> _Staged:
        return _Staged(self._filtered, self._stage.lower(*args, **kwargs))

    def compile(self, *args: Any, **kwargs: Any) -> _Staged:
        return _Staged(self._filtered, self._stage.compile(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _, arrays = self._filtered._split(args, kwargs)
        return with_fixed(self._stage(arrays))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)
