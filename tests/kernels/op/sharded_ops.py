"""Ops on two devices: in shard_map and in both kinds of sharded jit, with the gradients of plain code. Trials for test_op.py, whose cases
have their names.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fusionlab.errors import BackendError
from fusionlab.kernels.ops.dot_product_attention.blockwise import attention as blockwise
from fusionlab.ops import dot_product_attention, gemm_epilogue, group_norm, layer_norm

Array = Any
QKV = ((2, 9, 2, 4),) * 3
SEEN = np.tri(9, dtype=bool)


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """Attention goes through arrays as small as these in several blocks."""
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_FORWARD_SCORES", 64)
        patch.setattr(blockwise, "_BACKWARD_SCORES", 64)
        patch.setattr(blockwise, "_LEAST_ROWS", 4)
        yield


@dataclass(frozen=True)
class Case:
    """An op, plain code that means the same, and their arguments.

    Attributes:
      shapes, specs: of the arguments, which are normal numbers, and how they are split.
      looped: whether it is a loop that explicit mesh axes are refused for.
    """

    fused: Callable[..., Array]
    plain: Callable[..., Array]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    looped: bool = False

    def args(self) -> list[Array]:
        keys = jax.random.split(jax.random.key(0), 5)
        return [jax.random.normal(k, s, jnp.float64) for k, s in zip(keys, self.shapes, strict=False)]

    def placed(self, kind: AxisType, specs: tuple[P, ...]) -> list[Array]:
        mesh = mesh_of(kind)
        return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(self.args(), specs, strict=True)]


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])


def plain_gemm(x: Array, w: Array, b: Array) -> Array:
    return jax.nn.gelu(x @ w + b)


def plain_attention(q: Array, k: Array, v: Array) -> Array:
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) * 0.5, -1), v)


def with_all(q: Array, k: Array, v: Array, bias: Array, factors: Array, implementation: str | None = None) -> Array:
    given = {"mask": SEEN, "mask_value": -1e9, "softcap": 2.0, "factors_scale": 1.5, "scale": 0.5}
    return dot_product_attention(q, k, v, bias=bias, factors=factors, implementation=implementation, **given)


def plain_with_all(q: Array, k: Array, v: Array, bias: Array, factors: Array) -> Array:
    scores = 2.0 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) * 0.25) + bias
    p = jax.nn.softmax(jnp.where(SEEN, scores, -1e9), -1) * factors * 1.5
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def plain_norm(x: Array, scale: Array, bias: Array) -> Array:
    return jax.nn.standardize(x) * scale + bias


def plain_group_norm(x: Array, scale: Array, bias: Array) -> Array:
    grouped = x.reshape(*x.shape[:2], 2, 4)
    mean = grouped.mean((1, 3), keepdims=True)
    variance = ((grouped - mean) ** 2).mean((1, 3), keepdims=True)
    return jax.nn.silu(((grouped - mean) / jnp.sqrt(variance + 1e-5)).reshape(x.shape) * scale + bias)


ALL = (*QKV, (2, 9, 9), (2, 1, 1, 9)), (P("d"), P("d"), P("d"), P(), P("d"))
BLOCKS = "xla_blockwise"
CASES = {
    "gemm": Case(
        partial(gemm_epilogue, activation="gelu_tanh"), plain_gemm, ((8, 4), (4, 6), (6,)), (P("d"), P(), P())
    ),
    "attention": Case(partial(dot_product_attention, scale=0.5), plain_attention, QKV, (P("d"),) * 3),
    "attention in blocks": Case(
        partial(dot_product_attention, scale=0.5, implementation=BLOCKS), plain_attention, QKV, (P("d"),) * 3, True
    ),
    "attention with all": Case(with_all, plain_with_all, *ALL),
    "attention with all in blocks": Case(partial(with_all, implementation=BLOCKS), plain_with_all, *ALL, True),
    "norm": Case(layer_norm, plain_norm, ((8, 4), (4,), (4,)), (P("d"), P(), P())),
    "group norm": Case(
        partial(group_norm, groups=2, activation="silu"), plain_group_norm, ((8, 3, 8), (8,), (8,)), (P("d"), P(), P())
    ),
}
ELSEWHERE = {  # explicit axes that are split otherwise
    "gemm by rows": ("gemm", CASES["gemm"].specs),
    "gemm by columns": ("gemm", (P(), P(None, "d"), P("d"))),
    "norm by parameters": ("norm", (P(), P("d"), P())),
    "norm by features": ("norm", (P(None, "d"), P(), P("d"))),
    "group norm by parameters": ("group norm", (P(), P("d"), P())),
}


def close(got: Any, want: Any) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-9)


def graded(fn: Callable[..., Array], count: int) -> Callable[..., Any]:
    return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), tuple(range(count)))


@functools.cache
def wanted(name: str) -> Any:
    """Value and gradients of the plain code."""
    case = CASES[name]
    return graded(case.plain, len(case.shapes))(*case.args())


def mapped(name: str, check_vma: bool) -> None:
    case = CASES[name]
    loss = jax.shard_map(
        lambda *a: jax.lax.psum(jnp.sum(jnp.sin(case.fused(*a))), "d"),
        mesh=mesh_of(AxisType.Auto),
        in_specs=case.specs,
        out_specs=P(),
        check_vma=check_vma,
    )
    close(jax.jit(jax.value_and_grad(loss, tuple(range(len(case.shapes)))))(*case.args()), wanted(name))


def automatic(name: str) -> None:
    case = CASES[name]
    step = jax.jit(graded(case.fused, len(case.shapes)))
    close(step(*case.placed(AxisType.Auto, case.specs)), wanted(name))


def explicit(name: str) -> None:
    case, want = CASES[name], wanted(name)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        args = case.placed(AxisType.Explicit, case.specs)
        step = jax.jit(graded(case.fused, len(case.shapes)))
        if not case.looped:
            close(step(*args), want)
            return
        with pytest.raises(BackendError, match="explicit mesh axes"):
            step(*args)


def elsewhere(name: str, specs: tuple[P, ...]) -> None:
    """The gradients of one argument alone, and of all."""
    case = CASES[name]
    args, placed = case.args(), case.placed(AxisType.Explicit, specs)
    for some in ((0,), (1,), (2,), (0, 1, 2)):
        got, want = (
            jax.jit(jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), some))(*given)
            for f, given in ((case.fused, placed), (case.plain, args))
        )
        close(got, want)


TRIALS: dict[str, Callable[[], None]] = {
    **{f"{name}, shard_map": partial(mapped, name, True) for name in CASES},
    **{f"{name}, shard_map unchecked": partial(mapped, name, False) for name in CASES},
    **{f"{name}, jit": partial(automatic, name) for name in CASES},
    **{f"{name}, explicit jit": partial(explicit, name) for name in CASES},
    **{f"{name}, explicit jit": partial(elsewhere, *found) for name, found in ELSEWHERE.items()},
}
