"""What the tests of fused functions share: the same values and the same gradients. Not a test module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fusionlab as fl

# Relative to the largest magnitude of each array: a few roundings of the dtype, grown by sums of tens of terms.
ERROR = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 2e-2, "float16": 3e-3}


# What is compiled here runs once: compiling quickly is worth more than running quickly.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def jit(fn: Any) -> Any:
    """`jax.jit` that compiles quickly."""
    return jax.jit(fn, compiler_options=QUICK)


def forward_counts(found):
    """Pass -> number of candidates, without the `_grad` of each, and without those that found none where that is usual."""
    rare = ("lerp", "gated_matmul", "matmul_schedule")
    return {name: n for name, n in found.counts().items() if not name.endswith("_grad") and (n or name not in rare)}


def normal(*shapes: tuple[int, ...], dtype: Any = jnp.float32, seed: int = 0) -> tuple[jax.Array, ...]:
    """Standard normal arrays, negative values included; drawn by numpy, so that nothing is compiled where a module is imported."""
    draw = np.random.default_rng(seed).standard_normal
    return tuple(jax.device_put(draw(s, np.float32).astype(dtype)) for s in shapes)


def close(got: Any, want: Any, factor: float = 1.0, least: float = 0.0) -> None:
    """Same structure, shapes and dtypes; values within rounding (at least `least`); the same NaNs and infinities."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    largest = max((_scale(w) for w in jax.tree.leaves(want)), default=0.0)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        if not jnp.issubdtype(g.dtype, jnp.inexact):
            np.testing.assert_array_equal(g, w)
            continue
        g64, w64 = np.asarray(g, np.float64), np.asarray(w, np.float64)
        scale = max(_scale(w), 1e-3)
        # Zero in theory, as the gradient of a key's bias is: the others' rounding is all.
        if _scale(w) < 1e-5 * largest:
            scale = largest
        np.testing.assert_allclose(g64, w64, rtol=0, atol=factor * max(least, ERROR[str(g.dtype)]) * scale)


def _scale(x: Any) -> float:
    values = np.abs(np.asarray(x, np.float64)) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(0)
    return float(np.max(values[np.isfinite(values)], initial=0.0))


def same_bits(got: Any, want: Any) -> None:
    """Equal bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


def weighed(fn: Any) -> Any:
    """A scalar of `fn`'s results in which every element has its own weight, so that no gradient error cancels."""

    def loss(*args: Any) -> jax.Array:
        total = jnp.float32(0)
        for leaf in jax.tree.leaves(fn(*args)):
            weight = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape) + 0.5
            total = total + jnp.sum(leaf.astype(jnp.float32) * weight)
        return total

    return loss


def floats(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Indices of the arguments all of whose leaves are floating."""
    return tuple(
        i
        for i, a in enumerate(args)
        if all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in jax.tree.leaves(a))
    )


def agree(fn: Any, *args: Any, factor: float = 1.0, **options: Any) -> fl.Findings:
    """Asserts that `fl.fuse(fn)` has `fn`'s values and gradients; returns what was found."""
    fused = fl.fuse(fn, **options)
    want, got = (jit(lambda *a, f=f: (f(*a), jax.grad(weighed(f), floats(args))(*a)))(*args) for f in (fn, fused))
    # f32 gradients of a bf16 layer are bf16 ones.
    inner = max(ERROR.get(str(x.dtype), 0.0) for x in jax.tree.leaves(args))
    close(got, want, factor, inner)
    return fused.findings(*args)


def codes(found: fl.Findings) -> list[str]:
    return [r.code for r in found.rejections]


def primitives(graph: fl.Graph) -> list[str]:
    return [n.primitive for n in graph.nodes()]


def in_float64(fn: Any, args: tuple[Any, ...]) -> Any:
    """Value and weighed gradients of `fn`, its floating arguments widened to float64."""
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) if jnp.issubdtype(jnp.result_type(a), jnp.floating) else a for a in args]
        return jit(lambda *a: (fn(*a), jax.grad(_weighed_in_float64(fn), floats(args))(*a)))(*wide)


def _weighed_in_float64(fn: Any) -> Any:
    """As `weighed`, whose weights are those of float32, which a program in float64 has to have too."""

    def loss(*args: Any) -> jax.Array:
        total = jnp.float64(0)
        for leaf in jax.tree.leaves(fn(*args)):
            weight = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape) + jnp.float32(0.5)
            total = total + jnp.sum(leaf.astype(jnp.float64) * weight.astype(jnp.float64))
        return total

    return loss


def as_exact(fn: Any, *args: Any, factor: float = 4.0, **options: Any) -> fl.Findings:
    """As `agree`, against the program in float64."""
    fused = fl.fuse(fn, **options)
    exact = in_float64(fn, args)
    got = jit(lambda *a: (fused(*a), jax.grad(weighed(fused), floats(args))(*a)))(*args)
    want = jax.tree.map(lambda w, g: np.asarray(w, np.float64).astype(g.dtype), exact, got)
    close(got, want, factor, max(ERROR.get(str(x.dtype), 0.0) for x in jax.tree.leaves(args)))
    return fused.findings(*args)


def differentiated(fn: Any, args: tuple[Any, ...]) -> Any:
    """A train step of a function: its weighed sum, and the gradients by its floating arguments."""
    return jax.value_and_grad(weighed(fn), floats(args))


def in_a_loop(fn: Any, mapped: int) -> Any:
    """A function of two of each of the first `mapped` arguments, one after the other."""

    def loop(*args: Any) -> Any:
        return jax.lax.map(lambda one: fn(*one, *args[mapped:]), args[:mapped])

    return loop


def two_of_each(args: tuple[Any, ...], mapped: int) -> tuple[Any, ...]:
    return (*(jnp.stack([a, a[::-1] if a.shape else a]) for a in args[:mapped]), *args[mapped:])


def counts_everywhere(fn: Any, args: tuple[Any, ...], name: str, mapped: int = 1) -> dict[str, Any]:
    """How many sites of a pass are found of a function: in a train step (and fused with their backward passes), scanned and mapped."""
    pairs, both = two_of_each(args, mapped), (0,) * mapped + (None,) * (len(args) - mapped)
    step = fl.find(differentiated(fn, args), *args, passes=name).counts()
    return {
        "train step": step[name],
        "backward": step[f"{name}_grad"],
        "scan": fl.find(in_a_loop(fn, mapped), *pairs, passes=name).counts()[name],
        "vmap": fl.find(jax.vmap(fn, both), *pairs, passes=name).counts()[name],
    }


EVERYWHERE = {"train step": 1, "backward": 1, "scan": 1, "vmap": 1}
