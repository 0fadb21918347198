"""Programs on meshes whose axes are Explicit, as `jax.make_mesh` makes them, where a sharding is part of a type; and on Auto axes.

Trials for test_explicit_axes.py, whose cases have their names. Each is found, or declined in words, and once fused has the values, the
gradients and the types of the original: on one device and on four.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import fusionlab as fl

Array = jax.Array
GEMM, ATTENTION, NORM, LERP = "gemm_epilogue", "dot_product_attention", "layer_norm", "lerp"
T = 8  # rows of an attention


def layer(act: Callable[[Array], Array], x: Array, w: Array, b: Array) -> Array:
    return act(x @ w + b)


def where(h: Array) -> Array:
    return jnp.where(h > 0, h, 0)


def leaky(h: Array) -> Array:
    return jnp.where(h > 0, h, 0.01 * h)


def norm(x: Array, g: Array, b: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b


def rms(x: Array, g: Array, b: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g


def attend(mask: Callable[[], Array] | None, fill: float, q: Array, k: Array, v: Array) -> Array:
    scores = q @ k.swapaxes(-1, -2) * 0.3
    return jax.nn.softmax(scores if mask is None else jnp.where(mask(), scores, fill), -1) @ v


def is_causal(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(*(jnp.moveaxis(a, 1, 2) for a in (q, k, v)), is_causal=True)


def lerp(a: Array, b: Array, t: Array) -> Array:
    return a + t * (b - a)


def scanned(x: Array, w: Array, b: Array) -> Array:
    return jax.lax.scan(lambda c, _: (jax.nn.gelu(c @ w + b), None), x, length=2)[0]


def rematerialised(x: Array, w: Array, b: Array) -> Array:
    return jax.checkpoint(partial(layer, jax.nn.silu))(x, w, b)


def mlp(x: Array, w: Array, b: Array) -> Array:
    return jax.nn.gelu(x @ w + b) @ w.T + b


def asked(out: P, x: Array, w: Array, b: Array) -> Array:
    """The product says where its result lies."""
    return jax.nn.relu(jnp.einsum("ij,jk->ik", x, w, out_sharding=out) + b)


def moved_before_the_bias(x: Array, w: Array, b: Array) -> Array:
    return jax.nn.relu(reshard(x @ w, P()) + b)


def moved_before_the_activation(x: Array, w: Array, b: Array) -> Array:
    return jax.nn.relu(reshard(x @ w + b, P(None, "d")))


def moved_behind(x: Array, w: Array, b: Array) -> Array:
    return reshard(jax.nn.relu(x @ w + b), P(None, "d"))


@dataclass(frozen=True)
class Program:
    """What is tried: a function, the shapes of its arguments, how they lie on the mesh of one axis, and what is to be found.

    Attributes:
      site: the pass that finds it; None where nothing is.
      said: the code of a rejection, where there is one.
      kinds: of axes that it is tried on.
    """

    fn: Callable[..., Array]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    site: str | None
    said: str | None = None
    kinds: tuple[AxisType, ...] = (AxisType.Explicit,)


LINEAR, HEADS, NORMED = ((8, 8), (8, 8), (8,)), ((4, 4, T, 8),) * 3, ((8, 16), (16,), (16,))
ROWS, COLUMNS, SUMMED = (P("d"), P(), P()), (P(), P(None, "d"), P("d")), (P(None, "d"), P("d"), P())
BY_BATCH, BY_HEADS = (P("d"),) * 3, (P(None, "d"),) * 3
ONLY, BOTH = (AxisType.Explicit,), (AxisType.Explicit, AxisType.Auto)


def low() -> Array:
    return jnp.tril(jnp.ones((T, T), bool))


def padding() -> Array:
    return (jnp.arange(T) < 5)[None, None, None]


PROGRAMS: dict[str, Program] = {
    **{
        act.__name__: Program(partial(layer, act), LINEAR, ROWS, GEMM)
        for act in (jax.nn.relu, jax.nn.gelu, jax.nn.silu, jnp.tanh, where)
    },
    # No activation of the op: the product with its bias is, and the rest is said.
    **{
        act.__name__: Program(
            partial(layer, act), LINEAR, ROWS, GEMM, "activation", BOTH if act is jax.nn.softplus else ONLY
        )
        for act in (jax.nn.relu6, jax.nn.elu, jax.nn.softplus, leaky)
    },
    "columns": Program(partial(layer, jax.nn.gelu), LINEAR, COLUMNS, GEMM, kinds=BOTH),
    "alike": Program(partial(layer, jax.nn.relu), LINEAR, (P(), P(), P()), GEMM),
    "mapped": Program(jax.vmap(partial(layer, jax.nn.relu), (0, None, None)), ((4, 8, 8), *LINEAR[1:]), ROWS, GEMM),
    "scanned": Program(scanned, LINEAR, ROWS, GEMM),
    "rematerialised": Program(rematerialised, LINEAR, ROWS, GEMM),
    "mlp": Program(mlp, LINEAR, ROWS, GEMM),
    "norm": Program(norm, NORMED, ROWS, NORM, kinds=BOTH),
    "norm_of_split_rows": Program(norm, NORMED, (P(None, "d"), P("d"), P("d")), NORM),
    "rms": Program(rms, NORMED, ROWS, NORM),
    "lerp": Program(lerp, LINEAR, (P("d"), P("d"), P()), LERP, kinds=BOTH),
    "attention": Program(partial(attend, None, 0.0), HEADS, BY_HEADS, ATTENTION),
    "causal": Program(partial(attend, low, -1e9), HEADS, BY_BATCH, ATTENTION),
    "padded": Program(partial(attend, padding, -jnp.inf), HEADS, BY_HEADS, ATTENTION),
    "is_causal": Program(is_causal, HEADS, BY_BATCH, ATTENTION, kinds=BOTH),
    "is_causal_by_heads": Program(is_causal, HEADS, BY_HEADS, ATTENTION),
    # The gradients of keys and values are sums over what is split, and nobody says where they lie.
    "queries": Program(partial(attend, None, 0.0), HEADS, (P(None, None, "d"), P(), P()), None, "sharding"),
    "asked_as_it_is": Program(partial(asked, P("d")), LINEAR, ROWS, GEMM),
    "asked_gathered": Program(partial(asked, P()), LINEAR, ROWS, GEMM),
    "asked_spread": Program(partial(asked, P(None, "d")), LINEAR, ROWS, GEMM),
    "asked_summed": Program(partial(asked, P()), LINEAR, SUMMED, None, "sharding"),
    "asked_scattered": Program(partial(asked, P("d")), LINEAR, SUMMED, None, "sharding"),
    "asked_scattered_to_columns": Program(partial(asked, P(None, "d")), LINEAR, SUMMED, None, "sharding"),
    "moved_before_the_bias": Program(moved_before_the_bias, LINEAR, ROWS, None, "sharding"),
    "moved_before_the_activation": Program(moved_before_the_activation, LINEAR, ROWS, GEMM, "sharding"),
    "moved_behind": Program(moved_behind, LINEAR, ROWS, GEMM),
}


def arguments(program: Program, mesh: Any) -> tuple[Array, ...]:
    rng = np.random.default_rng(0)
    drawn = (rng.normal(size=shape).astype("float32") for shape in program.shapes)
    return tuple(jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(drawn, program.specs, strict=True))


def step(fn: Callable[..., Array]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(fn(*args))), (0, 1, 2))


def same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(a) == jax.typeof(b), (jax.typeof(a), jax.typeof(b))
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def try_out(name: str, devices: int, kind: AxisType) -> None:
    program = PROGRAMS[name]
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(kind,), devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        args = arguments(program, mesh)
        found = fl.find(program.fn, *args)
        wanted = {p: n for p, n in found.counts().items() if isinstance(n, int) and n}
        assert set(wanted) == ({program.site} if program.site else set()), found.report()
        assert ({r.code for r in found.rejections} or {None}) == {program.said}, found.report()
        same(fl.fuse(program.fn)(*args), jax.jit(program.fn)(*args))
        want = jax.jit(step(program.fn))(*args)
        same(fl.fuse(step(program.fn))(*args), want)  # differentiated before, and once it is fused
        same(jax.jit(step(fl.fuse(program.fn)))(*args), want)


TRIALS: dict[str, Callable[[], None]] = {
    f"{name} on {devices} {kind.name}": partial(try_out, name, devices, kind)
    for name, program in PROGRAMS.items()
    for kind in program.kinds
    for devices in (1, 4)
}
