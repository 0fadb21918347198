"""The numpy interpreter: JAX's own float64 results, at full and at reduced sizes, and a plain refusal of what it does not know."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fusionlab as fl
from fusionlab.graph.interpret.evaluate import ReducedSizes, evaluate
from fusionlab.graph.interpret.limits import CannotEvaluate, CutError, PositionsError, TooLargeError
from fusionlab.kernels import meaning_of
from tests.soundness import generator

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4))
Y = RNG.normal(size=(3, 4))
POS = RNG.uniform(0.1, 0.9, size=(3, 4))
T = RNG.normal(size=(2, 3, 5))
I = RNG.integers(-5, 6, size=(3, 4))  # noqa: E741
J = np.where(RNG.random((3, 4)) < 0.5, 3, -2)
P = RNG.random((3, 4)) < 0.5
R = RNG.random((3, 4)) < 0.5
SPECIAL = np.array([0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, 1e4, -1e4])

UNARY = "exp exp2 expm1 sin cos tan tanh sinh cosh asinh atan floor ceil sign abs neg square cbrt logistic erf erfc is_finite round"
POSITIVE = "log log1p sqrt rsqrt asin acos atanh"
BINARY = "add sub mul div max min atan2 rem eq ne gt ge lt le"


def both(fn, *args):
    """(what the interpreter gives for fn traced in float64, what jax gives)."""
    with jax.enable_x64(True):
        arrays = [jnp.asarray(a) for a in args]
        closed = jax.make_jaxpr(lambda *a: jax.tree.leaves(fn(*a)))(*arrays)
        want = [np.asarray(o) for o in jax.tree.leaves(fn(*arrays))]
    return evaluate(closed, [np.asarray(a) for a in args]), want


def agree(fn, *args):
    for got, want in zip(*both(fn, *args), strict=True):
        assert got.shape == want.shape
        assert got.dtype.kind == want.dtype.kind
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", UNARY.split())
def test_a_function_of_one_argument_is_jaxs_own_in_float64(name):
    agree(lambda x: getattr(lax, name)(x), X * 2)


@pytest.mark.parametrize("name", POSITIVE.split())
def test_a_function_of_a_limited_argument_is_jaxs_own_in_float64(name):
    agree(lambda x: getattr(lax, name)(x), POS)


@pytest.mark.parametrize("name", BINARY.split())
def test_a_function_of_two_arguments_is_jaxs_own_in_float64(name):
    agree(lambda x, y: getattr(lax, name)(x, y), X, Y)


@pytest.mark.parametrize("name", "tanh exp logistic erf max min gt ge eq".split())
def test_zeros_infinities_and_nan_come_out_as_in_jax(name):
    args = (SPECIAL[:, None] + np.zeros((1, 9)), SPECIAL[None] + np.zeros((9, 1)))
    agree(lambda *a: getattr(lax, name)(*a), *args[: 1 if name in ("tanh", "exp", "logistic", "erf") else 2])


PROGRAMS = {
    "pow": (lambda x, y: lax.pow(x, y), POS, Y),
    "integer_pow": (lambda x: [x**3, x**-2, x**0], X),
    "integer division rounds to zero": (lambda i, j: [lax.div(i, j), lax.rem(i, j), i * j - i], I, J),
    "masks": (lambda p, r: [p & r, p | r, p ^ r, ~p], P, R),
    "select by a mask": (lambda p, x, y: jnp.where(p, x, y), P, X, Y),
    "select among three": (lambda i, x, y: lax.select_n(i, x, y, x * y), np.abs(I).astype(np.int32) % 3, X, Y),
    "clamp": (lambda x: jnp.clip(x, -0.5, 0.25), X),
    "casts": (lambda x, p: [x.astype(jnp.int32), p.astype(jnp.float64), (x > 0).astype(jnp.int8)], X * 3, P),
    "broadcast": (lambda x: [jnp.broadcast_to(x, (2, 3, 4)), x[:, None, :] + x[None, :, :1]], X),
    "layout": (lambda t: [t.T, jnp.moveaxis(t, 0, 1), t.reshape(6, 5), t.reshape(3, 2, 5, 1), t[None][0]], T),
    "products": (
        lambda t: [
            jnp.einsum("btc,bsc->bts", t, t),
            jnp.einsum("btc,bsc->ts", t, t),
            jnp.einsum("btc,bsd->bcd", t, t),
            jnp.tensordot(t, t, [[0, 2], [0, 2]]),
        ],
        T,
    ),
    "reductions": (lambda x: [x.sum(0), x.max(1), x.min((0, 1)), jnp.mean(x, 1, keepdims=True)], X),
    "slices": (lambda x: [x[1:], x[:, ::2], x[-1]], X),
    "logical reductions": (lambda p: [p.all(0), p.any(1)], P),
    "argmax": (lambda x: jnp.argmax(x, axis=1), X),
    "index grids": (lambda x: x + jnp.arange(3)[:, None] * lax.broadcasted_iota(jnp.float64, (3, 4), 1), X),
    "triangles": (lambda x: jnp.tril(x) + jnp.triu(x, 1), X),
    "softmax": (jax.nn.softmax, X),
    "log softmax": (jax.nn.log_softmax, X),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=0), X),
    "activations": (
        lambda x: [jax.nn.relu(x), jax.nn.relu6(x), jax.nn.silu(x), jax.nn.softplus(x), jax.nn.leaky_relu(x)],
        X * 4,
    ),
    "both gelus": (lambda x: [jax.nn.gelu(x), jax.nn.gelu(x, approximate=False)], X),
    "layer norm": (lambda x: (x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-5), X),
    "jit in jit": (jax.jit(lambda x: jax.jit(jnp.sin)(x) * 2), X),
    "remat": (jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))), X),
    "stop_gradient": (lambda x: lax.stop_gradient(x) * x, X),
    "copies side by side": (lambda x, t: [lax.tile(x, (2, 3)), jnp.tile(t[:, :1], (3, 2, 1)), jnp.tile(x, 4)], X, T),
    "the first of the least": (lambda x: [jnp.argmin(x, 1), jnp.argmax(x, 0), lax.cummin(x, 1)], X),
    "shifts": (lambda i: [i >> 1, lax.shift_right_logical(i, jnp.int32(1))], I.astype(np.int32)),
    "barrier": (lambda x: lax.optimization_barrier(x) + 1, X),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_jaxs_own_in_float64(name):
    fn, *args = PROGRAMS[name]
    agree(fn, *args)


GRADIENTS = {
    "relu": lambda x: jax.nn.relu(x),
    "maximum with ties": lambda x: jnp.maximum(x, 0),
    "where": lambda x: jnp.where(x > 0, x, 0.0),
    "gelu_tanh": lambda x: jax.nn.gelu(x),
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "softmax": jax.nn.softmax,
    "softmax by hand": lambda x: (
        jnp.exp(x - x.max(-1, keepdims=True)) / jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)
    ),
    "product": lambda x: jnp.einsum("mk,nk->mn", x, x) @ x,
    "norm": lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_a_program_is_jaxs_own_in_float64(name):
    agree(jax.grad(lambda x: jnp.sum(GRADIENTS[name](x) * jnp.cos(x))), np.concatenate([X, np.zeros((1, 4))]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_float_of_the_program_is_evaluated_in_float64(dtype):
    """Casts are the identity: (x + 2^-20) - x keeps the 2^-20 that the program's own dtype would lose."""

    def fn(x, y):
        return ((x + y).astype(jnp.float32) - x).astype(dtype)

    spec = jax.ShapeDtypeStruct((), dtype)
    (out,) = evaluate(jax.make_jaxpr(fn)(spec, spec), [np.float64(3.0), np.float64(2.0**-40)])
    assert out.dtype == np.float64
    assert out == 2.0**-40


def test_a_literal_keeps_the_value_it_has_in_its_own_dtype():
    spec = jax.ShapeDtypeStruct((), jnp.bfloat16)
    (out,) = evaluate(jax.make_jaxpr(lambda x: x * jnp.bfloat16(0.1))(spec), [np.float64(1.0)])
    assert out == float(jnp.bfloat16(0.1)) != 0.1


# -- reduced sizes ----------------------------------------------------------------------------------------------------


def at_reduced(fn, real, table):
    """fn traced at `real` shapes, evaluated with the axes shrunk; and fn itself on the small arrays."""
    closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in real))
    small = [np.random.default_rng(i).normal(size=[table.get(s, s) for s in shape]) for i, shape in enumerate(real)]
    cut: dict[int, tuple[int, int]] = {}
    while True:
        try:
            return evaluate(closed, small, ReducedSizes(table, cut=cut))[0], small
        except CutError as error:
            cut |= {error.real: error.ends}  # the interpreter raises no other one for the same axis


def test_a_layer_of_8192_rows_is_evaluated_on_3():
    """The 6 features stand for 768 that repeat: a sum over them counts each 128 times."""

    def layer(x, w, b):
        return jnp.maximum(x @ w + b, 0.0)

    got, (x, w, b) = at_reduced(layer, [(8192, 768), (768, 512), (512,)], {8192: 3, 768: 6, 512: 4})
    np.testing.assert_allclose(got, np.maximum(np.tile(x, (1, 128)) @ np.tile(w, (128, 1)) + b, 0.0), rtol=1e-13)


@pytest.mark.parametrize("entries", [6, 7])
def test_a_literal_that_holds_a_size_keeps_its_meaning(entries):
    """A mean of 768, and how many they are, where the 1/768 stands in the program."""

    closed = jax.make_jaxpr(lambda x: (jnp.var(x, -1), jnp.sum(x > -jnp.inf, -1)))(
        jax.ShapeDtypeStruct((512, 768), jnp.float32)
    )
    x = np.random.default_rng(0).normal(size=(3, entries))
    variance, count = evaluate(closed, [x], ReducedSizes({512: 3, 768: entries}))
    np.testing.assert_allclose(variance, np.var(x, -1), rtol=1e-6)
    np.testing.assert_array_equal(count, [768] * 3)


def test_merged_and_split_axes_learn_their_reduced_size():
    def heads(x):  # [T, E] -> [T, H, D] -> [T, E], merged again over all rows and features
        y = x.reshape(512, 12, 64).swapaxes(0, 1)
        return y.reshape(12 * 512, 64)

    table = {512: 3, 768: 8, 12: 2, 64: 4}
    got, (x,) = at_reduced(heads, [(512, 768)], table)
    np.testing.assert_array_equal(got, x.reshape(3, 2, 4).swapaxes(0, 1).reshape(6, 4))


def test_merging_rows_learns_the_product_and_uses_it_afterwards():
    def layer(x):
        y = x.reshape(-1, 64)
        return (y + jnp.zeros((2048, 1))).reshape(16, 128, 64)

    got, (x,) = at_reduced(layer, [(16, 128, 64)], {16: 2, 128: 3, 64: 5})
    np.testing.assert_array_equal(got, x)


def test_a_split_that_does_not_fit_the_reduced_sizes_is_refused():
    with pytest.raises(CannotEvaluate, match="axis size 768 would reduce to 7 and to 8"):
        at_reduced(lambda x: x.reshape(512, 12, 64), [(512, 768)], {512: 3, 768: 7, 12: 2, 64: 4})
    with pytest.raises(CannotEvaluate, match="reshape"):
        at_reduced(lambda x: x.reshape(12, 16, 128), [(384, 64)], {384: 7, 64: 4, 12: 2, 16: 3, 128: 5})


def halves(x):  # [.., 8] -> [.., 8], the halves changed
    return jnp.concatenate([-x[..., 4:], x[..., :4]], -1)


PLACED = {  # name -> (program, shape, reduced sizes, the same program at those)
    "an axis that stays": (lambda x: x[:, 1:5], (512, 8), {512: 3}, lambda x: x[:, 1:5]),
    "three parts": (
        lambda x: jnp.concatenate(jnp.split(x, 3, -1)[::-1], -1),
        (512, 2304),
        {512: 3, 768: 4, 2304: 12},
        lambda x: jnp.concatenate(jnp.split(x, 3, -1)[::-1], -1),
    ),
    "a part": (lambda x: x[:, 768:1536], (5, 2304), {768: 4, 2304: 12}, lambda x: x[:, 4:8]),
    "halves": (halves, (512, 8), {512: 3}, halves),
    "every second": (lambda x: x[:, 1::2], (5, 128), {128: 6, 64: 3}, lambda x: x[:, 1::2]),
    "parts of two sizes": (
        lambda x: jnp.split(x, [512, 768], -1)[1] * 2,
        (5, 1024),
        {1024: 8, 512: 4, 256: 2},
        lambda x: x[:, 4:6] * 2,
    ),
    "one written": (
        lambda x: lax.dynamic_update_slice(x, x[:1] * 2, (2, 0)),
        (512, 768),
        {512: 512, 768: 4},
        lambda x: np.concatenate([x[:2], x[:1] * 2, x[3:]]),
    ),
    "one read": (lambda x: lax.dynamic_slice(x, (0, 1), (512, 1)), (512, 768), {512: 3, 768: 4}, lambda x: x[:, 1:2]),
    "stacked": (lambda x: jnp.stack([x, -x], 1), (512, 8), {512: 3}, lambda x: np.stack([x, -x], 1)),
    "copied": (lambda x: lax.tile(x, (1, 2)), (5, 32), {32: 3}, lambda x: np.tile(x, (1, 2))),
    "copied, and one of the copies cut out": (
        lambda x: lax.tile(x, (2, 2))[:, 768:],
        (5, 768),
        {768: 4, 1536: 8},
        lambda x: np.tile(x, (2, 1)),
    ),
    "an end cut off": (lambda x: x[:, :-1], (5, 768), {768: 5, 767: 4}, lambda x: x[:, :-1]),
    "both ends cut off": (lambda x: x[:, 1:-2], (5, 768), {768: 8, 765: 5}, lambda x: x[:, 1:-2]),
    "many entries of both ends cut off": (
        lambda x: x[:, 100:-2],
        (5, 768),
        {768: 9, 666: 3},
        lambda x: x[:, 4:-2],
    ),
    "sums of an axis of which many entries are cut off, and of what is left": (
        lambda x: jnp.stack([x[:, 100:-2].sum(1), jnp.pad(x[:, 100:-2], ((0, 0), (100, 2))).sum(1), x.sum(1)]),
        (5, 768),
        {768: 9, 666: 3},
        lambda x: np.stack(
            [x[:, 4:-2].sum(1) * 222] * 2 + [x[:, :4].sum(1) * 25 + x[:, 4:-2].sum(1) * 222 + x[:, -2:].sum(1)]
        ),
    ),
    "sums of an axis that is cut twice": (
        lambda x: jnp.stack([x[:, 100:].sum(1), x[:, 100:][:, :-60].sum(1), x.sum(1)]),
        (5, 768),
        {768: 11, 668: 7, 608: 3},
        lambda x: np.stack(
            [
                x[:, 4:7].sum(1) * 608 / 3 + x[:, 7:].sum(1) * 15,
                x[:, 4:7].sum(1) * 608 / 3,
                x[:, :4].sum(1) * 25 + x[:, 4:7].sum(1) * 608 / 3 + x[:, 7:].sum(1) * 15,
            ]
        ),
    ),
    "an end cut off and padded": (
        lambda x: jnp.pad(x[:, 2:], ((0, 0), (2, 0))),
        (5, 768),
        {768: 6, 766: 4},
        lambda x: np.pad(x[:, 2:], ((0, 0), (2, 0))),
    ),
    "sums of an axis that is cut, and of what is left": (
        lambda x: jnp.stack([x[:, :-1].sum(1), jnp.pad(x[:, :-1], ((0, 0), (0, 1))).sum(1), x.sum(1)]),
        (5, 768),
        {768: 5, 767: 4},
        lambda x: np.stack([x[:, :-1].sum(1) * 767 / 4] * 2 + [x[:, :-1].sum(1) * 767 / 4 + x[:, -1]]),
    ),
    "a product over an axis of two, one of which is cut": (
        lambda x: jnp.stack(
            [x[:, 1:].sum((0, 1)), jnp.ones(5 * 768) @ jnp.pad(x[:, 1:], ((0, 0), (1, 0))).reshape(-1)]
        ),
        (5, 768),
        {768: 5, 767: 4, 3840: 25},
        lambda x: np.stack([x[:, 1:].sum() * 767 / 4] * 2),
    ),
    "padded to twice": (
        lambda x: jnp.pad(x, ((0, 0), (0, 768))),
        (5, 768),
        {768: 4, 1536: 8},
        lambda x: np.pad(x, ((0, 0), (0, 4))),
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_positions_follow_an_axis_that_is_reduced_in_parts(name):
    fn, shape, table, small = PLACED[name]
    got, (x,) = at_reduced(fn, [shape], table)
    np.testing.assert_allclose(got, small(x), rtol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "three parts",
        "a part",
        "every second",
        "parts of two sizes",
        "padded to twice",
        "copied, and one of the copies cut out",
        "an end cut off",
        "both ends cut off",
    ],
)
def test_an_axis_of_parts_that_is_reduced_to_something_else_is_told_what_it_would_have_to_be(name):
    fn, shape, table, _ = PLACED[name]
    largest = max(table)
    with pytest.raises(CannotEvaluate, match=f"axis size {largest} would reduce to 7 and to {table[largest]}"):
        at_reduced(fn, [shape], table | {largest: 7})


def test_an_axis_that_is_summed_before_it_is_cut_is_told_how_many_entries_it_needs():
    with pytest.raises(CannotEvaluate, match="axis size 768 would reduce to 4 and to 7"):
        at_reduced(lambda x: (x @ x)[20:], [(768, 768)], {768: 4, 748: 3})


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: x[3:9:2], "entries 3:9:2 of 512 at reduced sizes"),
        (lambda x: x[1:] * x[:-1], "entries 0:511:1 of 512 at reduced sizes"),
        (lambda x: x[:1], "entries 0:1:1 of 512 at reduced sizes"),
        (lambda x: jnp.pad(x, ((3, 0), (0, 0))), "reduce"),
        (lambda x: lax.dynamic_slice(x, (7, 0), (1, 8)), "dynamic_slice at entry 7 of 3 at reduced sizes"),
        (lambda x: x[::-1], "rev at reduced sizes"),
        (lambda x: lax.dynamic_update_slice(x, jnp.ones((1, 8)), (511, 0)), "dynamic_update_slice at entry 511 of 3"),
        (lambda x: x.at[1].set(1.0), "scatter along an axis at reduced sizes"),
        (lambda x: jnp.concatenate([x, jnp.ones((1, 8))]), "axis size 513 would reduce to 513 and to 4"),
    ],
)
def test_positions_that_mean_nothing_along_a_reduced_axis_are_refused(fn, said):
    with pytest.raises(CannotEvaluate, match=said):
        at_reduced(fn, [(512, 8)], {512: 3})


def test_an_axis_is_reversed_while_another_one_is_reduced():
    got, (x,) = at_reduced(lambda x: lax.rev(x, (1,)), [(512, 8)], {512: 3})
    np.testing.assert_array_equal(got, x[:, ::-1])


def test_entries_of_an_axis_are_overwritten_while_another_one_is_reduced():
    got, (x,) = at_reduced(lambda x: x.at[:, 5:].set(-jnp.inf), [(512, 8)], {512: 3})
    np.testing.assert_array_equal(got, np.where(np.arange(8) < 5, x, -np.inf))


def test_two_reduced_sizes_for_one_axis_size_are_refused():
    sizes = ReducedSizes({8: 2})
    sizes.learn(16, 4)
    with pytest.raises(CannotEvaluate, match="axis size 16 would reduce to 4 and to 5"):
        sizes.learn(16, 5)


def test_a_captured_array_is_cut_to_the_reduced_corner():
    table = jnp.arange(40.0).reshape(10, 4)
    got, (x,) = at_reduced(lambda x: x + table, [(10, 4)], {10: 3})
    np.testing.assert_array_equal(got, x + np.asarray(table)[:3])


# -- control flow, positions and random bits -------------------------------------------------------------------------


def loss(fn):
    return lambda x: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fn(x)))


STRUCTURED = {
    "scan": lambda x: lax.scan(lambda c, t: (c * t.sum(), c + t), x[0, 0], x),
    "scan backwards": lambda x: lax.scan(lambda c, t: (c + t.sum(), c * t), x[0, 0], x, reverse=True),
    "scan of no steps": lambda x: lax.scan(lambda c, t: (c + t.sum(), c * t), x[0, 0], x[:0]),
    "a counted loop": lambda x: lax.fori_loop(0, 3, lambda i, c: c * jnp.cos(x) + i, x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda a: a * x, lambda a: a, x),
    "the other branch": lambda x: lax.cond(x[0, 0] <= 0, lambda a: a * x, lambda a: a, x),
    "cond with masks inside": lambda x: lax.cond(x[0, 0] > 0, jax.nn.relu, jnp.sin, x),
    "switch, index clamped": lambda x: lax.switch(7, [lambda a: a, lambda a: a * x, lambda a: a**3], x),
    "remat": jax.checkpoint(lambda x: jnp.sin(jnp.exp(x))),
    "barrier": lambda x: lax.optimization_barrier((x, x + 1)),
    "cut and joined": lambda x: jnp.concatenate([x[:, 1:], x[::-1], *jnp.split(x, 2, axis=1)], axis=1),
    "stacked": lambda x: [jnp.stack([x, x * x], 1), *jnp.unstack(x, axis=1)],
    "padded": lambda x: lax.pad(x, 0.5, ((1, 0, 2), (-1, 3, 0))),
    "dynamic slice, clamped": lambda x: lax.dynamic_slice(x, (2, 1), (2, 2)),
    "dynamic update": lambda x: lax.dynamic_update_slice(x, x[:1, :2] ** 2, (1, 9)),
    "cumulative": lambda x: [jnp.cumsum(x, 0), jnp.cumsum(x, 1), lax.cumsum(x, 0, reverse=True)],
    "rolled": lambda x: jnp.roll(x, 1, 0),
    "gathered": lambda x: [x[jnp.array([0, 1, 1])], x[:, jnp.array([0, 2])]],
    "dropped": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x / 0.5, 0),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_programs_and_their_gradients_are_jaxs_own(name):
    fn = STRUCTURED[name]
    agree(lambda x: [fn(x), jax.grad(loss(fn))(x)], X)


def test_a_while_loop_is_jaxs_own():
    agree(
        lambda x: lax.while_loop(lambda c: (c[0] < 9) & (c[1].sum() < 50), lambda c: (c[0] + 1, c[1] * 2), (0, x**2)), X
    )


@pytest.mark.parametrize("fn", [lambda x: jnp.cumsum(x, 0), lambda x: lax.scan(lambda c, t: (c, t), 0, x)[1]])
def test_positions_and_loops_have_no_meaning_at_reduced_sizes(fn):
    with pytest.raises(CannotEvaluate, match=r"(cumsum|scan) at reduced sizes"):
        at_reduced(fn, [(512, 4)], {512: 3})


def test_rounded_every_result_has_the_precision_of_its_own_dtype():
    x = np.array([1.0, 1 / 3])
    closed = jax.make_jaxpr(lambda x: [x * 3, x.astype(jnp.float32) * 3])(jax.ShapeDtypeStruct((2,), jnp.bfloat16))
    low, high = evaluate(closed, [x], rounded=True)
    np.testing.assert_array_equal(low, (x * 3).astype(jnp.bfloat16).astype(float))
    np.testing.assert_array_equal(high, (x * 3).astype(np.float32).astype(float))
    assert low.dtype == high.dtype == np.float64
    np.testing.assert_array_equal(evaluate(closed, [x])[0], x * 3)


# -- refusals and our own primitives ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (jnp.sort, "sort"),
        (lambda x: jnp.linalg.cholesky(x[:, :3]), "cholesky"),
        (lambda x: lax.conv(x[None, None], x[None, None, :2, :2], (1, 1), "SAME"), "conv"),
        (lambda x: jax.random.normal(jax.random.key(0), x.shape) + x, "erf_inv"),
    ],
    ids=["sort", "cholesky", "convolution", "inverse erf"],
)
def test_an_unknown_primitive_is_named_not_guessed(fn, name):
    with pytest.raises(CannotEvaluate, match=name):
        evaluate(jax.make_jaxpr(fn)(jnp.asarray(X, jnp.float32)), [X])


def test_a_fused_op_is_evaluated_by_its_meaning():
    w, b = RNG.normal(size=(4, 6)), RNG.normal(size=6)
    closed = jax.make_jaxpr(lambda x, w, b: fl.ops.gemm_epilogue(x, w, b, activation="relu"))(
        *(jnp.asarray(a, jnp.float32) for a in (X, w, b))
    )
    with pytest.raises(CannotEvaluate, match="gemm_epilogue"):
        evaluate(closed, [X, w, b])
    (out,) = evaluate(closed, [X, w, b], None, meaning_of)
    np.testing.assert_allclose(out, np.maximum(X @ w + b, 0), rtol=1e-13)


def test_bits_and_rounding_are_the_programs():
    """Zeros come in from the left of a negative integer; halves go away from zero, or to even where that is asked for."""
    x = jnp.array([-8, 7], jnp.int32)
    closed = jax.make_jaxpr(lambda x: lax.shift_right_logical(x, jnp.ones_like(x)))(x)
    np.testing.assert_array_equal(evaluate(closed, [np.asarray(x)])[0], [2147483644, 3])
    halves = np.array([-1.5, -0.5, 0.5, 2.5])
    away = jax.make_jaxpr(lax.round)(halves)
    even = jax.make_jaxpr(lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN))(halves)
    np.testing.assert_array_equal(evaluate(away, [halves])[0], [-2, -1, 1, 3])
    np.testing.assert_array_equal(evaluate(even, [halves])[0], [-2, 0, 0, 2])


def test_a_weakly_typed_literal_is_the_number_its_dtype_holds():
    closed = jax.make_jaxpr(lambda: jnp.full(3, 0.1, jnp.float32))()
    np.testing.assert_array_equal(evaluate(closed, [])[0], np.full(3, np.float32(0.1), np.float64))


def test_what_would_not_fit_into_memory_is_refused_before_it_is_made():
    def scores(x):
        return x @ x.T

    closed = jax.make_jaxpr(scores)(jax.ShapeDtypeStruct((1 << 20, 8), jnp.float32))
    most = 1 << 24, 1 << 30
    with pytest.raises(TooLargeError, match="dot_general"):
        evaluate(closed, [np.ones((1 << 20, 3))], ReducedSizes({8: 3}, most=most))
    (small,) = evaluate(closed, [np.ones((5, 3))], ReducedSizes({8: 3, 1 << 20: 5}, most=most))
    assert small.shape == (5, 5)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.reshape(4, 8, 6) * (jnp.arange(8)[:, None] < 5),
        lambda x: jnp.argmax(x.reshape(4, 8, 6), 1),
        lambda x: lax.dynamic_update_slice(x.reshape(4, 8, 6), jnp.zeros((4, 1, 6)), (0, 2, 0)),
        lambda x: x.reshape(4, 8, 6)[:, :3],
    ],
)
def test_positions_along_a_part_that_is_reduced_mean_nothing(fn):
    closed = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((4, 48), jnp.float32))
    assert evaluate(closed, [np.ones((4, 48))])
    with pytest.raises(PositionsError, match="8"):
        evaluate(closed, [np.ones((4, 30))], ReducedSizes({48: 30, 8: 5}, parts=frozenset({8})))


def test_the_derivative_of_two_scans_in_a_row_holds_no_call_that_cannot_be_evaluated():
    """jax 0.11 calls the known part of a scan by a primitive of its own, `eval_jaxpr`, where its operands are stacked in the program."""
    program = generator.program(1000220)
    arguments = [jnp.asarray(a, p.dtype) for a, p in zip(program.arguments("normal"), program.params, strict=True)]

    def gradients(*args):
        outs, pull = jax.vjp(program.fn, *args)
        return pull([jnp.ones_like(o) for o in outs])

    graph = fl.trace(gradients, *arguments)
    assert {"scan", "eval_jaxpr"} & {n.primitive for n in graph.nodes()} == {"scan"}
    want = jax.jit(gradients)(*arguments)
    got = evaluate(graph.top.jaxpr, [np.asarray(a, np.float64) for a in arguments])
    for a, b in zip(jax.tree.leaves(want), got, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_a_reshape_may_transpose_first(order):
    """As jax.vmap of a convolution writes it; on sizes no two of which are alike, and on equal ones."""
    for shape in ((2, 3, 5), (3, 3, 3)):
        x = RNG.normal(size=shape)
        closed = jax.make_jaxpr(lax.reshape, static_argnums=(1, 2))(
            x, (shape[order[0]], x.size // shape[order[0]]), order
        )
        assert closed.eqns[0].params["dimensions"] == order
        np.testing.assert_array_equal(evaluate(closed, [x])[0], x.transpose(order).reshape(shape[order[0]], -1))
