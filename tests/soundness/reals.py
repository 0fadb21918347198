"""Programs as functions of real numbers: values and gradients by the float64 interpreter, without compiling. Not a test module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from fusionlab.graph.certify.verdict import relative_error
from fusionlab.graph.dtypes import is_float
from fusionlab.graph.interpret.evaluate import evaluate, floats_to_float64
from fusionlab.graph.jax_compat import scan_counts
from fusionlab.kernels import meaning_of


def values_and_gradients(fn: Callable[..., Any], args: Sequence[np.ndarray], seed: int = 0) -> list[np.ndarray]:
    """The results of `fn` and the gradients of its float arguments, for random cotangents, in float64.

    Args:
      fn: arrays -> any tree of arrays.
      args: numpy arrays of the dtypes that `fn` is traced at.
      seed: of the cotangents.

    Raises:
      CannotEvaluate: `fn` holds a primitive that the interpreter does not know.
    """
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    outs = [o for o in jax.tree.leaves(jax.eval_shape(fn, *avals)) if is_float(o.dtype)]
    rng = np.random.default_rng(seed)
    cotangents = [rng.normal(size=o.shape) for o in outs]
    closed = jax.make_jaxpr(partial(_joint, fn))(avals, outs)
    return evaluate(closed, [*map(floats_to_float64, args), *cotangents], None, meaning)


def _joint(fn: Callable[..., Any], args: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    floats = [i for i, a in enumerate(args) if is_float(a.dtype)]

    def of_floats(*xs: Any) -> tuple[list[Any], list[Any]]:
        full = list(args)
        for i, x in zip(floats, xs, strict=True):
            full[i] = x
        leaves = jax.tree.leaves(fn(*full))
        return [y for y in leaves if is_float(y.dtype)], [y for y in leaves if not is_float(y.dtype)]

    value, pull, rest = jax.vjp(of_floats, *(args[i] for i in floats), has_aux=True)
    return [*value, *rest, *pull(list(cotangents))]


def meaning(eqn: Any) -> Callable[..., Any] | None:
    """As `meaning_of`, and a scan as its steps one after the other."""
    return partial(_steps, eqn.params) if eqn.primitive.name == "scan" else meaning_of(eqn)


def _steps(params: dict[str, Any], *operands: Any) -> list[Any]:
    fixed, carried = scan_counts(params)
    consts, carry, xs = operands[:fixed], operands[fixed : fixed + carried], operands[fixed + carried :]
    body, length = jex_core.jaxpr_as_fun(params["jaxpr"]), params["length"]
    stacked: list[Any] = []
    for i in reversed(range(length)) if params["reverse"] else range(length):
        made = body(*consts, *carry, *(lax.index_in_dim(x, i, keepdims=False) for x in xs))
        carry, rows = made[:carried], made[carried:]
        stacked = stacked or [jnp.zeros((length, *y.shape), y.dtype) for y in rows]
        stacked = [_with_row(total, i, y) for total, y in zip(stacked, rows, strict=True)]
    return [*carry, *stacked]


def _with_row(total: Any, i: int, row: Any) -> Any:
    """`total` with row `i` set, by a selection: what the other rows hold, infinities too, does not matter."""
    here = lax.broadcasted_iota(np.int32, total.shape, 0) == i
    return jnp.where(here, row[None], total)


def differences(want: Sequence[np.ndarray], got: Sequence[np.ndarray], tolerance: float) -> list[str]:
    """Which results and gradients differ by more than `tolerance`, relative to the largest value; [] where none does."""
    if len(want) != len(got):
        return [f"{len(got)} arrays where {len(want)} were wanted"]
    errors = [relative_error(a, b) for a, b in zip(want, got, strict=True)]
    return [f"array {i} differs by {e:.2g}" for i, e in enumerate(errors) if not e <= tolerance]
