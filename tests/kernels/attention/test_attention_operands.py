"""dot_product_attention with bias, mask, factors, softcap: every form against plain jnp code in float64."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.errors import ArgumentError
from fusionlab.kernels import OPS
from fusionlab.kernels.ops.dot_product_attention.blockwise import attention as blockwise
from fusionlab.ops import dot_product_attention
from fusionlab.testing.tolerances import tolerance

from ..transformations import assert_agree, assert_same, loss, primitives

OP = OPS["dot_product_attention"]
IMPLEMENTATIONS = ("xla", "xla_blockwise")
B, T, S, N, H, HV = 2, 9, 6, 2, 4, 3
# A bias, mask or factors over scores of (B, N, T, S).
SHAPES = ((T, S), (1, 1, T, S), (B, 1, 1, S), (1, N, 1, 1), (B, N, T, S), (S,), (N, T, 1), (1, N, T, S), (B, 1, T, S))


def plain(q, k, v, *, bias=None, mask=None, factors=None, **attrs):
    """What a user writes, with 0 for a row that sees no key."""
    s = jnp.einsum("...tnh,...snh->...nts", q, k) * attrs.get("scale", q.shape[-1] ** -0.5)
    softcap = attrs.get("softcap")
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    if mask is not None:
        s = jnp.where(mask, s, attrs.get("mask_value", -jnp.inf))
    if attrs.get("is_causal"):
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    blind = jnp.all(s == -jnp.inf, -1, keepdims=True)
    p = jnp.where(blind, 0, jax.nn.softmax(jnp.where(blind, 0, s), -1))
    if factors is not None:
        p = p * factors * attrs.get("factors_scale", 1.0)
    return jnp.einsum("...nts,...snh->...tnh", p, v)


def numbers(*shape, dtype="float64", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def data(dtype="float64", batch=(B,), t=T):
    return tuple(numbers(*batch, *s, dtype=dtype, seed=i) for i, s in enumerate(((t, N, H), (S, N, H), (S, N, HV))))


def holes(*shape, seed=5):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.7)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 4 rows of one head, the last of one row; causal rows in 2 groups."""
    monkeypatch.setattr(blockwise, "_FORWARD_SCORES", 4 * S)
    monkeypatch.setattr(blockwise, "_BACKWARD_SCORES", 4 * S)
    monkeypatch.setattr(blockwise, "_LEAST_ROWS", 4)
    monkeypatch.setattr(blockwise, "_CAUSAL_GROUPS", 2)


FORMS = tuple(itertools.product((False, True), (False, True), (None, "float", "bool"), (False, True), (None, 1.5)))


def form(number):
    """(float operands, bool operands, attributes) of one of FORMS, its operands in ever other shapes."""
    bias, mask, factors, is_causal, softcap = FORMS[number]
    floats, bools = {}, {}
    if bias:
        floats["bias"] = numbers(*SHAPES[number % 9], seed=3)
    if mask:
        bools["mask"] = holes(*SHAPES[(number + 5) % 9])
    if factors == "float":
        floats["factors"] = numbers(*SHAPES[(number + 3) % 9], seed=4)
    if factors == "bool":
        bools["factors"] = holes(*SHAPES[(number + 2) % 9], seed=6)
    mask_value = (-1e9, -2.0, float(np.finfo("float32").min))[number % 3]
    return floats, bools, {"is_causal": is_causal, "softcap": softcap, "mask_value": mask_value, "factors_scale": 1.3}


def results(f, args, floats, bools, attrs, ct):
    """Result, gradients and tangent."""
    g = lambda q, k, v, floats: f(q, k, v, **floats, **bools, **attrs)  # noqa: E731
    moving = (*args, floats)
    out, pull = jax.vjp(g, *moving)
    return out, pull(ct), jax.jvp(g, moving, jax.tree.map(lambda a: jnp.cos(jnp.nan_to_num(a)), moving))[1]


def both(implementation, *case):
    """The op's results and plain code's. Plain code, and the op where it is that, need not be compiled."""
    fused = functools.partial(dot_product_attention, implementation=implementation)
    with jax.disable_jit():
        want = results(plain, *case)
        got = results(fused, *case) if implementation == "xla" else None
    return jax.jit(lambda: results(fused, *case))() if got is None else got, want


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_every_form_equals_plain_code(number, x64):
    assert_same(*both("xla", data(), *form(number), numbers(B, T, N, HV, seed=7)), 1e-11)


# Between them: each operand with and without every other, every broadcast shape, bool and float factors.
@pytest.mark.parametrize("number", [32, 29, 40, 19, 22, 47, 14, 9, 36, 45])
def test_blockwise_equals_plain_code(number, x64, small_blocks):
    assert_same(*both("xla_blockwise", data(), *form(number), numbers(B, T, N, HV, seed=7)), 1e-11)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "own"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")])
def test_narrow_dtypes_are_near_float64_and_each_gradient_has_its_operands_dtype(dtype, own, implementation, x64):
    args = data(dtype)
    floats = {"bias": numbers(N, T, S, dtype=own, seed=3), "factors": numbers(N, 1, 1, dtype=own, seed=4)}
    bools, attrs, ct = {"mask": holes(T, S)}, {"mask_value": -1e9, "softcap": 2.0}, numbers(B, T, N, HV, dtype=dtype)
    fused = functools.partial(dot_product_attention, implementation=implementation)
    got = jax.jit(lambda: results(fused, args, floats, bools, attrs, ct))()
    wide = jax.tree.map(lambda a: a.astype("float64"), (args, floats))
    want = jax.jit(lambda: results(plain, *wide, bools, attrs, ct.astype("float64")))()
    row = tolerance(dtype if own != "bfloat16" else own, 4096)
    assert jax.tree.map(lambda a: a.dtype, got[1]) == jax.tree.map(lambda a: a.dtype, (*args, floats))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        atol = row.atol * np.abs(w).max()
        np.testing.assert_allclose(np.asarray(g, np.float64), w, rtol=row.rtol, atol=atol)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("fill", [-1e4, -1e9, float(np.finfo("float32").min), -np.inf])
@pytest.mark.parametrize("is_causal", [True, False])  # with it, row 5 sees no key that is not masked but the last
def test_a_row_masked_as_a_whole_is_what_plain_code_makes_of_it(is_causal, fill, implementation, small_blocks):
    """In float32 the logsumexp of such a row is the fill itself: the weights 1/S cannot be recomputed from it."""
    args, ct = data("float32"), numbers(B, T, N, HV, dtype="float32")
    mask = holes(T, S).at[2].set(False).at[5].set(False).at[5, 5].set(True)
    attrs = {"mask_value": fill, "is_causal": is_causal}
    got, want = both(implementation, args, {}, {"mask": mask}, attrs, ct)
    assert_same(got, want, 2e-6)
    np.testing.assert_array_equal(np.isnan(got[0]), np.isnan(want[0]))
    if np.isfinite(fill):
        np.testing.assert_allclose(got[0][:, 2], args[2][:, : 3 if is_causal else S].mean(1), rtol=1e-5, atol=1e-6)
    else:
        assert not got[0][:, 2].any()
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(got))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("far", [-1e9, float(np.finfo("float32").min), -np.inf])
def test_a_bias_that_masks_whole_rows_is_what_plain_code_makes_of_it(far, implementation, small_blocks):
    args, ct = data("float32"), numbers(B, T, N, HV, dtype="float32")
    floats = {"bias": jnp.where(holes(T, S).at[2].set(False), 0.0, jnp.float32(far))}
    # So small a scale that a far bias plus a score is the bias.
    assert_same(*both(implementation, args, floats, {}, {"scale": 1e-3}, ct), 2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("operand", "at", "value"),
    [(1, np.s_[0, 2], jnp.nan), (0, np.s_[0, 1, :, 0], jnp.nan), (1, np.s_[1, 2], jnp.inf)],
    ids=["a key", "a query", "infinite"],
)
def test_a_nan_reaches_no_gradient_that_it_does_not_reach_in_plain_code(
    operand, at, value, implementation, x64, small_blocks
):
    args = list(data())
    args[operand] = args[operand].at[at].set(value)
    mask = holes(T, S).at[:, 0].set(True).at[:, 2].set(False)
    bias = jnp.zeros((T, S)).at[:, 2].set(jnp.inf)
    case = (tuple(args), {"bias": bias}, {"mask": mask}, {"softcap": 3.0}, jnp.ones((B, T, N, HV)))
    got, want = both(implementation, *case)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.isnan(g), np.isnan(w))
    assert np.isfinite(got[1][3]["bias"][2:]).all()


MASK = np.asarray([[True, True, False, True], [False] * 4, [True, False, True, True]])
EVERYTHING = {"mask": MASK, "mask_value": -1e9, "softcap": 1.7, "factors_scale": 0.6, "is_causal": True}
SMALL = ((3, 2, 2), (4, 2, 2), (4, 2, 3), (3, 4), (2, 1, 1))  # query, key, value, bias, factors


def with_everything(f, **attrs):
    return lambda q, k, v, b, w: f(q, k, v, bias=b, factors=w, **EVERYTHING, **attrs)


@pytest.mark.parametrize(
    "name",
    [
        *("jit", "no_jit", "jvp_of_last", "linear_transpose_of_vjp", "hessian", "grad_of_grad", "grad_of_jvp", "scan"),
        *("vmap_first", "vmap_all", "vmap_second", "vmap_of_grad", "grad_of_vmap", "checkpoint", "checkpoint_policy"),
    ],
)
def test_every_transformation_equals_plain_code(name, x64):
    args = tuple(numbers(*s, seed=i) for i, s in enumerate(SMALL))
    assert_agree(with_everything(dot_product_attention), with_everything(plain), args, (name,), 1e-10)


@pytest.mark.parametrize("name", ["hessian", "vmap_of_grad", "grad_of_vmap"])
def test_blockwise_takes_the_transformations_too(name, x64, small_blocks):
    args = tuple(numbers(*s, seed=i) for i, s in enumerate(SMALL))
    fused = with_everything(dot_product_attention, implementation="xla_blockwise")
    assert_agree(fused, with_everything(plain), args, (name,), 1e-10)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("slot", ["mask", "bias", "factors"])
def test_one_operand_may_be_batched_alone(slot, axis, x64):
    q, k, v = data(batch=())
    floats = {"bias": numbers(T, S, seed=3), "factors": numbers(N, 1, 1, seed=4)}
    given = {**floats, "mask": holes(T, S)}
    axis = min(axis, given[slot].ndim)
    many = jnp.stack([given[slot], jnp.flip(given[slot])], axis)

    def run(f):
        def one(a):
            now = {**given, slot: a}
            g = lambda q, k, floats: f(q, k, v, **{**now, **floats}, mask_value=-3.0)  # noqa: E731
            moving = {n: now[n] for n in floats}
            return g(q, k, moving), jax.grad(loss(g), (0, 1, 2))(q, k, moving)

        return jax.vmap(one, axis)(many)

    with jax.disable_jit():
        got = run(dot_product_attention)
        assert_same(got, run(plain), 1e-11)
    names = primitives(lambda: run(dot_product_attention))
    assert [n for n in names if n.startswith("dot_product_attention")] == ["dot_product_attention"] * 2 + [
        "dot_product_attention_cotangent"
    ]


def test_a_mask_that_is_not_batched_is_not_repeated():
    args = jax.ShapeDtypeStruct((8, T, N, H), jnp.float32)
    jaxpr = jax.make_jaxpr(jax.vmap(lambda q: dot_product_attention(q, q, q, mask=jnp.ones((T, T), bool))))(args)
    (node,) = [e for e in jaxpr.eqns if e.primitive.name == "dot_product_attention"]
    assert [v.aval.shape for v in node.invars] == [(8, T, N, H)] * 3 + [(1, 1, T, T)]


WANTED = {  # gradients wanted -> what the backward reads when probabilities are kept, and when they are recomputed
    ("query",): ({"key", "value", "tanh"}, {"value", "out"}),
    ("key",): ({"query", "value", "tanh"}, {"value", "out"}),
    ("value",): (set(), set()),
    ("bias",): ({"value"}, {"value", "out"}),
    ("factors",): ({"value"}, {"value"}),
    ("query", "key", "value", "bias", "factors"): ({"query", "key", "value", "tanh"}, {"value", "out"}),
}


@pytest.mark.parametrize("wanted", WANTED)
def test_a_gradient_wanted_alone_reads_no_more_than_it_needs(wanted):
    args = dict(zip(("query", "key", "value"), data("float32"), strict=True))
    args |= {"bias": numbers(T, S, dtype="float32"), "factors": numbers(S, dtype="float32")}
    always = {"mask"} if wanted[0] not in ("value", "factors") else set()
    always |= {"factors"} if wanted != ("factors",) else set()
    kept, again = WANTED[wanted]
    reads = {
        "xla": {"probabilities"} | always | kept,
        "xla_blockwise": {"query", "key", "bias", "mask", "row_max", "log_sum"} | always | again,
    }
    for implementation, want in reads.items():
        attrs = {"mask": holes(T, S), "mask_value": -9.0, "softcap": 2.0, "implementation": implementation}

        def f(moving, attrs=attrs):
            return jnp.sum(dot_product_attention(**{**args, **moving}, **attrs))

        jaxpr = jax.make_jaxpr(jax.grad(f))({slot: args[slot] for slot in wanted})
        (node,) = [e for e in jaxpr.eqns if e.primitive.name == "dot_product_attention_cotangent"]
        assert len(node.outvars) == len(wanted)
        assert len(node.invars) == len(want) + 1
        assert set(node.primitive.operand_names(node.params)) == want | {"ct"}


def test_what_is_kept_is_said():
    q, k, v = (jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in data("float32"))
    mask, bias = jax.ShapeDtypeStruct((T, S), jnp.bool_), jax.ShapeDtypeStruct((S,), jnp.float32)
    kept = OP.residuals(q, k, v, bias, mask, softcap=2.0)
    assert [(r.name, r.dtype) for r in kept] == [("probabilities", "bf16"), ("tanh", "f32")]
    assert kept[0].readers == ("dquery", "dkey", "dvalue", "dbias")
    assert kept[1].readers == ("dquery", "dkey")
    names = lambda *optional, **attrs: [  # noqa: E731
        r.name for r in OP.residuals(q, k, v, *optional, implementation="xla_blockwise", **attrs) if r.name != "out"
    ]
    assert names() == names(None, mask) == names(None, None, mask, softcap=1.0) == ["logsumexp"]
    assert names(bias) == names(None, mask, mask_value=-1e9) == ["row_max", "log_sum"]


@pytest.mark.parametrize("gradients", [False, True])
def test_blockwise_never_allocates_the_score_matrix_for_operands_that_broadcast(gradients):
    length = 4096
    shape = jax.ShapeDtypeStruct((2, length, 4, 32), jnp.float32)
    mask, bias = jax.ShapeDtypeStruct((length, length), jnp.bool_), jax.ShapeDtypeStruct((2, 1, 1, length), jnp.float32)
    heads = jax.ShapeDtypeStruct((4, 1, 1), jnp.float32)
    scores_bytes = 2 * 4 * length * length * 4

    def f(q, k, v, bias, factors, mask):
        return dot_product_attention(q, k, v, bias=bias, mask=mask, factors=factors, implementation="xla_blockwise")

    program = jax.grad(lambda *a: f(*a).sum(), (0, 1, 2, 3, 4)) if gradients else f
    compiled = jax.jit(program).lower(shape, shape, shape, bias, heads, mask).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < scores_bytes / 5


def test_the_gradient_of_a_bias_shared_by_heads_is_as_large_as_the_bias():
    length = 2048
    shape = jax.ShapeDtypeStruct((2, length, 4, 32), jnp.float32)
    bias = jax.ShapeDtypeStruct((length, length), jnp.float32)

    def f(q, bias):
        return dot_product_attention(q, q, q, bias=bias, implementation="xla_blockwise").sum()

    compiled = jax.jit(jax.grad(f, (0, 1))).lower(shape, bias).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 4 * length * length * 4 / 2  # half the scores'


q4 = (1, 4, 2, 8)
BAD = {
    "mask of floats": ({"mask": np.ones((4, 4), np.float32)}, ["mask has dtype float32", "needed bool"]),
    "bias of bools": ({"bias": np.ones((4, 4), bool)}, ["bias has dtype bool", "float32"]),
    "factors of integers": ({"factors": np.ones((4, 4), np.int32)}, ["factors has dtype int32", "bool or one of"]),
    "mask of another length": ({"mask": np.ones((4, 5), bool)}, ["mask has shape (4, 5)", "(1, 2, 4, 4)"]),
    "bias of too many axes": ({"bias": np.ones((1, 1, 2, 4, 4), np.float32)}, ["bias has shape", "does not broadcast"]),
    "factors for other heads": ({"factors": np.ones((3, 1, 1), np.float32)}, ["factors has shape (3, 1, 1)"]),
    "softcap of 0": ({"softcap": 0.0}, ["softcap is 0.0", "greater than 0"]),
    "infinite softcap": ({"softcap": np.inf}, ["softcap is inf", "finite"]),
    "mask_value NaN": ({"mask_value": np.nan}, ["mask_value is nan", "-inf"]),
    "mask_value inf": ({"mask_value": np.inf}, ["mask_value is inf", "-inf"]),
    "factors_scale no number": ({"factors_scale": "big"}, ["factors_scale is 'big'"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_operand_is_refused_by_name(case):
    given, parts = BAD[case]
    a = jnp.zeros(q4, jnp.float32)
    with pytest.raises(ArgumentError) as caught:
        dot_product_attention(a, a, a, **given)
    for part in parts:
        assert part in str(caught.value)


def test_an_operand_wider_than_the_scores_and_a_traced_number_are_refused(x64):
    a = jnp.zeros(q4, jnp.bfloat16)
    with pytest.raises(ArgumentError, match="bias has dtype float64, wider than the float32"):
        dot_product_attention(a, a, a, bias=jnp.zeros((4, 4), jnp.float64))
    with pytest.raises(ArgumentError, match=r"mask_value .* known when tracing"):
        jax.jit(lambda x: dot_product_attention(a, a, a, mask=jnp.ones((4, 4), bool), mask_value=x))(-1.0)


def test_the_formula_says_what_there_is():
    given = {"bias": True, "mask": True, "is_causal": True}
    assert OP.formula(scale=0.125, **given) == "softmax(0.125 * q @ k.T + bias, mask, causal) @ v"
    assert OP.formula(factors=True) == "(softmax(1/sqrt(H) * q @ k.T) * factors) @ v"
    capped = OP.formula(scale=1, softcap=30.0, factors=True, factors_scale=1.25)
    assert capped == "(softmax(30 * tanh(q @ k.T / 30)) * factors * 1.25) @ v"
