"""The canonical view: one node for every spelling of a meaning, and never one node for two meanings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fusionlab.graph.canonical.nodes import ONE
from fusionlab.graph.canonical.view import CanonicalView, view_node_text
from fusionlab.graph.program.trace import trace

X = jnp.zeros((4, 6))  # M K
Y = jnp.ones((4, 6))
W = jnp.zeros((6, 5))  # K N
B = jnp.zeros(6)
S = jnp.zeros((7, 7))  # square: shapes cannot tell its axes apart
V = jnp.zeros(7)
Q = jnp.zeros((2, 3, 8, 5))  # B H T D
M = jnp.zeros((4, 6), bool)


def refs(fns, *args):
    """What each function's result is in one shared view of all of them."""
    graph = trace(lambda *a: [f(*a) for f in fns], *args)
    view = CanonicalView(graph.top)
    return [view.read(a) for a in graph.top.outputs]


SAME = {
    "transposing twice": (X, [lambda x: x, lambda x: x.T.T, lambda x: jnp.swapaxes(jnp.moveaxis(x, 0, 1), 0, 1)]),
    "a function of a transpose": (X, [lambda x: jnp.sin(x.T).T, jnp.sin]),
    "unit axes": (
        X,
        [
            lambda x: x,
            lambda x: x[:, None, :],
            lambda x: x.reshape(1, 4, 6, 1),
            lambda x: jnp.squeeze(jnp.expand_dims(x, (0, 2)), 0),
            lambda x: x[None][0][..., None],
        ],
    ),
    "copies side by side": (
        X,
        [
            lambda x: lax.tile(x, (3, 1)),
            lambda x: jnp.broadcast_to(x, (3, 4, 6)).reshape(12, 6),
            lambda x: lax.tile(x[None], (1, 3, 1))[0],
        ],
    ),
    "copies of one entry": (
        B,
        [
            lambda b: lax.tile(b[:, None], (1, 4)).T,
            lambda b: jnp.broadcast_to(b, (4, 6)),
            lambda b: lax.tile(b[None], (4, 1)),
        ],
    ),
    "broadcasts of a bias": (
        (X, B),
        [
            lambda x, b: x + b,
            lambda x, b: b[None] + x,
            lambda x, b: x + jnp.broadcast_to(b, x.shape),
            lambda x, b: jax.vmap(lambda row: row + b)(x),
        ],
    ),
    "products of matrices": (
        (X, W),
        [
            lambda x, w: x @ w,
            jnp.dot,
            lambda x, w: jnp.einsum("mk,kn->mn", x, w),
            lambda x, w: jnp.einsum("kn,mk->mn", w, x),
            lambda x, w: (w.T @ x.T).T,
            lambda x, w: jnp.tensordot(x, w, 1),
            lambda x, w: lax.dot_general(x.T, w.T, (((0,), (1,)), ((), ()))),
            lambda x, w: jax.vmap(lambda row: row @ w)(x),
            lambda x, w: (x[None] @ w[None])[0],
        ],
    ),
    "attention scores": (
        (Q, Q + 1),
        [
            lambda q, k: q @ jnp.swapaxes(k, -1, -2),
            lambda q, k: jnp.einsum("bhtd,bhsd->bhts", q, k),
            lambda q, k: jnp.einsum("bthd,bshd->bhts", jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2)),
            lambda q, k: jax.vmap(jax.vmap(lambda q, k: q @ k.T))(q, k),
            lambda q, k: jnp.einsum("bhsd,bhtd->bhts", k, q),
        ],
    ),
    "factors": (
        X,
        [
            lambda x: x * 0.5,
            lambda x: x / 2.0,
            lambda x: -x * -0.5,
            lambda x: 0.25 * (x + x),
            lambda x: (x * 4.0) / 8.0,
            lambda x: x * jnp.sqrt(0.25),
        ],
    ),
    "factors of a product": (
        (X, W),
        [lambda x, w: 2.0 * (x @ w), lambda x, w: (x * 2.0) @ w, lambda x, w: (x * 8.0) @ (w / 4.0)],
    ),
    "factors of a sum over an axis": (X, [lambda x: jnp.sum(3.0 * x, 0), lambda x: 3.0 * jnp.sum(x, 0)]),
    "the mean": (X, [lambda x: jnp.mean(x, 1), lambda x: jnp.sum(x, 1) / 6.0, lambda x: jnp.sum(x / 6.0, axis=1)]),
    "positive factors of a maximum": (X, [lambda x: jnp.max(3.0 * x, 0), lambda x: 3.0 * jnp.max(x, 0)]),
    "differences": ((X, Y), [lambda x, y: x - y, lambda x, y: x + -y, lambda x, y: -y + x, lambda x, y: x + y * -1.0]),
    "quotients": ((X, Y), [lambda x, y: x / y, lambda x, y: x * (1.0 / y), lambda x, y: x * y**-1]),
    "squares": (X, [jnp.square, lambda x: x * x, lambda x: x**2, lambda x: lax.integer_pow(x, 2)]),
    "cubes": (X, [lambda x: x * x * x, lambda x: x**3, lambda x: x * jnp.square(x)]),
    "roots": (X, [lambda x: lax.rsqrt(x), lambda x: 1.0 / jnp.sqrt(x)]),
    "monomials": ((X, Y), [lambda x, y: x * y * x, lambda x, y: jnp.square(x) * y, lambda x, y: (y * x) * x]),
    "order of operands": (
        (X, Y),
        [lambda x, y: jnp.maximum(x, y) + x * y, lambda x, y: y * x + jnp.maximum(y, x)],
    ),
    "comparisons": ((X, Y), [lambda x, y: x > y, lambda x, y: y < x]),
    "weak comparisons": ((X, Y), [lambda x, y: x >= y, lambda x, y: y <= x]),
    "casts between floats": (
        X,
        [lambda x: x, lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), lambda x: x.astype(jnp.float16)],
    ),
    "neutral operations": (
        X,
        [lambda x: x, jnp.copy, lambda x: jnp.maximum(x, -jnp.inf), lambda x: lax.min(x, jnp.inf), lambda x: x * 1.0],
    ),
    "selection by a constant": ((X, Y), [lambda x, y: x, lambda x, y: jnp.where(jnp.ones((4, 6), bool), x, y)]),
    "a mask and-ed with true": ((M, X), [lambda m, x: m, lambda m, x: m & jnp.ones((4, 6), bool)]),
    "jit": (X, [jax.jit(lambda x: jnp.sin(x) * 2.0), lambda x: 2.0 * jnp.sin(x)]),
    "relu by name and by maximum": (X, [jax.nn.relu, lambda x: jnp.maximum(x, 0.0), lambda x: jnp.maximum(0.0, x)]),
    "reshape of a reshape": (Q, [lambda q: q.reshape(6, 40), lambda q: q.reshape(48, 5).reshape(6, 40)]),
    "reshape there and back": (Q, [lambda q: q, lambda q: q.reshape(48, 5).reshape(2, 3, 8, 5)]),
    "softmax with and without the stopped maximum": (
        X,
        [
            jax.nn.softmax,
            lambda x: (
                jnp.exp(x - jnp.max(x, -1, keepdims=True))
                / jnp.sum(jnp.exp(x - jnp.max(x, -1, keepdims=True)), -1, keepdims=True)
            ),
        ],
    ),
    "the same parameters of an opaque primitive": (X, [lambda x: jnp.cumsum(x, 0), lambda x: jnp.cumsum(x, axis=0)]),
}


@pytest.mark.parametrize("what", SAME)
def test_every_spelling_is_the_same_reference(what):
    args, fns = SAME[what]
    first, *others = refs(fns, *(args if isinstance(args, tuple) else (args,)))
    for i, other in enumerate(others, 1):
        assert other == first, f"spelling {i} of {what}"


def test_a_transpose_is_the_same_node_seen_with_its_axes_exchanged():
    plain, turned = refs([lambda s: s, lambda s: s.T], S)
    assert plain.nid == turned.nid
    assert (plain.dims, turned.dims) == ((0, 1), (1, 0))


def test_a_factor_stands_on_the_reference_and_not_in_the_node():
    plain, scaled = refs([lambda x, w: x @ w, lambda x, w: -3.0 * (x @ w)], X, W)
    assert (scaled.nid, scaled.dims) == (plain.nid, plain.dims)
    assert (plain.coef, scaled.coef) == (1.0, -3.0)


def test_a_sum_keeps_absolute_factors_and_passes_none_outside():
    (ref, same, twice) = refs(
        [lambda x, y: 0.5 * x + 2.0 * y, lambda x, y: 2.0 * y + x / 2.0, lambda x, y: x + 4.0 * y], X, Y
    )
    assert ref == same
    assert ref.coef == 1.0
    assert twice.nid != ref.nid


def test_a_broadcast_is_a_reference_that_repeats_an_axis():
    (ref, base) = refs([lambda b: jnp.broadcast_to(b, (4, 6)), lambda b: b], B)
    assert (ref.nid, ref.dims) == (base.nid, (~4, 0))


DIFFERENT = {
    "a function and its transpose, square": (S, [lambda s: jnp.sin(s), lambda s: jnp.sin(s).T]),
    "products with either factor transposed, square": (
        (S, S + 1),
        [lambda a, b: a @ b, lambda a, b: a @ b.T, lambda a, b: a.T @ b, lambda a, b: b @ a, lambda a, b: a * b],
    ),
    "contracted and batched axes": (
        (S, S + 1),
        [lambda a, b: jnp.einsum("ij,ij->i", a, b), lambda a, b: jnp.einsum("ij,ij->j", a, b), lambda a, b: (a @ b)[0]],
    ),
    "sums over different axes, square": (S, [lambda s: jnp.sum(s, 0), lambda s: jnp.sum(s, 1)]),
    "sum, maximum and minimum": (S, [lambda s: s.sum(0), lambda s: s.max(0), lambda s: s.min(0)]),
    "bias along columns and along rows, square": ((S, V), [lambda s, v: s + v, lambda s, v: s + v[:, None]]),
    "either order of a difference": ((X, Y), [lambda x, y: x - y, lambda x, y: y - x]),
    "either order of a quotient": ((X, Y), [lambda x, y: x / y, lambda x, y: y / x]),
    "powers": (X, [lambda x: x, lambda x: x**2, lambda x: x**3, lambda x: x**-1, jnp.sqrt, lax.rsqrt]),
    "factors": (X, [lambda x: x, lambda x: 0.5 * x, lambda x: -x]),
    "factors inside a function": (X, [lambda x: jnp.exp(x), lambda x: jnp.exp(2.0 * x), lambda x: jnp.exp(-x)]),
    "a negative factor of a maximum": (X, [lambda x: jnp.max(-x, 0), lambda x: -jnp.max(x, 0)]),
    "either branch of a selection": (
        (M, X, Y),
        [lambda m, x, y: jnp.where(m, x, y), lambda m, x, y: jnp.where(m, y, x)],
    ),
    "strict and weak comparison": ((X, Y), [lambda x, y: x > y, lambda x, y: x >= y, lambda x, y: x < y]),
    "a mask and its opposite": ((M, X), [lambda m, x: m, lambda m, x: ~m]),
    "maximum with other constants": (X, [lambda x: jnp.maximum(x, 0.0), lambda x: jnp.maximum(x, 0.1)]),
    "maximum and minimum": (X, [lambda x: jnp.maximum(x, 0.0), lambda x: jnp.minimum(x, 0.0)]),
    "a stopped gradient": (X, [lambda x: x, lax.stop_gradient]),
    "a named value": (X, [lambda x: x, lambda x: checkpoint_name(x, "kept")]),
    "a barrier": (X, [lambda x: x, lambda x: lax.optimization_barrier(x)]),
    "a cast through integers": (X, [lambda x: x, lambda x: x.astype(jnp.int32).astype(jnp.float32)]),
    "a reshape of a transpose, square": (S, [lambda s: s.reshape(-1), lambda s: s.T.reshape(-1)]),
    "parameters of an opaque primitive": (X, [lambda x: jnp.cumsum(x, 0), lambda x: jnp.cumsum(x, 1)]),
    "a cumulative sum from either end": (X, [lambda x: lax.cumsum(x), lambda x: lax.cumsum(x, reverse=True)]),
    "elementwise functions": (X, [jnp.tanh, jnp.sin, jax.nn.sigmoid, lax.erf, lax.erfc, jnp.exp]),
    "rows and columns of an index": (
        X,
        [lambda x: lax.broadcasted_iota(jnp.int32, (7, 7), 0), lambda x: lax.broadcasted_iota(jnp.int32, (7, 7), 1)],
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_meanings_are_different_references(what):
    args, fns = DIFFERENT[what]
    found = refs(fns, *(args if isinstance(args, tuple) else (args,)))
    assert len(set(found)) == len(fns), found


def test_what_is_only_almost_always_zero_or_one_is_not_folded():
    """x - x is NaN where x is infinite, x / x where it is zero."""
    zero, one = refs([lambda x: x - x, lambda x: x / x], X)
    assert zero.nid != ONE
    assert one.nid != ONE


def test_arithmetic_on_literals_is_folded():
    half, true = refs([lambda x: jnp.sqrt(jnp.float32(4.0)) / 4.0, lambda x: jnp.float32(3.0) > 2.0], X)
    assert (half.nid, half.coef) == (ONE, 0.5)
    assert (true.nid, true.coef) == (ONE, True)


@jax.custom_jvp
def own_jvp(x):
    return jnp.maximum(x, 0.0)


own_jvp.defjvp(lambda primals, tangents: (own_jvp(*primals), tangents[0]))


@jax.custom_vjp
def own_vjp(x):
    return jnp.maximum(x, 0.0)


own_vjp.defvjp(lambda x: (own_vjp(x), None), lambda _, ct: (ct,))


def test_a_users_own_derivative_rule_is_not_looked_into():
    plain, jvp, vjp = refs([lambda x: jnp.maximum(x, 0.0), own_jvp, own_vjp], X)
    assert len({plain.nid, jvp.nid, vjp.nid}) == 3


def test_a_region_is_opaque_and_equal_only_to_itself():
    def loop(x):
        return lax.fori_loop(0, 3, lambda _, c: jnp.sin(c), x)

    first, second, applied = refs([loop, loop, lambda x: jnp.sin(loop(x))], X)
    assert first.nid != second.nid
    assert applied.nid not in (first.nid, second.nid)


def test_two_draws_from_one_key_are_equal_and_from_two_keys_are_not():
    graph = trace(lambda k, j: [jax.random.bits(k, (3,)), jax.random.bits(k, (3,)), jax.random.bits(j, (3,))],
                  jax.random.key(0), jax.random.key(1))  # fmt: skip
    view = CanonicalView(graph.top)
    a, b, c = (view.read(o) for o in graph.top.outputs)
    assert a == b
    assert a.nid != c.nid


def test_a_scalar_input_known_at_the_call_is_a_literal_inside():
    body = trace(lambda x, s: x * s, X, 1.0).top
    free, known = CanonicalView(body), CanonicalView(body, {1: 0.5})
    assert free.read(body.outputs[0]).coef == 1.0
    ref = known.read(body.outputs[0])
    assert (ref.coef, ref.nid) == (0.5, known.ref[body.inputs[0].id].nid)


def test_the_indexes_list_users_ops_and_raw_values():
    graph = trace(lambda x: jnp.sin(x) + jnp.sin(x).T.T * 2.0, X)
    view = CanonicalView(graph.top)
    (sine,) = view.by_op["sin"]
    # two sines, two transposes, the multiplication and the addition all show the one canonical sine
    assert [n.primitive for v in view.values_of[sine] for n in [graph.top.producer[v.id]]].count("sin") == 2
    assert len(view.values_of[sine]) == 6
    assert view.users.get(sine, ()) == ()  # sin + 2 sin is 3 sin: a factor, no node
    out = view.read(graph.top.outputs[0])
    assert (out.nid, out.coef) == (sine, 3.0)
    assert view_node_text(view, sine).startswith(f"c{sine} = sin[4, 6]")
