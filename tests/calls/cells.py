"""Every way of calling a fused function: under {nothing, jax.jit, nnx.jit, filter_jit}, fused inside of it or outside, with what a call may
have beside arrays. Each cell gives what the original gives under the same jit, or one error that says what works.

The cells of "sharding" are trials for four devices; the others run anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusionlab as fl

Array = Any
JITS = ("plain", "jax.jit", "nnx.jit", "filter_jit")
PLACES = ("inside", "outside")
FEATURES = ("donate", "static", "kwargs", "state", "fixed leaves", "sharding")
# What flax and equinox themselves do not have: static arguments of filter_jit are leaves that are no arrays.
WITHOUT = {("plain", "donate"), ("plain", "sharding")}
# What the original does not do either: jax.jit and filter_jit lose state, jax.jit and nnx.jit take arrays alone.
REFUSED = {
    ("jax.jit", "state"): "nnx.jit",
    ("filter_jit", "state"): "nnx.jit",
}
RAISED_BY_THE_JIT = {("jax.jit", "fixed leaves"), ("nnx.jit", "fixed leaves")}
CELLS = [c for c in product(JITS, PLACES, FEATURES) if (c[0], c[2]) not in WITHOUT]


def name_of(cell: tuple[str, str, str]) -> str:
    return ", ".join(cell)


def layer(p: dict[str, Array], x: Array) -> Array:
    return jax.nn.relu(x @ p["w"] + p["b"])


def update(p: dict[str, Array], x: Array) -> dict[str, Array]:
    """A train step without state: parameters in, parameters out."""
    grads = jax.grad(lambda p: jnp.sum(jnp.square(layer(p, x))))(p)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads)


def repeated(p: dict[str, Array], x: Array, times: int, act: str = "relu") -> Array:
    for _ in range(times):
        x = getattr(jax.nn, act)(x @ p["w"] + p["b"])
    return x


def by_name(p: dict[str, Array], *, x: Array, scale: Array) -> Array:
    return layer(p, x) * scale


def activated(p: dict[str, Array], x: Array, act: Callable, name: str) -> tuple[Array, str]:
    return act(x @ p["w"] + p["b"]), name


class Counted(nnx.Module):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        self.w, self.b, self.calls = nnx.Param(params()["w"]), nnx.Param(params()["b"]), nnx.Variable(jnp.zeros(()))

    def __call__(self, x: Array) -> Array:
        self.calls[...] += 1
        return jax.nn.relu(x @ self.w + self.b)


def counted(model: Counted, x: Array) -> Array:
    return model(x)


def params() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32), "b": jnp.asarray(rng.normal(size=8), jnp.float32)}


def data() -> Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)), jnp.float32)


def jitted(kind: str, fn: Callable, **options: Any) -> Callable:
    if kind == "plain":
        return fn
    if kind == "filter_jit":
        return eqx.filter_jit(fn, **options)
    return (jax.jit if kind == "jax.jit" else nnx.jit)(fn, **options)


def both(kind: str, place: str, fn: Callable, **options: Any) -> tuple[Callable, Callable]:
    """(the original, the fused one) under the same jit."""
    fused = fl.fuse(jitted(kind, fn, **options)) if place == "outside" else jitted(kind, fl.fuse(fn), **options)
    return jitted(kind, fn, **options), fused


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if isinstance(w, str):
            assert g == w
        else:
            np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)


def donate(kind: str, place: str) -> None:
    options = {"donate": "all"} if kind == "filter_jit" else {"donate_argnums": 0}
    original, fused = both(kind, place, update, **options)
    given, x = [params(), params()], data()
    same(fused(given[1], jnp.array(x)), original(given[0], jnp.array(x)))
    assert [p["w"].is_deleted() for p in given] == [True, True]


def static(kind: str, place: str) -> None:
    options = {} if kind in ("plain", "filter_jit") else {"static_argnames": ("times", "act")}
    if kind == "plain":
        original, fused = repeated, fl.fuse(repeated, static_argnames=("times", "act"))
    elif kind == "filter_jit":  # a number is fixed there
        original, fused = both(kind, place, repeated)
    else:
        inside = fl.fuse(repeated, **options) if place == "inside" else repeated
        fused = jitted(kind, inside, **options)
        original, fused = jitted(kind, repeated, **options), fl.fuse(fused) if place == "outside" else fused
    for args, kwargs in (((2,), {}), ((1, "tanh"), {}), ((2,), {"act": "tanh"})):
        same(fused(params(), data(), *args, **kwargs), original(params(), data(), *args, **kwargs))


def kwargs(kind: str, place: str) -> None:
    original, fused = both(kind, place, by_name)
    same(fused(params(), x=data(), scale=2.0), original(params(), x=data(), scale=2.0))


def state(kind: str, place: str) -> None:
    original, fused = both(kind, place, counted)
    models = [Counted(), Counted()]
    for step in range(2):
        same(fused(models[1], data()), original(models[0], data()))
        assert [float(m.calls[...]) for m in models] == [step + 1, step + 1]


def fixed_leaves(kind: str, place: str) -> None:
    original, fused = both(kind, place, activated)
    for act in (jax.nn.relu, jnp.tanh):
        same(fused(params(), data(), act, "seen"), original(params(), data(), act, "seen"))


def sharding(kind: str, place: str) -> None:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))
    if kind == "filter_jit":  # placed by its arguments, as equinox has it
        original, fused = both(kind, place, layer)
        args = jax.device_put(params(), whole), jax.device_put(data(), rows)
    else:
        original, fused = both(kind, place, layer, in_shardings=(whole, rows), out_shardings=rows)
        args = params(), data()
    got, want = fused(*args), original(*args)
    same(got, want)
    assert got.sharding.is_equivalent_to(want.sharding, 2)
    assert len(got.sharding.device_set) == 4


RUNS = {
    "donate": donate,
    "static": static,
    "kwargs": kwargs,
    "state": state,
    "fixed leaves": fixed_leaves,
    "sharding": sharding,
}


def run(cell: tuple[str, str, str]) -> None:
    kind, place, feature = cell
    RUNS[feature](kind, place)


TRIALS = {name_of(cell): partial(run, cell) for cell in CELLS if cell[2] == "sharding"}
