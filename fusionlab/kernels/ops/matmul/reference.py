"""The meaning of `matmul` in plain jnp, its tangent and its cotangent.

    h = alpha * (a . b) + beta * bias
    out = act(h), cast to the dtype of the result

a . b is the `dot_general` of these dimensions, its result in the dtype `product`; h is computed in that dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ....device import Device
from ...op.arrays import Named, for_product, summed_to
from ..gemm_epilogue.activations import ACTIVATIONS
from .axes import Dimensions, free

Array = Any


def dot(
    a: Array, b: Array, *, dimensions: Dimensions, precision: Any, product: str, device: Device | None = None, **_: Any
) -> Array:
    a, b = for_product(a, b, product, device)
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.dtype(product))


def forward(a: Array, b: Array, bias: Array | None = None, *, residuals: bool, **attrs: Any) -> list[Array]:
    """[out], and the activation's residual if asked for and if it has one."""
    return epilogue(dot(a, b, **attrs), bias, residuals, **attrs)


def epilogue(summed: Array, bias: Array | None, residuals: bool, **attrs: Any) -> list[Array]:
    """The epilogue of the product."""
    h = _scaled(summed, attrs["alpha"])
    if bias is not None:
        h = h + _scaled(bias.astype(h.dtype), attrs["beta"])
    act = ACTIVATIONS[attrs["activation"]]
    result = act.fn(h).astype(attrs["out"])
    return [result, act.save(h)] if residuals and act.save else [result]


def _scaled(a: Array, factor: float) -> Array:
    return a if factor == 1.0 else a * factor


def tangent(saved: Named, tangents: Named, shape: tuple[int, ...], shardings: Named, **attrs: Any) -> Array:
    """act'(h) * (alpha * (da . b + a . db) + beta * dbias), of the tangents given."""
    parts = []
    if "a" in tangents:
        parts.append(_scaled(dot(tangents["a"], saved["b"], **attrs), attrs["alpha"]))
    if "b" in tangents:
        parts.append(_scaled(dot(saved["a"], tangents["b"], **attrs), attrs["alpha"]))
    if "bias" in tangents:
        moved = _scaled(tangents["bias"].astype(attrs["product"]), attrs["beta"])
        parts.append(jnp.broadcast_to(moved, shape, out_sharding=shardings.get("out")))
    act = ACTIVATIONS[attrs["activation"]]
    return act.scale(saved.get(act.residual), functools.reduce(jnp.add, parts)).astype(attrs["out"])


def cotangent(saved: Named, ct: Array, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """The gradients wanted, in order: dh = act'(h) * ct, da = alpha * dh . b^T, db = alpha * a^T . dh, dbias = beta * dh, summed."""
    act = ACTIVATIONS[attrs["activation"]]
    dh = act.scale(saved.get(act.residual), ct.astype(attrs["product"]))
    found = {}
    for slot in ("a", "b"):
        if slot in wanted:
            found[slot] = _of_operand(slot, saved, _scaled(dh, attrs["alpha"]), shardings.get(slot), **attrs)
    if "bias" in wanted:
        shape = tuple(n if along else 1 for n, along in zip(dh.shape, attrs["bias_axes"], strict=True))
        total = _scaled(summed_to(dh, shape, shardings.get("bias")), attrs["beta"])
        found["bias"] = total.astype(dict(attrs["dtypes"])["bias"])
    return [found[slot] for slot in wanted]


def _of_operand(slot: str, saved: Named, dh: Array, sharding: Any, **attrs: Any) -> Array:
    """The transpose of the product as a function of one operand. The other is widened to the dtype of h first, as it is where a
    program widens both before it multiplies.

    Written out: `jax.linear_transpose` takes no shape that varies along mesh axes, as all do inside a shard_map.
    """
    mine, yours = (0, 1) if slot == "a" else (1, 0)
    other = saved["ab"[yours]].astype(dh.dtype)
    contracted, batch = ((pair[mine], pair[yours]) for pair in attrs["dimensions"])
    count, theirs = len(batch[1]), free(other.ndim, contracted[1], batch[1])
    own = dh.ndim - count - len(theirs)
    at = count + own if slot == "a" else count  # where the other's axes stand in the result
    numbers = ((tuple(range(at, at + len(theirs))), theirs), (tuple(range(count)), batch[1]))
    rank = count + own + len(contracted[0])
    summed = [i for i, _ in sorted(zip(*contracted, strict=True), key=lambda pair: pair[1])]
    order = (*batch[0], *free(rank, contracted[0], batch[0]), *summed)  # the operand's axes as the product gives them
    # A `PartitionSpec` may be shorter than the rank: axes that it leaves out are not split.
    if sharding is not None:
        spec = (*sharding.spec, *(None for _ in range(rank - len(sharding.spec))))
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*(spec[i] for i in order)))
    found = lax.dot_general(
        dh, other, numbers, precision=attrs["precision"], preferred_element_type=dh.dtype, out_sharding=sharding
    )
    return lax.transpose(found, [order.index(i) for i in range(rank)]).astype(dict(attrs["dtypes"])[slot])
