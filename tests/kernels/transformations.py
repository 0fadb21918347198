"""The JAX transformations a fused op must survive, each as `run(f, args)`: the same program on the op and on plain jnp code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from fusionlab.graph.rewriting.fold_sums import without_sums


def loss(f: Callable) -> Callable:
    return lambda *args: jnp.sum(jnp.sin(f(*args)))


def every(args: tuple) -> tuple[int, ...]:
    return tuple(range(len(args)))


def _scanned(f: Callable, args: tuple) -> Any:
    """The op inside a scan body, its first operand carried, differentiated through the scan."""

    def run(first: Any, *rest: Any) -> Any:
        def body(carry: Any, _: None) -> tuple[Any, Any]:
            out = f(carry, *rest)
            return carry + jnp.sum(jnp.cos(out)) * 0.1, jnp.sum(out)

        return jnp.sum(jax.lax.scan(body, first, None, length=3)[1])

    return jax.jit(jax.value_and_grad(run, every(args)))(*args)


def _batched(args: tuple, scales: tuple[float, ...] = (1.0, -0.5, 2.0)) -> Any:
    return jnp.stack([args[0] * s for s in scales])


def _vmapped(f: Callable, args: tuple) -> Callable:
    return jax.vmap(f, (0, *(None for _ in args[1:])))


def _all_batched(args: tuple) -> tuple:
    return tuple(jnp.stack([a, 0.5 * a], axis=-1) for a in args)


def _directions(args: tuple) -> tuple:
    return tuple(jnp.cos(3 * a + i) for i, a in enumerate(args))


TRANSFORMATIONS: dict[str, Callable[[Callable, tuple], Any]] = {
    "eager": lambda f, a: f(*a),
    "jit": lambda f, a: jax.jit(f)(*a),
    "no_jit": lambda f, a: _without_jit(f, a),
    "grad": lambda f, a: jax.grad(loss(f), every(a))(*a),
    "value_and_grad_jit": lambda f, a: jax.jit(jax.value_and_grad(loss(f), every(a)))(*a),
    "jvp": lambda f, a: jax.jvp(f, a, _directions(a)),
    "jvp_of_last": lambda f, a: jax.jvp(lambda last: f(*a[:-1], last), a[-1:], _directions(a[-1:])),
    "linearize": lambda f, a: jax.linearize(f, *a)[1](*_directions(a)),
    "linear_transpose_of_vjp": lambda f, a: jax.linear_transpose(jax.vjp(f, *a)[1], f(*a))(_directions(a)),
    "jacfwd": lambda f, a: jax.jacfwd(f, every(a))(*a),
    "jacrev": lambda f, a: jax.jacrev(f, every(a))(*a),
    "hessian": lambda f, a: jax.jit(jax.hessian(loss(f), every(a)))(*a),
    "reverse_over_reverse": lambda f, a: jax.jit(jax.jacrev(jax.jacrev(loss(f), every(a)), every(a)))(*a),
    "grad_of_grad": lambda f, a: jax.jit(jax.grad(lambda *b: jnp.sum(jax.grad(loss(f), 1)(*b) ** 2), every(a)))(*a),
    "grad_of_jvp": lambda f, a: jax.grad(lambda *b: jnp.sum(jnp.sin(jax.jvp(f, b, _directions(a))[1])), every(a))(*a),
    "vmap_first": lambda f, a: _vmapped(f, a)(_batched(a), *a[1:]),
    "vmap_all": lambda f, a: jax.vmap(f, -1, -1)(*_all_batched(a)),
    "vmap_second": lambda f, a: jax.vmap(lambda s: f(a[0], s, *a[2:]), -1)(jnp.stack([a[1], -a[1]], -1)),
    "vmap_of_grad": lambda f, a: _vmapped(jax.grad(loss(f), every(a)), a)(_batched(a), *a[1:]),
    "grad_of_vmap": lambda f, a: jax.grad(loss(_vmapped(f, a)), every(a))(_batched(a), *a[1:]),
    "scan": _scanned,
    "checkpoint": lambda f, a: jax.jit(jax.grad(jax.checkpoint(loss(f)), every(a)))(*a),
    "checkpoint_policy": lambda f, a: jax.grad(
        jax.checkpoint(loss(f), policy=jax.checkpoint_policies.dots_saveable), every(a)
    )(*a),
    "donated": lambda f, a: jax.jit(jax.grad(loss(f), every(a)), donate_argnums=0)(jnp.array(a[0]), *a[1:]),
}


# These are about running without a surrounding jit, or about jit itself.
OUTERMOST = ("eager", "grad", "no_jit", "donated")


def assert_agree(f: Callable, plain: Callable, args: tuple, names: tuple[str, ...], rtol: float) -> None:
    """The op and the plain code give the same under each of the named transformations."""

    def results(g: Callable, which: list[str]) -> dict[str, Any]:
        return {name: TRANSFORMATIONS[name](g, args) for name in which}

    inside = [n for n in names if n not in OUTERMOST]
    got = results(f, [n for n in names if n in OUTERMOST]) | jax.jit(lambda: results(f, inside))()
    want = jax.jit(lambda: results(plain, list(names)))()
    for name in names:
        assert_same(got[name], want[name], rtol, name)


def _without_jit(f: Callable, args: tuple) -> Any:
    with jax.disable_jit():
        return f(*args)


def assert_same(got: Any, want: Any, rtol: float, what: str = "") -> None:
    """Equal structure, shape and dtype; values within `rtol` of the largest magnitude in each array."""
    assert jax.tree.structure(got) == jax.tree.structure(want), what
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape, what
        assert g.dtype == w.dtype, what
        g64, w64 = np.asarray(g, np.float64), np.asarray(w, np.float64)
        finite = w64[np.isfinite(w64)]
        np.testing.assert_allclose(
            g64, w64, rtol=rtol, atol=rtol * max(np.abs(finite).max(initial=0.0), 1e-3), err_msg=what
        )


def adding(f: Callable) -> Callable:
    """The program with sums left to the fused ops that alone read them, as a rewritten one has them."""

    def run(*args: Any) -> Any:
        closed, result = jax.make_jaxpr(f, return_shape=True)(*args)
        jaxpr = closed.jaxpr.replace(eqns=without_sums(list(closed.jaxpr.eqns), closed.jaxpr.outvars))
        return jax.tree.unflatten(
            jax.tree.structure(result), jaxpr_as_fun(closed.replace(jaxpr=jaxpr))(*jax.tree.leaves(args))
        )

    return run


def primitives(f: Callable, *args: Any) -> list[str]:
    """The primitives of a trace in program order, those of inner programs (jit, scan, ...) included."""

    def walk(jaxpr: Any) -> list[str]:
        names = []
        for eqn in jaxpr.eqns:
            names.append(eqn.primitive.name)
            for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
                inner = getattr(param, "jaxpr", param)
                names += walk(inner) if hasattr(inner, "eqns") else []
        return names

    return walk(jax.make_jaxpr(f)(*args).jaxpr)
