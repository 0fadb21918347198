"""A call as JAX sees it: its arrays, the fixed rest of its arguments, and the state that the function changes in place.

Two kinds of arguments are not arrays. Values that are neither arrays nor numbers (a string, a function, an object that is not a pytree)
are fixed, as in `equinox.filter_jit`. And the objects of flax's nnx (Modules, Optimizers, Rngs, Variables) hold arrays that the function
may replace: `state.py` takes them apart before the call and puts them together inside it, as `nnx.jit` does, and returns their final
arrays among the results.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from ...errors import ArgumentError
from ..settings import as_function
from .parts import CallParts, CallResult, LostValue, Rest, flattened, is_array, is_hashable, keystr
from .passed import passed_through
from .state import may_be_there
from .wrappers import Jit, jit_of, unwrapped


@dataclass(frozen=True, eq=False)
class Bound:
    """A function at its arguments, with the fixed ones bound to it.

    Attributes:
      fn: function of the arrays, `args` and `kwargs`. It returns the user's result if that consists only of arrays, else a `CallResult`.
      args, kwargs: pytrees of arrays.
      positions: for each of `args`, its position in the call the user wrote, which had `total` positional arguments.
      leaf_names: a name for each leaf of (args, kwargs): "params['w1']".
      changed: the names of the values that the function changes in place; () for a function without state.
      lost: those of them not also in the result, which a transformation that takes objects as pytrees would lose.
      finish: the result of `fn` -> the user's result; it also makes the in-place changes of arguments.
      jit: the jit that the function was passed under, or None.
      given: the number of arguments before the user's: those of a bound method, or of a `functools.partial`.
    """

    fn: Callable
    args: tuple
    kwargs: dict
    positions: tuple[int, ...]
    total: int
    leaf_names: tuple[str, ...]
    changed: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    finish: Callable[[Any], Any] = field(default=lambda out: out, repr=False)
    jit: Jit | None = None
    given: int = 0

    def dynamic(self, argnums: Iterable[int], keyword: str) -> tuple[int, ...]:
        """Positions in the user's call -> positions in `args`.

        Raises:
          ArgumentError: one of them does not exist or is static.
        """
        wanted = tuple(n + self.total if n < 0 else n for n in argnums)
        for n in wanted:
            if n not in self.positions:
                raise ArgumentError(f"{keyword}: got {n}, needed the position of an array argument, {self.positions}")
        return tuple(self.positions.index(n) for n in wanted)

    def leaves_of(self, positions: Iterable[int]) -> tuple[int, ...]:
        """The flat leaf positions of the arguments at these positions in `args`."""
        sizes = [len(jax.tree.leaves(a)) for a in self.args]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
        return tuple(i for p in positions for i in range(starts[p], starts[p + 1]))

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions in `args` that the jit around the function donates."""
        if self.jit is None:
            return ()
        donated = self.jit.donated(self.total + self.given)
        return tuple(i for i, p in enumerate(self.positions) if p + self.given in donated)


def bind(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    static_argnums: Any = (),
    static_argnames: Any = (),
    numbers: bool | None = None,
    carries: bool = False,
) -> Bound:
    """Binds the fixed parts: static arguments, leaves that are not arrays, the structure of objects that hold state.

    Args:
      fn: the function; a jitted one is taken out of its jit, whose static arguments apply.
      args, kwargs: arrays or `jax.ShapeDtypeStruct`s in any pytrees, and fixed values.
      static_argnums, static_argnames: as in `jax.jit`.
      numbers: whether Python numbers are arrays; None: as in `jax.jit`, or as in `filter_jit` if another leaf is not an array.
      carries: whether Variables of an `nnx.State` are changed in place, as under `nnx.jit`; otherwise the function must return them.

    Raises:
      ArgumentError: `fn` is not a function, a static argument does not exist, or `jax.jit` would lose in-place changes of the function.
        If arguments hold state, the function is traced here, and its own errors propagate.
    """
    if not callable(fn):
        raise ArgumentError(f"fn: got {type(fn).__name__}, needed a function that takes and returns arrays")
    fn, head, more = unwrapped(fn)
    given, total, args, kwargs = len(head), len(args), (*head, *args), {**more, **kwargs}
    static_argnums = tuple(n + given if n >= 0 else n for n in as_tuple(static_argnums))
    jit = jit_of(fn)
    # `filter_jit` fixes Python numbers; `nnx.jit` carries what is changed in a state back to the caller.
    if jit is not None:
        static_argnums = (*static_argnums, *jit.static_argnums)
        static_argnames = (*as_tuple(static_argnames), *jit.static_argnames)
        numbers, carries = False if jit.kind == "filter_jit" else numbers, carries or jit.kind == "nnx.jit"
    # A jit that places its arguments says something: it stays in the program.
    inside = fn if jit is None else jit.placed or jit.fn
    call, dyn_args, dyn_kwargs, positions = _without_static(inside, args, kwargs, static_argnums, static_argnames)
    labels = (*(label_of(inside, p) for p in positions), *sorted(dyn_kwargs))
    parts = CallParts.of(call, dyn_args, dyn_kwargs, labels, numbers, carries)
    if parts.objects is not None and jit is not None and jit.placed:  # which would lose what it changes in them
        call, *_ = _without_static(jit.fn, args, kwargs, static_argnums, static_argnames)
        parts = replace(parts, fn=call)
    fields = {"positions": tuple(p - given for p in positions), "total": total, "jit": jit, "given": given}
    if parts.objects is not None:
        bound = _with_state(parts, len(dyn_args), fields)
        # Both take an object as a pytree: what is changed in it inside is not seen outside.
        if bound.lost and jit is not None and jit.kind in ("jax.jit", "filter_jit"):
            raise lost_by(_FULL_NAMES[jit.kind], inside, bound.lost[0])
        return bound
    if parts.are_arrays and not may_be_there():
        return Bound(call, dyn_args, dyn_kwargs, leaf_names=parts.names, **fields)
    new_args, new_kwargs = (dyn_args, dyn_kwargs) if parts.are_arrays else parts.arguments(len(dyn_args))
    return Bound(_run_of(parts), new_args, new_kwargs, leaf_names=parts.names, finish=parts.finish, **fields)


_FULL_NAMES = {"jax.jit": "jax.jit", "filter_jit": "equinox.filter_jit"}


def _run_of(parts: CallParts) -> Callable:
    @functools.wraps(parts.fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return parts.run(*args, **kwargs)
        except LostValue as lost:
            name = getattr(parts.fn, "__name__", type(parts.fn).__name__)
            raise ArgumentError(
                f"{name}: changes {lost.args[0]} of an nnx.State in place and does not return it, so its new value would be "
                f"lost; needed the state among the results, or the module itself under nnx.jit"
            ) from None

    return run


def lost_by(transformation: str, fn: Callable, value: str) -> ArgumentError:
    """The error for state that a transformation of JAX does not carry."""
    name = getattr(fn, "__name__", type(fn).__name__)
    return ArgumentError(
        f"{name}: got it under {transformation}, which loses in-place changes: {value} would keep its old value; needed nnx's own "
        f"transformation, such as nnx.jit({name}), or a function that takes and returns the state (nnx.split, nnx.merge)"
    )


def _with_state(parts: CallParts, width: int, fields: dict[str, Any]) -> Bound:
    """The call traced once, so that only the values that the function changes are among its results."""
    args, kwargs = parts.arguments(width)
    closed, shape = jax.make_jaxpr(_run_of(parts), return_shape=True)(*args, **kwargs)
    rest: Rest = shape.rest
    left = rest.left
    assert left is not None
    first = len(shape.arrays) - len(left.names)
    given, origin = {name: i for i, name in parts.state_inputs}, passed_through(closed)[first:]
    new = [
        i
        for i, (side, owner, path) in enumerate(left.names)
        if side or origin[i] is None or origin[i] != given.get((owner, path))
    ]
    kept = (*range(first), *(first + i for i in new))
    leaf_names = tuple(shape.leaf_names[i] for i in kept)
    rest = replace(rest, new=tuple(new))

    def fn(*args: Any, **kwargs: Any) -> CallResult:
        leaves = jax.tree.leaves((args, kwargs))
        if list(map(_shape, leaves)) == [_shape(v.aval) for v in closed.jaxpr.invars]:
            outs = as_function(closed)(*leaves)
        else:  # symbolic sizes, at numbers
            outs = _run_of(parts)(*args, **kwargs).arrays
        return CallResult(tuple(outs[i] for i in kept), leaf_names, rest)

    fn.__name__ = fn.__qualname__ = getattr(parts.fn, "__name__", "fn")
    mine = [i for i in new if not left.names[i][0]]
    changed = tuple(shape.leaf_names[first + i] for i in mine)
    lost = tuple(shape.leaf_names[first + i] for i in mine if left.names[i][1:] not in left.returned)
    if left.restructured and not changed:
        changed = lost = (f"what {parts.labels[parts.owners[0][0]]} is made of",)
    fields |= {"changed": changed, "lost": lost, "finish": parts.finish}
    return Bound(fn, args, kwargs, leaf_names=parts.names, **fields)


def _shape(x: Any) -> Any:
    """An object of the user's that JAX takes as it is (hijax) has none."""
    return getattr(x, "shape", None)


def unhashable(fn: Callable, args: tuple, kwargs: dict) -> ArgumentError:
    """The error for fixed leaves that cannot be compared from call to call."""
    for i, arg in enumerate((*args, *(kwargs[key] for key in sorted(kwargs)))):
        label = label_of(fn, i) if i < len(args) else sorted(kwargs)[i - len(args)]
        for path, leaf in flattened(arg)[0]:
            if not is_array(leaf, numbers=False) and not is_hashable(leaf):
                leaf_text = f"{label}{keystr(path)}: got {leaf!r:.80} ({type(leaf).__name__})"
                return ArgumentError(
                    f"{leaf_text}, which is neither an array nor hashable; needed one of them, or a pytree of them"
                )
    return ArgumentError(
        f"{getattr(fn, '__name__', 'fn')}: got arguments whose pytrees have an unhashable part other than a leaf"
    )


def as_tuple(given: Any) -> tuple:
    """One position or name, or several, as a tuple."""
    return (given,) if isinstance(given, int | str) else tuple(given)


def label_of(fn: Callable, position: int) -> str:
    names, _ = positional_names(fn)
    return names[position] if position < len(names) else f"arg{position}"


def positional_names(fn: Callable) -> tuple[list[str], bool]:
    """Names of the positional parameters, and whether there may be more of them than names."""
    try:
        params = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return [], True
    names = [p.name for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names, any(p.kind is p.VAR_POSITIONAL for p in params)


def _without_static(
    fn: Callable, args: tuple, kwargs: dict, static_argnums: Any, static_argnames: Any
) -> tuple[Callable, tuple, dict, tuple[int, ...]]:
    """Splits off static arguments: (function of the dynamic ones, dynamic args, dynamic kwargs, the positions of those args)."""
    nums, names = as_tuple(static_argnums), set(as_tuple(static_argnames))
    positional, variadic = positional_names(fn)
    # As `jax.jit` has it: a position may be negative, counted from the end, and `*args` takes any.
    for n in nums:
        if not variadic and not -len(positional) <= n < len(positional):
            raise ArgumentError(
                f"static_argnums: got {n}, needed an index into the {len(positional)} positional parameters"
            )
    width = len(args) if variadic else len(positional)
    places = {n % max(width, 1) for n in nums} | {i for i, name in enumerate(positional) if name in names}
    names |= {positional[i] for i in places if i < len(positional)}
    static = {i: args[i] for i in places if i < len(args)}
    static_kw = {k: v for k, v in kwargs.items() if k in names}
    positions = tuple(i for i in range(len(args)) if i not in static)
    if not static and not static_kw:
        return fn, args, kwargs, positions

    @functools.wraps(fn)
    def call(*dyn: Any, **kw: Any) -> Any:
        rest = iter(dyn)
        full = [static[i] if i in static else next(rest) for i in range(len(args))]
        return fn(*full, **static_kw, **kw)

    return call, tuple(args[i] for i in positions), {k: v for k, v in kwargs.items() if k not in static_kw}, positions
