"""The same program with every float in float64: the reference against which all errors are measured.

Running the user's function under x64 is not that reference: a bf16 layer keeps its casts, and random draws
differ. So the function is traced at the user's own dtypes, and that jaxpr is evaluated with every float widened
(`widen.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.errors import ArgumentError

from ..calls.binding import bind
from ..jax_compat import enable_x64, on_default_device, split_closed
from ..program.trace import users_code
from ..settings import jax_defaults, no_full_collections
from .by_operation import ByOperation
from .pieces import Program, in_pieces
from .stepwise import Room, Stepwise, Told
from .widen import Interpreter, Val, is_inexact, plain, wide_dtype

Cut = Callable[[Any, Sequence[Any]], Program]


def whole(jaxpr: Any, consts: Sequence[Any]) -> Program:
    """The program in one piece."""
    return in_pieces(jaxpr, math.inf, consts)


class Promoted:
    """A function and its gradients in float64; made by `promote`.

    Attributes:
      notes: sentences about what could not be promoted (opaque kernels keep their own dtype); filled by the first call.
      jaxpr: the program as traced at the user's dtypes.
      program: the same in pieces; `runs` of them make the outputs, `runs_of_gradients` the gradients.
      told: is called before each piece runs; what it raises ends the run.
    """

    def __init__(
        self,
        jaxpr: Any,
        in_tree: Any,
        out_tree: Any,
        bound: Callable,
        inline: Callable | None,
        cut: Cut,
        room: Room,
    ) -> None:
        self.jaxpr = jaxpr
        self._in_tree, self._out_tree, self._bound = in_tree, out_tree, bound
        self._interpreter = Interpreter(inline)
        base, self._consts = split_closed(jaxpr)
        self._in_avals = [v.aval for v in base.invars]
        self._out_avals = [v.aval for v in base.outvars]
        self.told: Told = lambda: None
        self.program = cut(jaxpr, self._consts)
        self._runs = Stepwise(self._interpreter, lambda: self.told(), room)

    def run_by_operation(self) -> None:
        """From now on `values` compiles nothing and runs each operation by itself; there are no gradients then."""
        self._interpreter = ByOperation(self._interpreter.inline)
        self._runs = Stepwise(self._interpreter, lambda: self.told(), compiles=False)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._interpreter.notes)

    @property
    def runs(self) -> int:
        return self.program.runs()

    @property
    def runs_of_gradients(self) -> int:
        return self.program.runs() + self.program.runs_back()

    def values(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs, in the function's own output structure: numpy float64; integers and bools as they are."""
        with jax_defaults(), enable_x64(True):
            flat = self._widened(args, kwargs)
            outs, _ = self._runs.forward(self.program, list(map(plain, flat)))
            return self._outputs(outs)

    def gradients(self, cotangent: Any, *args: Any, wrt: Sequence[int] | None = None, **kwargs: Any) -> Any:
        """The gradients of `values_and_gradients`, numpy float64."""
        return self.values_and_gradients(cotangent, *args, wrt=wrt, **kwargs)[1]

    def values_and_gradients(
        self, cotangent: Any, *args: Any, wrt: Sequence[int] | None = None, **kwargs: Any
    ) -> tuple[Any, Any]:
        """The outputs, and the vector-Jacobian product with `cotangent`, of one run forward and one back.

        Args:
          cotangent: one array per output leaf, in the output structure; those of integer outputs are not read.
          *args, **kwargs: as for the function.
          wrt: positions of the wanted leaves in the flattened (args, kwargs) without static ones; None: all floats.

        Returns:
          outputs: as of `values`.
          gradients: (of args, of kwargs), without static ones; numpy float64, None at leaves not in `wrt`.
        """
        wide, chosen = self._wanted(cotangent, wrt)
        with jax_defaults(), enable_x64(True):
            flat = self._widened(args, kwargs)
            values, found = self._run(flat, wide, chosen)
            grads = [
                None if i not in chosen else np.zeros(np.shape(x), x.dtype) if g is None else g
                for i, (x, g) in enumerate(zip(flat, found, strict=True))
            ]
        return values, jax.tree_util.tree_unflatten(self._in_tree, grads)

    def compile_ahead(self, threads: int, cotangent: Any = None, wrt: Sequence[int] | None = None) -> None:
        """Compiles what `values`, or with a cotangent `values_and_gradients`, will run, in so many threads side by side."""
        wide, chosen = self._wanted(cotangent, wrt) if cotangent is not None else ([], ())
        with jax_defaults(), enable_x64(True):
            flat = [jax.ShapeDtypeStruct(a.shape, wide_dtype(a.dtype)) for a in self._in_avals]
            if cotangent is None:
                self._runs.compile_ahead(
                    lambda vals: self._runs.forward(self.program, list(map(plain, vals)))[0], threads, flat
                )
            else:
                self._runs.compile_ahead(lambda vals: self._run(vals, wide, chosen), threads, flat)

    def _wanted(self, cotangent: Any, wrt: Sequence[int] | None) -> tuple[list[Any], tuple[int, ...]]:
        """The cotangents of outputs in their wide dtypes, None of integers; and the leaves to differentiate by."""
        cts = jax.tree_util.tree_leaves(cotangent)
        if len(cts) != len(self._out_avals):
            raise ArgumentError(
                f"cotangent: got {len(cts)} leaves, needed one per output leaf ({len(self._out_avals)})"
            )
        floats = [i for i, a in enumerate(self._in_avals) if jnp.issubdtype(a.dtype, np.floating)]
        with enable_x64(True):
            wide = [
                np.asarray(c).astype(wide_dtype(a.dtype)) if is_inexact(a.dtype) else None
                for c, a in zip(cts, self._out_avals, strict=True)
            ]
        return wide, tuple(floats if wrt is None else (i for i in floats if i in set(wrt)))

    def _run(self, flat: Sequence[Any], wide: Sequence[Any], chosen: Sequence[int]) -> tuple[Any, list[Any]]:
        active = [i in chosen for i in range(len(flat))]
        outs, tape = self._runs.forward(self.program, list(map(plain, flat)), taped=True)
        return self._outputs(outs), self._runs.pull(tape, wide, active)

    def _outputs(self, outs: Sequence[Val]) -> Any:
        return jax.tree_util.tree_unflatten(self._out_tree, [_readable(o.wide) for o in outs])

    def _widened(self, args: tuple, kwargs: dict) -> list:
        bound = self._bound(args, kwargs)
        flat, tree = jax.tree_util.tree_flatten((bound.args, bound.kwargs))
        if tree != self._in_tree:
            raise ArgumentError(
                f"arguments: got structure {tree}, needed the structure it was promoted for, {self._in_tree}"
            )
        on_device = [isinstance(x, jax.Array) and self._runs.room(8 * x.size) and on_default_device(x) for x in flat]
        return [_argument(*each) for each in zip(flat, self._in_avals, on_device, strict=True)]


def _argument(x: Any, aval: Any, on_device: bool) -> Any:
    """In its wide dtype; widened on the device or on the host."""
    if isinstance(x, jax.ShapeDtypeStruct):
        raise ArgumentError(f"arguments: got a shape ({x}), needed arrays, because the reference is run")
    if not is_inexact(aval.dtype):
        return x if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else np.asarray(x, aval.dtype)
    # Through the program's own dtype first: that is what the program sees of a Python float or a float64 array.
    return (x if on_device else np.asarray(x)).astype(aval.dtype).astype(wide_dtype(aval.dtype))


def _readable(x: Any) -> Any:
    key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if key else x if isinstance(x, jax.Array) else np.asarray(x)


def widened(closed: Any, inline: Callable[[Any], Callable | None] | None = None) -> Callable[..., list[Any]]:
    """A traced program as a function of its arrays that can be traced: every float as wide as JAX has them where it is traced.

    Args:
      inline: as of `promote`.
    """
    interpreter = Interpreter(inline)

    def run(*args: Any) -> list[Any]:
        inputs = [x.astype(wide_dtype(x.dtype)) if is_inexact(x.dtype) else x for x in map(jnp.asarray, args)]
        return [out.wide for out in interpreter.run(closed, map(plain, inputs))]

    return run


def promote(
    fn: Callable,
    *args: Any,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    inline: Callable[[Any], Callable | None] | None = None,
    cut: Cut = whole,
    room: Room = lambda size: False,
    traced: tuple[Any, Any] | None = None,
    **kwargs: Any,
) -> Promoted:
    """The same program with every float in float64.

    Args:
      fn: any function `jax.jit` accepts.
      *args, **kwargs: example arguments, arrays or `jax.ShapeDtypeStruct`s; their dtypes are the program's own.
      static_argnums, static_argnames: as in `jax.jit`.
      inline: equation -> a plain jnp function with the meaning of that equation, or None to bind it unchanged. For
        primitives with kernels instead of a meaning that JAX can read.
      cut: (a jaxpr, its constants) -> the program in pieces; all of it is one piece unless given.
      room: whether so many bytes more may stay on the device between pieces; all goes to the host unless given.
      traced: the function's jaxpr for these arguments and the tree of its outputs, where it was traced already.

    Returns:
      Promoted, whose `values` and `gradients` return numpy float64. The user's `jax_enable_x64` is not changed.

    Raises:
      TraceError: `fn` does not trace, or contains a primitive with an inner program that has no float64 form.
    """
    binding = functools.partial(bind, fn, static_argnums=static_argnums, static_argnames=static_argnames)
    with users_code(fn), no_full_collections():
        bound = binding(args, kwargs)
        jaxpr, out_shape = traced or jax.make_jaxpr(bound.fn, return_shape=True)(*bound.args, **bound.kwargs)
    in_tree = jax.tree_util.tree_structure((bound.args, bound.kwargs))
    return Promoted(jaxpr, in_tree, jax.tree_util.tree_structure(out_shape), binding, inline, cut, room)
