"""Constants of a program, computed in numpy as the program computes them: in its own dtypes, one equation after another.

Masks and positions use a few primitives for which numpy gives the same bits as XLA, and need no compilation. JAX computes an equation
for which numpy may give different bits (a transcendental function, a quotient of floats, numbers so small that a device flushes them to
zero).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from ..dtypes import is_float
from ..jax_compat import split_closed
from ..primitives import having
from ..program.trace import FLATTENED
from ..settings import on_one_device

_EXACT_POSITIONS = 1 << 24  # a larger whole number is rounded twice on its way to a narrow float


class _Unknown(Exception):  # noqa: N818 - an answer, not an error of the user's
    """Numpy may not give the same bits."""


def computed(closed: Any, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The one result of a closed jaxpr at these arrays, rounded after every equation to the program's dtypes."""
    jaxpr, consts = split_closed(closed)

    def run() -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(_run(jaxpr, consts, arrays)[0])

    return on_one_device(run)


def _run(jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars if consts else (), map(_plain, consts), strict=True))
    env.update(zip(jaxpr.invars, arrays, strict=True))

    def read(atom: Any) -> Any:
        aval: Any = atom.aval
        return np.asarray(atom.val, aval.dtype) if isinstance(atom, jex_core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _equation(eqn, [read(a) for a in eqn.invars], jaxpr.debug_info), strict=True))
    return [read(a) for a in jaxpr.outvars]


def _equation(eqn: Any, ins: list[Any], debug: Any) -> list[Any]:
    if eqn.primitive.name in FLATTENED:
        return _run(*split_closed(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))), ins)
    try:
        return [_in_numpy(eqn, ins)]
    except _Unknown:
        return _by_jax(eqn, ins, debug)


def _in_numpy(eqn: Any, ins: list[Any]) -> np.ndarray:
    name, rule = eqn.primitive.name, _RULES.get(eqn.primitive.name)
    if rule is None or not all(isinstance(x, np.ndarray) for x in ins):
        raise _Unknown
    result = rule(eqn, ins)
    aval: Any = eqn.outvars[0].aval
    if result.dtype != aval.dtype or result.shape != tuple(aval.shape):
        raise _Unknown
    if is_float(result.dtype) and name in _ROUNDING:
        _ordinary(result, *ins)
    return result


def _by_jax(eqn: Any, ins: list[Any], debug: Any) -> list[Any]:
    """The equation compiled alone: together with others, XLA may keep more digits than the dtypes between them have."""
    given = {v: x for v, x in zip(eqn.invars, ins, strict=True) if not isinstance(v, jex_core.Literal)}
    debug = debug._replace(arg_names=None, result_paths=None)
    alone = jex_core.Jaxpr([], list(given), list(eqn.outvars), [eqn], eqn.effects, debug_info=debug)
    return [*map(_plain, jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(alone, []))(*given.values()))]


def _plain(x: Any) -> Any:
    """An array as a numpy array; a random key unchanged."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x)


def _ordinary(*arrays: np.ndarray) -> None:
    """Raises _Unknown for a float so small that a device may flush it to zero, or for a NaN, whose bits are unspecified."""
    for a in arrays:
        if is_float(a.dtype):
            size = np.abs(a)
            if np.isnan(size).any() or ((size < jnp.finfo(a.dtype).tiny) & (size != 0)).any():
                raise _Unknown


def _of(fn: Callable[..., Any]) -> Callable[[Any, list[np.ndarray]], np.ndarray]:
    return lambda eqn, ins: np.asarray(fn(*ins))


def _convert(eqn: Any, ins: list[np.ndarray]) -> np.ndarray:
    (x,), dtype = ins, np.dtype(eqn.params["new_dtype"])
    if is_float(x.dtype) and not is_float(dtype):
        # JAX casts to bool by comparing with 0: NaN is True.
        if dtype.kind == "b":
            return x != 0
        # The cast of NaN, an infinity or a float that is out of range is undefined in C, which is numpy's.
        if dtype.kind not in "iu" or not np.isfinite(x).all() or (np.abs(x.astype(np.float64)) >= 1 << 31).any():
            raise _Unknown
        # Of what does not fit numpy and XLA think apart.
        if dtype.itemsize < 4 or (dtype.kind == "u" and (x < 0).any()):
            raise _Unknown
    elif is_float(dtype) and x.dtype.kind in "iu" and x.size and max(int(x.max()), -int(x.min())) > _EXACT_POSITIONS:
        raise _Unknown
    return x.astype(dtype)


def _iota(eqn: Any, ins: list[np.ndarray]) -> np.ndarray:
    shape, axis, kind = eqn.params["shape"], int(eqn.params["dimension"]), np.dtype(eqn.params["dtype"])
    most = _EXACT_POSITIONS if is_float(kind) else np.iinfo(kind).max
    if shape[axis] > most:
        raise _Unknown
    line = np.arange(shape[axis]).astype(kind).reshape([-1 if d == axis else 1 for d in range(len(shape))])
    return np.broadcast_to(line, shape)


def _broadcast_in_dim(eqn: Any, ins: list[np.ndarray]) -> np.ndarray:
    shape = eqn.params["shape"]
    line = [1] * len(shape)
    for d, n in zip(eqn.params["broadcast_dimensions"], ins[0].shape, strict=True):
        line[int(d)] = n
    return np.broadcast_to(ins[0].reshape(line), shape)


def _slice(eqn: Any, ins: list[np.ndarray]) -> np.ndarray:
    p = eqn.params
    steps = p["strides"] or (1,) * ins[0].ndim
    return ins[0][tuple(map(slice, p["start_indices"], p["limit_indices"], steps))]


def _whole_division(fn: Callable[..., Any]) -> Callable[[Any, list[np.ndarray]], np.ndarray]:
    def rule(eqn: Any, ins: list[np.ndarray]) -> np.ndarray:
        a, b = ins
        if a.dtype.kind not in "iu" or (b == 0).any() or (a.dtype.kind == "i" and (a == np.iinfo(a.dtype).min).any()):
            raise _Unknown
        return np.asarray(fn(a, b))

    return rule


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a - np.fmod(a, b)) // b


def _select(eqn: Any, ins: list[np.ndarray]) -> np.ndarray:
    which, *cases = ins
    if which.dtype.kind != "b":
        raise _Unknown
    return np.where(which, cases[1], cases[0])


def _reduce(fn: Callable[..., Any]) -> Callable[[Any, list[np.ndarray]], np.ndarray]:
    def rule(eqn: Any, ins: list[np.ndarray]) -> np.ndarray:
        axes = tuple(int(a) for a in eqn.params["axes"])
        if any(ins[0].shape[a] == 0 for a in axes):
            raise _Unknown
        return np.asarray(fn(ins[0], axis=axes))

    return rule


# Whose results are rounded, or hang on the sign of zero or on what a NaN looks like.
_ROUNDING = having("difference", "cast", "extreme") | frozenset("add mul reduce_max reduce_min".split())
_RULES: dict[str, Callable[[Any, list[np.ndarray]], np.ndarray]] = {
    "add": _of(np.add), "sub": _of(np.subtract), "mul": _of(np.multiply), "neg": _of(np.negative), "max": _of(np.maximum),
    "min": _of(np.minimum), "eq": _of(np.equal), "ne": _of(np.not_equal), "lt": _of(np.less), "le": _of(np.less_equal),
    "gt": _of(np.greater), "ge": _of(np.greater_equal), "and": _of(np.bitwise_and), "or": _of(np.bitwise_or),
    "xor": _of(np.bitwise_xor), "not": _of(np.invert), "copy": _of(lambda x: x), "stop_gradient": _of(lambda x: x),
    "abs": _of(np.abs), "rem": _whole_division(np.fmod), "div": _whole_division(_quotient),
    "reduce_and": _reduce(np.all), "reduce_or": _reduce(np.any), "reduce_max": _reduce(np.max), "reduce_min": _reduce(np.min),
    "convert_element_type": _convert, "iota": _iota, "broadcast_in_dim": _broadcast_in_dim, "slice": _slice,
    "select_n": _select,
    "reshape": lambda eqn, ins: np.transpose(ins[0], eqn.params["dimensions"]).reshape(eqn.params["new_sizes"])
    if eqn.params["dimensions"] is not None
    else ins[0].reshape(eqn.params["new_sizes"]),
    "squeeze": lambda eqn, ins: ins[0].reshape(eqn.outvars[0].aval.shape),
    "expand_dims": lambda eqn, ins: ins[0].reshape(eqn.outvars[0].aval.shape),
    "transpose": lambda eqn, ins: np.transpose(ins[0], eqn.params["permutation"]),
    "concatenate": lambda eqn, ins: np.concatenate(ins, int(eqn.params["dimension"])),
    "stack": lambda eqn, ins: np.stack(ins, int(eqn.params["axis"])),
    "tile": lambda eqn, ins: np.tile(ins[0], eqn.params["reps"]),
    "rev": lambda eqn, ins: np.flip(ins[0], tuple(map(int, eqn.params["dimensions"]))),
}  # fmt: skip
