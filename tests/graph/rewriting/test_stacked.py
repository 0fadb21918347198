"""What a scan stacks for the scan that runs back: nothing that the second can make itself from less, and the same numbers."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import check_jaxpr, jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusionlab as fl
from benchmarks.programs.language_steps import PLAIN, TINY, tokens_of
from fusionlab.graph.jax_compat import scan_counts, without_dead_code
from fusionlab.graph.rewriting.peephole import with_less_kept
from tests.fusers.checks import agree

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.bfloat16)
W = jnp.asarray(np.random.default_rng(1).normal(size=(3, 6)), jnp.bfloat16)
SEEN = jnp.arange(6) < 4
WEIGHTS = jnp.asarray(np.random.default_rng(2).normal(size=(6, 6)) / 3, jnp.bfloat16)


def scans_in(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        elif eqn.primitive.name in ("jit", "pjit"):
            yield from scans_in(eqn.params["jaxpr"].jaxpr)


def stacked(closed):
    """(dtype, shape) of all that the scans that run forward stack."""
    scans = [e for e in scans_in(closed.jaxpr) if not e.params["reverse"]]
    return [(str(v.aval.dtype), v.aval.shape) for e in scans for v in e.outvars[scan_counts(e.params)[1] :]]


def bytes_of(closed):
    return sum(np.dtype(jnp.dtype(d)).itemsize * math.prod(shape) for d, shape in stacked(closed))


def widened(x, w, seen):
    wide = x.astype(jnp.float32)
    return (wide * jnp.sin(wide) * w).astype(x.dtype)


def masked(x, w, seen):
    return jnp.where(seen, jnp.sin(x * w), x)


def turned(x, w, seen):
    return jnp.sin(x.T * jnp.tanh(x.T)).T * jnp.tanh(x) * w


def gated(x, w, seen):
    up, gate = x @ WEIGHTS, x @ WEIGHTS.T
    return (gate * (1 / (1 + jnp.exp(-gate))) * up) @ WEIGHTS.T * w


# name -> (a layer, what it no longer stacks for the other scan)
LAYERS = {
    "a widened copy": (widened, "x as float32"),
    "a mask for every entry": (masked, "the mask"),
    "an array and its transpose": (turned, "the transpose"),
    "what arithmetic makes of what is stacked": (gated, "the gate's factor, and the product of both"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_scan_stacks_less_and_the_gradients_have_the_same_bits(name):
    layer, _ = LAYERS[name]

    def loss(x, w, seen):
        return jnp.sum(jax.lax.scan(lambda c, p: (layer(c, p, seen), None), x, w)[0].astype(jnp.float32))

    closed = without_dead_code(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(X, W, SEEN))
    less = without_dead_code(with_less_kept(closed))
    check_jaxpr(less.jaxpr)
    assert bytes_of(less) < bytes_of(closed)
    with jax.disable_jit(False):
        before, after = (jaxpr_as_fun(c)(X, W, SEEN) for c in (closed, less))
    for a, b in zip(before, after, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def chained(steps):
    """A scan over x @ w with arithmetic on it, and the number of arrays as large as x that it stacks for its backward pass."""

    def layer(x, w):
        h = x @ w
        for _ in range(steps):
            h = jnp.sin(h) + jnp.cos(h)
        return h, None

    def loss(x, w):
        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    args = jnp.ones((4, 6)), jnp.ones((3, 6, 6)) / 6
    less = without_dead_code(with_less_kept(without_dead_code(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*args))))
    return sum(shape == (3, 4, 6) for _, shape in stacked(less))


def test_arithmetic_is_done_again_for_a_few_equations_and_from_what_is_stacked_anyway():
    assert chained(1) == 3  # x, and sin and cos of the product, which nothing stacks
    assert [chained(steps) - 2 * steps for steps in (2, 3)] == [1, 1]


NAMES = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def norm_and_activation(name):
    """(the gradient of a scan of such layers, its arguments)."""

    def layer(x, p):
        centred = x - x.mean(-1, keepdims=True)
        norm = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["shift"]
        return x + NAMES[name](norm @ p["up"] + p["bias"]) @ p["down"], None

    def loss(x, p):
        return jnp.sum(jax.lax.scan(layer, x, p)[0] ** 2)

    draw = np.random.default_rng(3)
    shapes = {"scale": (3, 8), "shift": (3, 8), "up": (3, 8, 32), "bias": (3, 32), "down": (3, 32, 8)}
    p = {k: jnp.asarray(draw.normal(size=s) / 3, jnp.float32) for k, s in shapes.items()}
    return jax.value_and_grad(loss, (0, 1)), (jnp.asarray(draw.normal(size=(64, 8)), jnp.float32), p)


def stacked_arrays_of(graded, args):
    fused = fl.fuse(graded, only=["gemm_epilogue", "layer_norm"])
    return sorted(shape for _, shape in stacked(jax.make_jaxpr(fused)(*args)) if len(shape) > 1)


# x, the value of the activation's operand, and two numbers of each row: neither the norm's result nor the activation's.
KEPT = [(3, 64), (3, 64), (3, 64, 8), (3, 64, 32)]


@pytest.mark.parametrize("name", NAMES)
def test_an_activation_and_a_norm_are_made_again_from_what_the_fused_ops_keep(name):
    graded, args = norm_and_activation(name)
    found = agree(graded, *args, passes=["gemm_epilogue", "layer_norm"])
    assert {c.op for c in found.candidates} == {"gemm_epilogue", "layer_norm"}
    assert stacked_arrays_of(graded, args) == KEPT


def test_they_are_made_again_on_explicit_mesh_axes_too():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    graded, args = norm_and_activation("silu")
    with jax.set_mesh(mesh):
        x, p = jax.device_put(args[0], NamedSharding(mesh, P("d"))), jax.device_put(args[1], NamedSharding(mesh, P()))
        assert stacked_arrays_of(graded, (x, p)) == KEPT


def test_what_is_read_elsewhere_stays_stacked():
    def run(x, w):
        return jax.lax.scan(lambda c, p: (jnp.sin(c) * p, c.astype(jnp.float32)), x, w)

    closed = without_dead_code(jax.make_jaxpr(lambda x, w: jax.vjp(run, x, w)[0])(X, W))
    less = without_dead_code(with_less_kept(closed))
    assert stacked(less) == stacked(closed)


def test_a_program_without_a_second_scan_is_the_same():
    closed = jax.make_jaxpr(lambda x, w: jax.lax.scan(lambda c, p: (c * p, c), x, w))(X, W)
    assert with_less_kept(closed) is closed


@pytest.mark.dear
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_a_train_step_stacks_no_more_than_the_gradient_of_the_fused_loss(case):
    loss, args = case.loss(PLAIN), (case.parameters(), tokens_of(case))
    inside, outside = jax.value_and_grad(fl.fuse(loss)), fl.fuse(jax.value_and_grad(loss))
    mine, theirs = (jax.make_jaxpr(fn)(*args) for fn in (outside, inside))
    assert bytes_of(mine) <= bytes_of(theirs)
    assert not any(dtype == "bool" for dtype, _ in stacked(mine))
    temporaries = [jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes for fn in (outside, inside)]
    assert temporaries[0] <= 1.02 * temporaries[1]
    found = agree(jax.value_and_grad(loss), *args, factor=4)
    attention = [c for c in found.candidates if c.op == "dot_product_attention"]
    assert attention
    assert all(c.attrs["is_causal"] and set(c.leaves) == {"q", "k", "v"} for c in attention)
