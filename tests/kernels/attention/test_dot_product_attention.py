"""dot_product_attention, composite and blockwise, against plain jnp code."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.errors import ArgumentError, UnknownNameError
from fusionlab.kernels import OPS
from fusionlab.kernels.ops.dot_product_attention.blockwise import attention as blockwise
from fusionlab.kernels.ops.dot_product_attention.settings import Settings
from fusionlab.ops import dot_product_attention
from fusionlab.testing.tolerances import tolerance

from ..transformations import TRANSFORMATIONS, assert_agree, assert_same, loss, primitives

OP = OPS["dot_product_attention"]
IMPLEMENTATIONS = ("xla", "xla_blockwise")


def plain(q, k, v, scale=None, is_causal=False):
    """What a user writes, in the operands' own dtype."""
    scores = jnp.einsum("...tnh,...snh->...nts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    return jnp.einsum("...nts,...snh->...tnh", jax.nn.softmax(scores, -1), v)


def data(batch=(2,), t=5, s=6, n=2, h=4, hv=3, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((*batch, t, n, h), (*batch, s, n, h), (*batch, s, n, hv))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def out_and_gradients(f):
    def run(*args):
        out, pull = jax.vjp(f, *args[:-1])
        return out, *pull(args[-1])

    return jax.jit(run)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few rows, so that small operands take several, and a shorter last one."""
    monkeypatch.setattr(blockwise, "_FORWARD_SCORES", 4 * 53)
    monkeypatch.setattr(blockwise, "_BACKWARD_SCORES", 4 * 53)
    monkeypatch.setattr(blockwise, "_LEAST_ROWS", 4)
    monkeypatch.setattr(blockwise, "_CAUSAL_GROUPS", 3)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_transformation_equals_plain_code(name, x64):
    args = data(batch=(), t=3, s=4, n=2, h=2, hv=3)
    fused = functools.partial(dot_product_attention, scale=0.7, is_causal=True)
    assert_agree(fused, functools.partial(plain, scale=0.7, is_causal=True), args, (name,), 1e-11)


@pytest.mark.parametrize("name", ["jit", "grad", "jvp", "vmap_of_grad", "grad_of_vmap", "scan", "checkpoint"])
def test_blockwise_takes_the_transformations_too(name, x64, small_blocks):
    args = data(batch=(), t=9, s=7, n=2, h=2, hv=3)
    assert_agree(functools.partial(dot_product_attention, implementation="xla_blockwise"), plain, args, (name,), 1e-11)


def shared(key_heads, t=5, s=6, n=4, h=2, hv=3, batch=()):
    """Query, key and value, with fewer heads of key and value."""
    q, *_ = data(batch, t, s, n, h, hv)
    return q, *data(batch, t, s, key_heads, h, hv, seed=1)[1:]


def repeated(f):
    """As most programs write it: the heads of key and value are repeated."""

    def run(q, k, v):
        return f(q, *(jnp.repeat(a, q.shape[-2] // a.shape[-2], axis=-2) for a in (k, v)))

    return run


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_transformation_of_heads_that_share_keys_equals_repeated_ones(name, x64):
    args = shared(2, t=3, s=4, h=2, hv=2)
    want = repeated(functools.partial(plain, scale=0.7, is_causal=True))
    assert_agree(functools.partial(dot_product_attention, scale=0.7, is_causal=True), want, args, (name,), 1e-11)


def local(q, k, v, window, is_causal=False):
    """With a local window, as a mask; a row that sees no key is 0."""
    distance = jnp.arange(k.shape[-3]) - jnp.arange(q.shape[-3])[:, None]
    seen = (distance >= -window[0]) & (distance <= (0 if is_causal else window[1]))
    scores = jnp.where(seen, jnp.einsum("...tnh,...snh->...nts", q, k) * q.shape[-1] ** -0.5, -1e30)
    return jnp.einsum("...nts,...snh->...tnh", jnp.where(seen.any(-1)[:, None], jax.nn.softmax(scores), 0), v)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_transformation_of_a_local_window_equals_a_mask(name, x64):
    args = data(batch=(), t=6, s=4, n=2, h=2, hv=3)  # the last row sees no key
    assert_agree(
        functools.partial(dot_product_attention, window=(1, 2)),
        functools.partial(local, window=(1, 2)),
        args,
        (name,),
        1e-11,
    )


WINDOWS = {(3, 2): None, (0, 0): None, (5, 0): None, (2, 30): None, 4: (4, 4), (60, 1): None}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("t", "s"), [(37, 53), (53, 37), (37, 20)])
def test_a_local_window_over_odd_sizes_agrees_forward_and_backward(t, s, window, is_causal, x64, small_blocks):
    args = data((2,), t, s, n=2, h=4, hv=3)
    ct = jnp.asarray(np.random.default_rng(1).standard_normal((2, t, 2, 3)))
    pair = WINDOWS[window] or window
    want = out_and_gradients(functools.partial(local, window=pair, is_causal=is_causal))(*args, ct)
    for name in IMPLEMENTATIONS:
        fused = functools.partial(dot_product_attention, window=window, is_causal=is_causal, implementation=name)
        assert_same(out_and_gradients(fused)(*args, ct), want, 1e-12, name)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [3, (4, 1), (2, 0)])
def test_a_local_window_is_that_of_jax_nn(window, is_causal):
    q, k, v = data((2,), 10, 12, n=4, h=4, hv=4, dtype="float32")
    given = {"is_causal": is_causal}
    got = dot_product_attention(q, k[:, :, :2], v[:, :, :2], window=window, **given)
    want = jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2], local_window_size=window, **given)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_window_that_hides_nothing_is_none_and_one_that_ends_at_the_row_is_causal():
    def found(window, **attrs):
        full = OP._prepared(data(t=5, s=6, dtype="float32"), {"window": window, **attrs})[1]
        return full["is_causal"], full["window"]

    assert found((4, 5)) == found(100) == (False, None)
    assert found((3, 5)) == found((3, 99)) == (False, (3, 5))
    assert found((4, 0)) == found(99, is_causal=True) == (True, None)
    assert found((2, 0)) == found(2, is_causal=True) == found((2, 4), is_causal=True) == (True, (2, 0))
    assert (
        OP.formula(scale=0.5, is_causal=True, window=(2, 0))
        == "softmax(0.5 * q @ k.T, causal, local window of 3 keys) @ v"
    )


def test_blocks_of_a_local_window_see_its_keys_alone():
    limit = blockwise._FORWARD_SCORES
    assert blockwise.block_shape(4, 8192, 8192, True, limit, window=(127, 0)) == (4, 128)
    assert blockwise.keys_of(128, 8192, (127, 0)) == 255
    a = jax.ShapeDtypeStruct((1, 8192, 4, 32), jnp.float32)
    fused = functools.partial(dot_product_attention, is_causal=True, window=(127, 0), implementation="xla_blockwise")
    text = jax.jit(jax.grad(lambda *a: fused(*a).sum(), (0, 1, 2))).trace(a, a, a).lower().as_text()
    assert "4x128x255xf32" in text
    products = [line.rpartition("->")[2] for line in text.splitlines() if "dot_general" in line]
    assert not any("8192" in made for made in products), products


@pytest.mark.parametrize("name", ["jit", "grad", "jvp", "vmap_of_grad", "grad_of_vmap", "scan", "checkpoint"])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_blockwise_takes_heads_that_share_keys_too(name, key_heads, x64, small_blocks):
    args = shared(key_heads, t=9, s=7)
    fused = functools.partial(dot_product_attention, implementation="xla_blockwise")
    assert_agree(fused, repeated(plain), args, (name,), 1e-11)


def test_blocks_keep_the_heads_together_that_share_keys(small_blocks):
    limit = blockwise._FORWARD_SCORES
    assert blockwise.block_shape(12, 37, 53, False, limit, group=2) == (2, 2)
    assert blockwise.block_shape(12, 37, 53, False, limit, group=12) == (12, 1)
    assert blockwise.block_shape(12, 4, 5, False, limit, group=2) == (6, 4)


def test_repeated_keys_exist_nowhere():
    q, k = (jax.ShapeDtypeStruct((1, *rest, 48), jnp.float32) for rest in ((512, 16), (768, 1)))

    def text(f):
        step = jax.jit(jax.grad(lambda *a: f(*a).sum(), (0, 1, 2)))
        return step.trace(q, k, k).lower().as_text()

    assert any(shape in text(repeated(plain)) for shape in ("768x16x48", "16x768x48"))
    for implementation in IMPLEMENTATIONS:
        found = text(functools.partial(dot_product_attention, implementation=implementation))
        assert not any(shape in found for shape in ("768x16x48", "16x768x48", "16x48x768"))


def test_the_gradient_of_a_shared_head_is_summed_before_it_is_rounded(x64):
    q, k, v = (a.astype(jnp.bfloat16) for a in shared(1, t=8, s=8, n=2, h=8, hv=8, batch=(2,)))
    q = q * 0.01
    ct = jnp.broadcast_to(jnp.asarray([1, -1], jnp.bfloat16)[:, None], q.shape)  # what the two give is nearly the same
    want = out_and_gradients(repeated(plain))(*(a.astype("float64") for a in (q, k, v, ct)))[3]
    # xla_blockwise keeps no rounded probabilities.
    fused = functools.partial(dot_product_attention, implementation="xla_blockwise")
    got = out_and_gradients(fused)(q, k, v, ct)[3]
    assert got.dtype == jnp.bfloat16
    assert np.abs(np.asarray(got, np.float64) - want).max() < 2**-8 * np.abs(want).max()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("batch", "t", "s"), [((2,), 37, 53), ((), 53, 37), ((1, 2), 37, 37)])
def test_odd_sizes_agree_forward_and_backward(batch, t, s, is_causal, x64, small_blocks):
    args = data(batch, t, s, n=3, h=8, hv=5)
    ct = jnp.asarray(np.random.default_rng(1).standard_normal((*batch, t, 3, 5)))
    want = out_and_gradients(functools.partial(plain, scale=0.3, is_causal=is_causal))(*args, ct)
    for name in IMPLEMENTATIONS:
        fused = functools.partial(dot_product_attention, scale=0.3, is_causal=is_causal, implementation=name)
        assert_same(out_and_gradients(fused)(*args, ct), want, 1e-12, name)


def test_small_blocks_really_are_several_blocks(small_blocks):
    q, k, v = data((2,), 37, 53, n=3, dtype="float32")
    heads, rows = blockwise.block_shape(6, 37, 53, False, blockwise._FORWARD_SCORES)
    assert (heads, rows) == (1, 4)
    assert list(blockwise._groups(37, 53, 4, True)) == [(0, 16, 16), (16, 32, 32), (32, 37, 37)]
    given = dict(zip(("query", "key", "value"), (q, k, v), strict=True))
    names = primitives(lambda given: blockwise.forward(given, Settings(scale=1.0)), given)
    assert names.count("scan") == 2


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_subset_of_gradients_is_right_and_alone(wanted, implementation, x64, small_blocks):
    args = data(t=9, s=11)
    fused = functools.partial(dot_product_attention, implementation=implementation)
    got, want = (jax.jit(jax.grad(loss(f), wanted))(*args) for f in (fused, plain))
    assert_same(got, want, 1e-12)
    jaxpr = jax.make_jaxpr(jax.grad(loss(fused), wanted))(*args).jaxpr
    (node,) = [e for e in jaxpr.eqns if e.primitive.name == "dot_product_attention_cotangent"]
    assert len(node.outvars) == len(wanted)
    if implementation == "xla":  # all read the probabilities; dquery also key and value, dkey query and value
        reads = {(0,): 3, (1,): 3, (2,): 1, (0, 1): 4}[wanted]
    else:  # dvalue alone reads query, key and logsumexp; the others value and out as well
        reads = 3 if wanted == (2,) else 5
    assert len(node.invars) == reads + 1  # and the cotangent


@pytest.mark.parametrize(
    ("dtype", "is_causal"), [("float32", False), ("bfloat16", False), ("bfloat16", True), ("float16", True)]
)
def test_narrow_dtypes_are_near_their_float64_reference(dtype, is_causal, x64):
    q, k, v = data((2,), 40, 24, n=2, h=8, hv=8, dtype=dtype)
    ct = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape), dtype)
    exact = out_and_gradients(functools.partial(plain, is_causal=is_causal))
    wants = [np.asarray(a) for a in exact(*(a.astype("float64") for a in (q, k, v, ct)))]
    row = tolerance(dtype, 4096)
    for name in IMPLEMENTATIONS:
        fused = functools.partial(dot_product_attention, is_causal=is_causal, implementation=name)
        for got, want in zip(out_and_gradients(fused)(q, k, v, ct), wants, strict=True):
            assert got.dtype == dtype
            atol = row.atol * np.abs(want).max()
            np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=row.rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_all_keys_and_values_share_costs_the_gradients_no_digits(dtype, x64):
    # Probabilities sum to 1 but for a rounding. Unless that is taken off, ct @ values and then the keys multiply it: the gradient
    # of the query was 1e-4 (float32) and 0.7 (bfloat16) off.
    q, k, v = data((1,), 64, 64, n=2, h=64, hv=64, dtype=dtype)
    args = q, k + 10, v + 10
    ct = jnp.asarray(np.random.default_rng(1).standard_normal(v.shape) + 1, dtype)
    fused = functools.partial(dot_product_attention, implementation="xla")
    row = tolerance(dtype, 4096)
    exact = [a.astype("float64") for a in (*args, ct)]
    moved = jax.jvp(plain, tuple(exact[:3]), (exact[3], exact[1], exact[2]))[1]
    wants = [*out_and_gradients(plain)(*exact)[1:], moved]
    found = [*out_and_gradients(fused)(*args, ct)[1:], jax.jvp(fused, args, (ct, args[1], args[2]))[1]]
    for name, got, want in zip(("query", "key", "value", "forward"), found, wants, strict=True):
        error = np.abs(np.asarray(got, np.float64) - np.asarray(want)).max() / np.abs(want).max()
        assert error <= row.rtol, (name, error)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow_and_nan_stays_in_its_rows(implementation, small_blocks):
    q, k, v = data((1,), 9, 7, dtype="float32")
    out = dot_product_attention(q * 1e3, k * 1e3, v, implementation=implementation)
    np.testing.assert_allclose(out, plain(q * 1e3, k * 1e3, v), rtol=1e-5, atol=1e-5)
    got = dot_product_attention(q.at[0, 4, 1].set(jnp.nan), k, v, implementation=implementation)
    bad = np.isnan(np.asarray(got))
    assert bad[0, 4, 1].all()
    assert bad.sum() == v.shape[-1]
    # Under a causal mask a NaN key is seen by later rows only.
    late = dot_product_attention(q, k.at[0, 5].set(jnp.nan), v, is_causal=True, implementation=implementation)
    assert np.isnan(np.asarray(late)[0, :, 0, 0]).tolist() == [t >= 5 for t in range(9)]


def test_it_agrees_with_jax_nn():
    q, k, v = data((2,), 10, 12, h=4, hv=4, dtype="float32")
    for is_causal in (False, True):
        got = dot_product_attention(q, k, v, is_causal=is_causal)
        np.testing.assert_allclose(
            got, jax.nn.dot_product_attention(q, k, v, is_causal=is_causal), rtol=1e-5, atol=1e-6
        )


def test_a_differentiated_op_is_one_named_node_each_way_also_batched():
    q, k, v = data(dtype="float32")
    batched = jax.vmap(dot_product_attention)
    key_batched = jax.vmap(dot_product_attention, (None, 0, None))
    for f, operands in ((dot_product_attention, (q, k, v)), (batched, (q, k, v)), (key_batched, (q[0], k, v[0]))):
        names = primitives(jax.grad(loss(f), (0, 1, 2)), *operands)
        assert names.count("dot_product_attention") == 1
        assert names.count("dot_product_attention_cotangent") == 1
        assert not {"dot_general", "exp", "dot_product_attention_tangent"} & set(names)


@pytest.mark.parametrize(("length", "smaller"), [(1024, 2), (4096, 10)])
def test_blockwise_never_allocates_the_score_matrix(length, smaller):
    shape = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.float32)
    scores_bytes = 4 * length * length * 4

    def scratch(implementation, program):
        f = functools.partial(dot_product_attention, implementation=implementation)
        compiled = jax.jit(program(f)).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    for program in (lambda f: f, lambda f: jax.grad(lambda *a: f(*a).sum(), (0, 1, 2))):
        composite = scratch("xla", program)
        assert composite >= scores_bytes
        assert scratch("xla_blockwise", program) < composite / smaller


def test_residuals_of_many_scores_are_the_result_and_one_statistic_a_row():
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 512, 4, 64), (2, 1024, 4, 64), (2, 1024, 4, 32))]
    out, statistic = OP.residuals(*shapes)
    assert (out.name, out.shape, out.dtype, out.nbytes) == ("out", (2, 512, 4, 32), "bf16", 262144)
    assert out.readers == ("dquery", "dkey")
    assert (statistic.name, statistic.shape, statistic.dtype) == ("logsumexp", (2, 4, 512), "f32")
    assert (statistic.nbytes, statistic.readers) == (16384, ("dquery", "dkey", "dvalue"))


def test_what_is_saved_is_the_probabilities_or_the_logsumexp_of_the_scores(x64, small_blocks):
    q, k, v = data(t=9, s=7)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.5
    want = {"xla": jax.nn.softmax(scores), "xla_blockwise": jax.nn.logsumexp(scores, axis=-1)}
    for implementation in IMPLEMENTATIONS:
        _, got = jax.jit(functools.partial(OP.call_with_residuals, implementation=implementation))(q, k, v)
        np.testing.assert_allclose(got, want[implementation], rtol=1e-12)


@pytest.mark.parametrize(("length", "kept"), [(64, "probabilities"), (512, "logsumexp")])
def test_few_scores_are_kept_and_many_computed_again(length, kept):
    shape = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    assert [r.name for r in OP.residuals(shape, shape, shape) if r.name != "out"] == [kept]
    assert [r.name for r in OP.residuals(shape, shape, shape, implementation="xla")] == ["probabilities"]


def test_keeping_probabilities_costs_no_second_product_of_query_and_key():
    shape = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    step = jax.jit(jax.grad(lambda *a: dot_product_attention(*a).sum(), (0, 1, 2)))
    assert step.lower(shape, shape, shape).as_text().count("dot_general") == 6  # 2 forward, 4 backward; sum keeps 6


def test_the_choice_follows_size_and_device_and_says_why():
    def verdicts(length, device, implementation=None, dtype=jnp.float32):
        shape = jax.ShapeDtypeStruct((1, length, 4, 64), dtype)
        found = OP.backends(shape, shape, shape, device=device, implementation=implementation)
        assert all(v.reason for v in found)
        return {v.name: v.verdict for v in found}

    cpu = {"cudnn": "unavailable", "cuda": "unavailable"}
    assert verdicts(64, "cpu") == {"xla": "same code", "xla_blockwise": "possible", **cpu}
    assert verdicts(4096, "cpu") == {"xla": "possible", "xla_blockwise": "chosen", **cpu}
    assert verdicts(4096, "cpu", "xla") == {"xla": "same code", "xla_blockwise": "possible", **cpu}
    assert verdicts(64, "cpu", "xla_blockwise") == {"xla": "possible", "xla_blockwise": "chosen", **cpu}
    float32 = {"xla_blockwise": "possible", "cudnn": "unavailable"}
    assert verdicts(64, "sm_90") == {"xla": "same code", "cuda": "possible", **float32}
    assert verdicts(4096, "sm_90") == {"xla": "same code", "cuda": "possible", **float32}
    half = verdicts(4096, "sm_90", dtype=jnp.bfloat16)
    assert [name for name, verdict in half.items() if verdict == "chosen"] == ["cudnn"]
    assert verdicts(4096, "sm_75") == {"xla": "same code", "xla_blockwise": "possible", **cpu}


def test_lowering_for_cuda_works_without_one_and_is_the_composite():
    shape = jax.ShapeDtypeStruct((1, 1024, 2, 8), jnp.float32)
    step = jax.jit(jax.grad(lambda *a: dot_product_attention(*a).sum(), (0, 1, 2)))
    traced = step.trace(shape, shape, shape)
    assert "stablehlo.while" not in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" in traced.lower(lowering_platforms=("cpu",)).as_text()


BAD = {
    "query of rank 2": (((4, 8), (1, 4, 2, 8), (1, 4, 2, 8)), {}, ["query has shape (4, 8)", "rank 3"]),
    "another batch": (((2, 4, 2, 8), (1, 4, 2, 8), (2, 4, 2, 8)), {}, ["key (1, 4, 2, 8)", "batch axes"]),
    "another head count": (((1, 4, 4, 8), (1, 4, 3, 8), (1, 4, 3, 8)), {}, ["key", "3 heads", "4", "divides"]),
    "more key heads": (((1, 4, 2, 8), (1, 4, 4, 8), (1, 4, 4, 8)), {}, ["key", "4 heads", "2", "divides"]),
    "no key heads": (((1, 4, 2, 8), (1, 4, 0, 8), (1, 4, 0, 8)), {}, ["key", "0 heads"]),
    "value with other heads": (((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 1, 8)), {}, ["value", "1 heads"]),
    "other features": (((1, 4, 2, 8), (1, 4, 2, 6), (1, 4, 2, 8)), {}, ["6 features", "same H"]),
    "other length": (((1, 4, 2, 8), (1, 5, 2, 8), (1, 4, 2, 8)), {}, ["value", "length 4", "same S"]),
    "no keys": (((1, 4, 2, 8), (1, 0, 2, 8), (1, 0, 2, 8)), {}, ["at least one key"]),
    "infinite scale": (((1, 4, 2, 8),) * 3, {"scale": np.inf}, ["scale is inf", "finite"]),
    "scale no number": (((1, 4, 2, 8),) * 3, {"scale": [1]}, ["scale is [1]"]),
    "window of two kinds": (((1, 4, 2, 8),) * 3, {"window": (1, 2, 3)}, ["window is (1, 2, 3)", "a pair"]),
    "window no number": (((1, 4, 2, 8),) * 3, {"window": 1.5}, ["window is 1.5"]),
    "window below 0": (((1, 4, 2, 8),) * 3, {"window": (-1, 2)}, ["window is (-1, 2)", "from 0 on"]),
    "is_causal no bool": (((1, 4, 2, 8),) * 3, {"is_causal": "yes"}, ["is_causal is 'yes'"]),
    "unknown implementation": (((1, 4, 2, 8),) * 3, {"implementation": "blockwise"}, ["'blockwise'", "xla_blockwise"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_refused_by_name(case):
    shapes, attrs, parts = BAD[case]
    with pytest.raises((ArgumentError, UnknownNameError)) as caught:
        dot_product_attention(*(jnp.zeros(s, jnp.float32) for s in shapes), **attrs)
    for part in parts:
        assert part in str(caught.value)


def test_a_traced_scale_and_mixed_dtypes_are_refused():
    q = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ArgumentError, match="known when tracing"):
        jax.jit(lambda s: dot_product_attention(q, q, q, scale=s))(0.5)
    with pytest.raises(ArgumentError, match="key has dtype bfloat16 but query has float32"):
        dot_product_attention(q, q.astype(jnp.bfloat16), q)
    with pytest.raises(ArgumentError, match="query has dtype int32"):
        dot_product_attention(q.astype(jnp.int32), q, q)


def test_formula_names_scale_and_mask():
    assert OP.formula(scale=0.125, is_causal=True) == "softmax(0.125 * q @ k.T, causal) @ v"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_reaches_no_gradient_of_a_key_its_row_does_not_see(implementation, x64, small_blocks):
    q, k, v = data(t=4, s=4)
    q = q.at[0, 1, :, 0].set(jnp.nan)

    def masked(q, k, v):
        scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), jnp.einsum("btnh,bsnh->bnts", q, k) * 0.5, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)

    fused = functools.partial(dot_product_attention, implementation=implementation, is_causal=True, scale=0.5)
    got, want = (jax.grad(lambda k, f=f: jnp.sum(f(q, k, v) ** 2))(k) for f in (fused, masked))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(want).any()
    assert np.isfinite(want[0, 2:, :, 1:]).all()
    got, want = (jax.jvp(lambda k, f=f: f(q, k, v), (k,), (jnp.ones_like(k),))[1] for f in (fused, masked))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.parametrize(("platform", "are_narrow"), [("cpu", False), ("cuda", True)])
def test_products_of_16_bit_floats_are_widened_where_it_is_lowered_for_a_cpu(platform, are_narrow):
    a = jax.ShapeDtypeStruct((2, 5, 3, 8), jnp.bfloat16)
    attend = functools.partial(dot_product_attention, implementation="xla")
    text = jax.jit(attend).trace(a, a, a).lower(lowering_platforms=(platform,)).as_text()
    operands = [line.rpartition(" : ")[2].partition("->")[0] for line in text.splitlines() if "dot_general" in line]
    assert ["bf16" in types for types in operands] == [are_narrow] * 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_heads_before_length_is_the_same_with_axes_exchanged(implementation, x64, small_blocks):
    args = data(t=9, s=11)
    ct = jnp.asarray(np.random.default_rng(1).standard_normal((2, 9, 2, 3)))
    run = functools.partial(dot_product_attention, implementation=implementation)
    want = out_and_gradients(run)(*args, ct)
    swapped = [jnp.swapaxes(a, -2, -3) for a in (*args, ct)]
    got = out_and_gradients(functools.partial(run, layout="BNTH"))(*swapped)
    assert_same(tuple(jnp.swapaxes(a, -2, -3) for a in got), want, 1e-12)
    moved = [
        jax.jvp(functools.partial(run, layout=layout), tuple(a[:3]), tuple(a[:3]))[1]
        for layout, a in (("BTNH", args), ("BNTH", swapped))
    ]
    assert_same([jnp.swapaxes(moved[1], -2, -3)], [moved[0]], 1e-12)
    batched = jax.vmap(functools.partial(run, layout="BNTH"))(*swapped[:3])
    assert_same([jnp.swapaxes(batched, -2, -3)], [want[0]], 1e-12)


def test_another_layout_is_refused():
    a = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(UnknownNameError, match="layout"):
        dot_product_attention(a, a, a, layout="TBNH")
    with pytest.raises(ArgumentError, match=r"value \(1, 4, 2, 8\) has 4 heads at axis -3, key \(1, 2, 4, 8\) has 2"):
        dot_product_attention(a, a.swapaxes(1, 2), a, layout="BNTH")
