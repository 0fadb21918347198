"""Common handling of operands: conversion, batch axes, dtypes, precision, shardings."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from ...device import Device
from ...errors import ArgumentError, unknown_name
from ...graph.dtypes import arithmetic_dtype
from ...graph.program.explicit_axes import is_split_in_type, sharding_in_type

Array = Any
Named = Mapping[str, Any]  # by the name of an operand, a result or a residual: arrays, shapes with dtypes, shardings


def batch_size(values: list[Array], dims: list[int | None]) -> int:
    """How many there are in the batch; at least one value is batched."""
    return next(v.shape[d] for v, d in zip(values, dims, strict=True) if d is not None)


def batch_to_front(values: list[Array], dims: list[int | None], size: int | None = None) -> list[Array]:
    """Every value with its batch axis first; unbatched ones are broadcast, to `size` where it cannot be read off the others."""
    size = batch_size(values, dims) if size is None else size
    return [
        jnp.broadcast_to(v, (size, *v.shape)) if d is None else jnp.moveaxis(v, d, 0)
        for v, d in zip(values, dims, strict=True)
    ]


def wide(a: Array) -> Array:
    """In the dtype of the arithmetic."""
    return a.astype(arithmetic_dtype(a.dtype))


def for_product(a: Array, b: Array, dtype: Any, device: Device | None) -> tuple[Array, Array]:
    """Two operands as they are multiplied, the result in `dtype`: on a CPU bfloat16 ones of a float32 product are widened first.

    XLA's CPU backend has no such product for every layout of a batch: some compile, and raise when they run. The numbers are the same,
    since products of bfloat16 are exact in float32.
    """
    on_a_cpu = device is not None and device.platform == "cpu"
    if on_a_cpu and jnp.dtype(dtype) == jnp.float32 and a.dtype == b.dtype == jnp.bfloat16:
        return a.astype(dtype), b.astype(dtype)
    return a, b


def canonical_precision(precision: Any) -> Any:
    """The `precision` parameter `lax.dot_general` would carry here: a default set around the call is not lost."""
    default = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if precision is None and default is None:
        return None
    scalar = jax.ShapeDtypeStruct((1, 1), np.float32)
    traced = jax.make_jaxpr(lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=precision))(
        scalar, scalar
    )
    return traced.jaxpr.eqns[0].params["precision"]


def precisions(precision: Any) -> tuple[Any, ...]:
    """The values in a product's `precision`, one for each operand or one for both; empty for None."""
    if precision is None:
        return ()
    return precision if isinstance(precision, tuple) else (precision,)


def names_algorithm(precision: Any) -> bool:
    """Whether it asks for a dot algorithm by name (`DotAlgorithmPreset`, say), for one operand or for both."""
    return any(p is not None and not isinstance(p, lax.Precision) for p in precisions(precision))


def is_default(precision: Any) -> bool:
    """Whether a product uses the default precision, as `None` does."""
    return all(p in (None, lax.Precision.DEFAULT) for p in precisions(precision))


FLOATS = ("float32", "bfloat16", "float16", "float64")  # what every op takes


def check_dtypes(op: str, shapes: Mapping[str, Any], allowed: tuple[str, ...] = FLOATS) -> None:
    """Every operand has the first one's dtype, and it is one of `allowed` (numpy names).

    Raises:
      ArgumentError: names the operand, its dtype and the allowed ones.
    """
    first, dtype = next((slot, np.dtype(v.dtype)) for slot, v in shapes.items())
    if dtype.name not in allowed:
        raise ArgumentError(f"{op}: {first} has dtype {dtype.name}, needed one of {', '.join(allowed)}")
    for slot, v in shapes.items():
        if np.dtype(v.dtype) != dtype:
            raise ArgumentError(
                f"{op}: {slot} has dtype {np.dtype(v.dtype).name} but {first} has {dtype.name}; "
                f"operands must agree: cast one with .astype"
            )


def as_arrays(slots: tuple[str, ...], operands: Sequence[Any]) -> list[Array]:
    """Operands as JAX arrays, None staying None.

    Raises:
      ArgumentError: an operand is not an array; names it.
    """
    if len(operands) > len(slots):
        raise ArgumentError(f"got {len(operands)} operands, needed at most {len(slots)}: {', '.join(slots)}")
    arrays = []
    for slot, a in zip(slots, operands, strict=False):
        if isinstance(a, jax.ShapeDtypeStruct):
            raise ArgumentError(
                f"{slot}: got {a}, a shape without values; needed an array (jax.eval_shape takes shapes)"
            )
        try:
            arrays.append(None if a is None else jnp.asarray(a))
        except TypeError as e:
            raise ArgumentError(f"{slot}: got {type(a).__name__}, needed an array") from e
    return arrays


def explicit_sharding(value: Any) -> Any:
    """The sharding that is part of the value's type: None unless the mesh has explicit axes."""
    return sharding_in_type(jax.typeof(value))


def is_explicitly_sharded(value: Any) -> bool:
    """Whether an axis of an array, or of a shape, is sharded over an explicit mesh axis."""
    return is_split_in_type(jax.typeof(value) if isinstance(value, jax.Array) else value)


def refuses_shardings(shapes: Mapping[str, Any], why: str = ": needed plain shardings or a shard_map") -> str | None:
    """Why an implementation that has no rule for explicit mesh axes cannot take these operands, or None."""
    sharded = any(is_explicitly_sharded(a) for a in shapes.values())
    return f"operands sharded over explicit mesh axes{why}" if sharded else None


def refuses_dtypes(shapes: Mapping[str, Any], taken: Sequence[str]) -> str | None:
    """Why kernels of these dtypes (numpy names) cannot take these operands, or None."""
    for slot, a in shapes.items():
        if (name := np.dtype(a.dtype).name) not in taken:
            return f"{slot} is {name}, the kernels take {', '.join(taken)}"
    return None


def first_given(shapes: Mapping[str, Any], *names: str) -> Any:
    """The first of these that is present; None if all are missing."""
    return next((a for name in names if (a := shapes.get(name)) is not None), None)


def check_name(what: str, name: Any, known: Collection[str]) -> None:
    """Raises UnknownNameError unless the name is known; `what` is its kind."""
    if not isinstance(name, str) or name not in known:
        raise unknown_name(what, name, known)


def check_given(op: str, given: Mapping[str, Any], slots: Sequence[str]) -> None:
    """Raises ArgumentError, which names the slot, unless each of the slots is given."""
    for slot in slots:
        if slot not in given:
            raise ArgumentError(f"{op}: {slot} is missing, needed an array")


def check_product_ranks(op: str, x: Any, **weights: Any) -> None:
    """Raises ArgumentError, which names the operand, unless x has rank 2 or more and each of the weights is a matrix."""
    if len(x.shape) < 2:
        raise ArgumentError(
            f"{op}: x has shape {tuple(x.shape)}, rank {len(x.shape)}; needed rank 2 or more: add a row axis, x[None]"
        )
    for slot, w in weights.items():
        if len(w.shape) != 2:
            raise ArgumentError(
                f"{op}: {slot} has shape {tuple(w.shape)}, rank {len(w.shape)}; needed a matrix, rank 2: reshape it"
            )


def whole_number(op: str, name: str, value: Any, needed: str = "a whole number") -> int:
    """As an int. Raises ArgumentError, which names the attribute, if it is not an int."""
    try:
        return operator.index(value)
    except TypeError as e:
        raise ArgumentError(f"{op}: {name} is {value!r}, needed {needed}") from e


def axis_number(op: str, name: str, value: Any, rank: int, needed: str = "an axis number") -> int:
    """As an int, counted from the front. Raises ArgumentError, which names the attribute, where an array of `rank` has no such axis."""
    axis = whole_number(op, name, value, needed)
    if not -rank <= axis < rank:
        raise ArgumentError(f"{op}: {name} is {axis}, needed an axis between {-rank} and {rank - 1}")
    return axis % rank


def check_vectors(op: str, given: Mapping[str, Any], slots: Sequence[str], size: int, entries: str) -> None:
    """Those of the slots that are given have one axis, of `size`; `entries` names what each entry is for.

    Raises:
      ArgumentError: names the slot, its shape and the required one.
    """
    for slot in slots:
        if slot in given and (found := tuple(given[slot].shape)) != (size,):
            raise ArgumentError(
                f"{op}: {slot} has shape {found}, needed ({size},): one entry for {entries}; multiply or add any other {slot} outside"
            )


def zero_tangent(value: Any) -> Any:
    """The symbolic zero that is the tangent of a value nothing moves."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def with_rank(value: Any, rank: int) -> Any:
    """An array, or a shape with a dtype, with axes of size 1 put in front: aligned right, as numpy broadcasts."""
    missing = rank - len(value.shape)
    if missing <= 0:
        return value
    if isinstance(value, jax.Array):
        return jnp.expand_dims(value, tuple(range(missing)))
    return jax.ShapeDtypeStruct((*(1,) * missing, *value.shape), value.dtype)


def summed_to(a: Array, shape: tuple[int, ...], sharding: Any = None) -> Array:
    """The sum over the axes along which an array of `shape`, of the same rank, broadcasts to `a`."""
    axes = tuple(i for i, (n, m) in enumerate(zip(a.shape, shape, strict=True)) if n != m)
    summed = jnp.sum(a, axis=axes, keepdims=True) if axes else a
    return summed if sharding is None else jax.sharding.reshard(summed, sharding)
