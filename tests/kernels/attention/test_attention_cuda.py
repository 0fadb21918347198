"""attention.cu's launches: geometry, what is refused, heads that are shared, nothing written beside the results. Numbers: the suite."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.device import Device
from fusionlab.errors import REJECTIONS, ArgumentError
from fusionlab.kernels.ops.dot_product_attention.op import DOT_PRODUCT_ATTENTION as OP
from fusionlab.kernels.ops.dot_product_attention.own import backend as cuda
from fusionlab.kernels.ops.dot_product_attention.own import tiles
from fusionlab.kernels.ops.dot_product_attention.own.tiles import TiledAttention
from fusionlab.kernels.ops.dot_product_attention.settings import ROUNDED_OFF
from fusionlab.ops import dot_product_attention

GUARD = 64  # entries before and after each result


def described(dtype="bfloat16", t=70, s=90, d=64, dv=None, n=2, group=1, **more):
    dv = dv or d
    q, k, v, o = ((m * h * x, x, h * x) for m, h, x in ((t, n, d), (s, n // group, d), (s, n // group, dv), (t, n, dv)))
    return TiledAttention(dtype, 1, n, t, s, d, dv, q, k, v, o, 0.3, group=group, **more)


def plans(call, saves="logsumexp"):
    backward = tiles.together(call, ("query", "key", "value"))
    return [tiles.forward_plan(call, saves), *(tiles.backward_plan(call, saves, some) for some in backward)]


SCORES = ("bool", (0, 0, 90, 1))


@pytest.mark.parametrize("dtype", list(tiles.CODES))
def test_every_block_fits_in_every_architecture_and_every_row_is_taken(dtype):
    for d, dv, mask in itertools.product((8, 40, 64, 72, 112, 128), (8, 64, 128), (None, SCORES)):
        for t, s in ((1, 1), (128, 64), (129, 1000)):
            forward, query, *keys = plans(described(dtype, t, s, d, dv, mask=mask))
            for plan, rows in ((forward, t), (query, t), *((one, s) for one in keys)):
                (launch,) = plan.launches
                options = dict(o.removeprefix("-DFL_").split("=") for o in plan.options)
                of_block = 16 * int(options["TILES"]) * int(options["WARPS"])
                assert launch.shared <= 99 << 10, (d, dv, launch.entry)
                assert launch.block == (32 * int(options["WARPS"]), 1, 1)
                assert launch.grid[0] * of_block >= rows > (launch.grid[0] - 1) * of_block
                assert int(options["COLUMNS"]) % 16 == 0


def test_a_number_beyond_float32_stays_a_number():
    params = tiles.forward_plan(described(mask=SCORES, mask_value=-1e300), None).launches[0].params
    values = [np.int32(value).view(np.float32) for kind, value in params if kind == "i32"]
    assert np.finfo(np.float32).min in values
    assert not np.isnan(values[4:]).any()


def guarded(shape, dtype):
    whole = np.full(math.prod(shape) + 2 * GUARD, 77, dtype)
    return whole, whole[GUARD:-GUARD].reshape(shape)


def test_heads_that_share_keys_and_nothing_written_beside_the_results(emulator):
    rng = np.random.default_rng(0)
    call = described(t=70, s=90, d=24, n=4, group=2, is_causal=True)
    q, ct = (rng.standard_normal((1, 70, 4, 24)).astype(ml_dtypes.bfloat16) for _ in range(2))
    k, v = (rng.standard_normal((1, 90, 2, 24)).astype(ml_dtypes.bfloat16) for _ in range(2))
    made = [guarded(a.shape, a.dtype) for a in (q, q, k, v)]
    statistic, rounded_off = guarded((1, 4, 70), np.float32), guarded(q.shape, q.dtype)
    forward, query, keys = plans(call, "logsumexp" + ROUNDED_OFF)
    emulator.run(forward, [q, k, v], [made[0][1], statistic[1], rounded_off[1]])
    whole_out = made[0][1].astype(np.float32) + rounded_off[1].astype(np.float32)
    delta = np.einsum("btnh,btnh->bnt", whole_out, ct.astype(np.float32)).copy()
    saved = [q, k, v, statistic[1], delta, ct]
    emulator.run(query, saved, [made[1][1]])
    emulator.run(keys, saved, [made[2][1], made[3][1]])
    for whole, _ in (*made, statistic, rounded_off):
        assert (whole[:GUARD] == 77).all()
        assert (whole[-GUARD:] == 77).all()

    def plain(q, k, v):
        k, v = (jnp.repeat(a, 2, axis=2) for a in (k, v))
        return dot_product_attention(q, k, v, scale=0.3, is_causal=True, implementation="xla")

    out, pull = jax.vjp(plain, *(jnp.asarray(a, jnp.float32) for a in (q, k, v)))
    # The weights that are multiplied were rounded to 8 bits, and out is one of a mean of theirs.
    assert np.abs(whole_out - out).max() < 0.5 * np.abs(made[0][1].astype(np.float32) - out).max()
    for got, want in zip([one for _, one in made], (out, *pull(jnp.asarray(ct, jnp.float32))), strict=True):
        error = np.abs(got.astype(np.float32) - want).max()
        assert error <= 1.2e-2 * np.abs(want).max()


def test_the_kernels_drop_what_jax_random_drops(emulator):
    key = jax.random.key(1234)
    data = np.asarray(jax.random.key_data(key))
    kept = np.asarray(jax.random.bernoulli(key, 0.7, (1, 2, 40, 48)))
    # With equal scores and values 0 ... 1 at one key each, out shows which keys were kept.
    q = k = np.zeros((1, 40, 2, 48), np.float16)
    k, v = np.zeros((1, 48, 2, 48), np.float16), np.zeros((1, 48, 2, 48), np.float16)
    v[0, np.arange(48), :, np.arange(48)] = 1
    strides = (2 * 40 * 48, 40 * 48, 48, 1)
    call = replace(described("float16", 40, 48, 48), dropout=strides, keep=0.7, factors_scale=48.0)
    out = np.empty((1, 40, 2, 48), np.float16)
    emulator.run(tiles.forward_plan(call, None), [q, k, v, data], [out])
    np.testing.assert_array_equal(np.swapaxes(out, 1, 2) > 0.5, kept)


def test_one_product_of_tf32_is_as_exact_as_that(emulator):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 2, 64)).astype(np.float32) for n in (70, 90, 90))
    errors = {}
    for terms in (1, 3):
        out = np.empty_like(q)
        emulator.run(tiles.forward_plan(described("float32", terms=terms), None), [q, k, v], [out])
        want = dot_product_attention(*map(jnp.asarray, (q, k, v)), scale=0.3, implementation="xla")
        errors[terms] = np.abs(out - want).max() / np.abs(want).max()
    assert errors[3] < 4e-6 < 1e-4 < errors[1] < 4e-3, errors


def shapes(t=128, s=128, n=2, h=64, hv=None, dtype="bfloat16", batch=(2,)):
    dims = ((*batch, t, n, h), (*batch, s, n, h), (*batch, s, n, hv or h))
    return tuple(jax.ShapeDtypeStruct(d, dtype) for d in dims)


def verdict(*operands, device="sm_90", **attrs):
    return next(v for v in OP.backends(*operands, device=device, **attrs) if v.name == "cuda")


REFUSED = {
    "20 features": (shapes(h=20), {}, "20 features per head: there are kernels for multiples of 8 up to 128"),
    "256 features": (shapes(h=256), {}, "256 features per head"),
    "values of 12": (shapes(hv=12), {}, "12 features per head"),
    "an old device": (shapes(), {"device": "sm_75"}, "sm_75 is older than sm_80"),
    "a CPU": (shapes(), {"device": "cpu"}, "needs a CUDA device"),
    "no queries": (shapes(t=0), {}, "nothing to compute"),
    "an algorithm": (shapes(dtype="float32"), {"precision": "BF16_BF16_F32"}, "no kernel for the precision"),
    "many heads": (shapes(t=1, s=1, n=70000), {}, "more than 65535 heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_why(case):
    operands, attrs, part = REFUSED[case]
    found = verdict(*operands, **attrs)
    assert found.verdict == "unavailable"
    assert part in found.reason


def test_what_cudnn_refuses_it_takes():
    mask = jax.ShapeDtypeStruct((2, 1, 128, 128), jnp.bool_)
    for operands in ((*shapes(), None, mask), (*shapes(), None, None, mask), shapes(dtype="float32"), shapes(hv=8)):
        for device in ("sm_80", "sm_86", "sm_90", "sm_120"):
            assert verdict(*operands, device=device).verdict != "unavailable"


def test_the_rule_says_why_it_takes_what_it_takes():
    def chosen(*operands, **attrs):
        found = [v for v in OP.backends(*operands, device="sm_90", **attrs) if v.verdict in ("chosen", "same code")]
        (one,) = found
        return one

    large = {"t": 1024, "s": 1024}
    few = chosen(*shapes(t=64, s=128))
    assert few.name == "xla"
    assert "64 x 128 scores per head) were not measured" in few.reason
    assert chosen(*shapes(t=128, s=128)).name == "cudnn"
    assert chosen(*shapes(**large), is_causal=True).name == "cudnn"
    assert chosen(*shapes(**large), scale=-1.0).name == "cuda"
    assert chosen(*shapes(**large), None, jax.ShapeDtypeStruct((2, 1, 1024, 1024), jnp.bool_)).name == "cudnn"
    masked = chosen(*shapes(t=1024, s=512), None, jax.ShapeDtypeStruct((2, 1, 1024, 512), jnp.bool_))
    assert masked.name == "xla"
    assert "not cudnn: a mask of fewer than 1024 x 1024 scores as its bias was not measured" in masked.reason
    assert "not cuda: with a mask it was measured slower" in masked.reason
    odd = chosen(*shapes(**large, h=20))
    assert odd.name == "xla"
    assert "not cudnn: 20 features" in odd.reason
    assert "not cuda: 20 features" in odd.reason


def composite(q, k, v, mask):
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) / 8
    p = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", p.astype(v.dtype), v)


def test_on_a_gpu_a_site_that_nothing_was_measured_faster_for_stays_as_it_is_written():
    mask = jax.ShapeDtypeStruct((2, 1, 128, 128), jnp.bool_)
    args = (*shapes(t=128, s=128), mask)
    found = fl.find(composite, *args, device="sm_90", passes="dot_product_attention")
    assert not found.candidates
    (site,) = found.rejections
    assert site.code == "unmeasured"
    assert "not cudnn: a mask of fewer than 1024 x 1024 scores as its bias was not measured" in site.sentence
    assert "not cuda: with a mask it was measured slower" in site.sentence
    assert "implementation='cuda'" in site.edit
    keys = fl.find(composite, *args[:3], jax.ShapeDtypeStruct((2, 1, 1, 128), jnp.bool_), device="sm_90")
    assert [c.backend.name for c in keys.candidates] == ["cudnn"]
    assert len(fl.find(composite, *args, device="cpu", passes="dot_product_attention").candidates) == 1


LONG = {"t": 1024, "s": 1024}
# device, dtype, sizes -> the code, words of the sentence
LEFT = {
    "slower here": ("sm_90", "float32", LONG, "slower", "with float32 it was measured slower than XLA's code"),
    "slower on another card": ("sm_80", "float32", LONG, "unmeasured", "with float32 it was not measured on sm_80"),
    "by a card's name": ("rtx4090", "float32", LONG, "unmeasured", "with float32 it was not measured on sm_89"),
    "features of no kernel": ("sm_90", "bfloat16", {**LONG, "h": 20}, "device", "20 features"),
    "few scores": ("sm_90", "bfloat16", {"t": 64, "s": 64}, "unmeasured", "64 x 64 scores per head) were not measured"),
    "few scores elsewhere": ("a100", "bfloat16", {"t": 64, "s": 64}, "unmeasured", "were not measured"),
    "too old": ("sm_75", "bfloat16", LONG, "device", "not cuda: sm_75 is older than sm_80"),
    "too old, and few scores": ("t4", "bfloat16", {"t": 64, "s": 64}, "device", "not cudnn: sm_75 is older than sm_80"),
    "a dtype of no kernel": ("sm_90", "float64", LONG, "device", "float64"),
}  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("what", LEFT)
def test_not_measured_here_cannot_run_here_and_slower_here_are_three_codes(what):
    device, dtype, sizes, code, words = LEFT[what]
    with jax.enable_x64(dtype == "float64"):
        told = OP.left_to_xla(*shapes(dtype=dtype, **sizes), device=device)
    assert told is not None
    assert told.kind == code
    assert words in told.reason
    assert code in REJECTIONS
    if code != "slower":
        assert "slower" not in told.reason


@pytest.mark.parametrize("device", ["sm_75", "sm_80", "sm_89", "sm_100", "sm_120"])
def test_no_sentence_carries_a_measurement_of_another_card(device):
    wide = (2048, 1024)

    def model(x, y, q):
        h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return h + 0.3 * (y - h), jax.nn.softmax(q @ q.mT / 8, -1) @ q

    args = *(jax.ShapeDtypeStruct(wide, jnp.float32),) * 2, jax.ShapeDtypeStruct((2, 8, 256, 64), jnp.float32)
    found = fl.find(model, *args, device=device)
    assert {r.code for r in found.rejections} <= {"unmeasured", "device"}
    told = found.report()
    assert "was measured" not in re.sub(r"(no such product|nothing near it|nothing) was measured", "", told)
    assert "were measured" not in re.sub(r"were measured on sm_90 only, not on sm_\d+", "", told)


def test_a_named_implementation_takes_such_a_site(monkeypatch):
    monkeypatch.setattr(Device, "current", classmethod(lambda cls: Device.of("sm_90")))
    args = (*shapes(t=128, s=128), jax.ShapeDtypeStruct((2, 1, 128, 128), jnp.bool_))
    assert fl.fuse(composite).findings(*args).counts()["dot_product_attention"] == 0
    for name in ("cuda", "xla"):
        assert fl.fuse(composite, implementation=name).findings(*args).counts()["dot_product_attention"] == 1


BAD = {
    "a key of another type": ({"dropout_key": jnp.zeros(2, jnp.int32)}, "dtype int32"),
    "a key of another shape": ({"dropout_key": jnp.zeros(4, jnp.uint32)}, r"shape \(4,\)"),
    "factors as well": ({"dropout_key": jnp.zeros(2, jnp.uint32), "factors": jnp.ones((4, 4), bool)}, "one of them"),
    "nothing kept": ({"dropout_key": jnp.zeros(2, jnp.uint32), "keep": 0.0}, "keep is 0.0"),
    "a shape and no key": ({"dropout_shape": (4, 4)}, "no dropout_key"),
    "a shape of another size": (
        {"dropout_key": jnp.zeros(2, jnp.uint32), "dropout_shape": (4, 5)},
        "which does not broadcast",
    ),
    "a shape of another rank": (
        {"dropout_key": jnp.zeros(2, jnp.uint32), "dropout_shape": (1,) * 5},
        "does not broadcast",
    ),
    "a shape that is none": ({"dropout_key": jnp.zeros(2, jnp.uint32), "dropout_shape": 4}, "needed a tuple of sizes"),
    "more than all": ({"dropout_key": jnp.zeros(2, jnp.uint32), "keep": 1.5}, "keep is 1.5"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_dropout_is_refused(case):
    given, part = BAD[case]
    a = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ArgumentError, match=part):
        dot_product_attention(a, a, a, **given)


@pytest.mark.parametrize("implementation", ["xla", "xla_blockwise"])
def test_a_dropout_key_is_the_mask_that_jax_random_makes_of_it(implementation):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, 3, 8)), jnp.float32) for _ in range(3))
    key = jax.random.key(5)
    factors = jax.random.bernoulli(key, 0.8, (2, 3, 9, 9))
    common = {"factors_scale": 1 / 0.8, "is_causal": True, "implementation": implementation}

    def loss(**given):
        return lambda *a: jnp.sum(jnp.sin(dot_product_attention(*a, **given, **common)))

    by_key = {"dropout_key": jax.random.key_data(key), "keep": 0.8}
    want = jax.value_and_grad(loss(factors=factors), (0, 1, 2))(q, k, v)
    with jax.threefry_partitionable(True):
        got = jax.value_and_grad(loss(**by_key), (0, 1, 2))(q, k, v)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    stacked = jax.vmap(lambda q: loss(**by_key)(q, k, v))(jnp.stack([q, q]))
    np.testing.assert_allclose(stacked, [want[0]] * 2, rtol=1e-4)


SHAPES = ((1, 1, 9, 9), (2, 1, 9, 9), (1, 3, 9, 9), (9, 9), (2, 3, 1, 9), (3, 9, 1), (2, 3, 9, 9))


@pytest.mark.parametrize("implementation", ["xla", "xla_blockwise"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_mask_may_be_drawn_in_a_shape_that_broadcasts(shape, implementation):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, 3, 8)), jnp.float32) for _ in range(3))
    key = jax.random.key(5)
    given = {"dropout_key": jax.random.key_data(key), "keep": 0.8, "dropout_shape": shape}

    def loss(**given):
        return lambda *a: jnp.sum(jnp.sin(dot_product_attention(*a, **given, implementation=implementation)))

    want = jax.value_and_grad(loss(factors=jax.random.bernoulli(key, 0.8, shape)), (0, 1, 2))(q, k, v)
    got = jax.value_and_grad(loss(**given), (0, 1, 2))(q, k, v)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    grads = jax.vmap(jax.grad(loss(**given), (0, 1, 2)))(*(jnp.stack([a, a]) for a in (q, k, v)))
    for a, b in zip(grads, want[1], strict=True):
        np.testing.assert_allclose(a, jnp.stack([b, b]), rtol=1e-5, atol=1e-6)


def test_a_batch_under_one_key_is_one_call_and_under_a_key_each_is_none():
    a, keys = jnp.ones((4, 2, 5, 3, 8)), jax.random.key_data(jax.random.split(jax.random.key(0), 4))

    def attend(a, key):
        return dot_product_attention(a, a, a, dropout_key=key, keep=0.5, factors_scale=2.0)

    for axes, names in (((0, None), ["dot_product_attention"]), ((0, 0), [])):
        key = keys if axes[1] == 0 else keys[0]
        traced = jax.make_jaxpr(jax.vmap(attend, axes))(a, key)
        assert [e.primitive.name for e in traced.eqns if e.primitive.name == "dot_product_attention"] == names
        want = jnp.stack([attend(a[i], key[i] if axes[1] == 0 else key) for i in range(4)])
        np.testing.assert_allclose(jax.vmap(attend, axes)(a, key), want, rtol=1e-6)


def test_the_bits_are_those_of_a_float32_where_64_bits_are_enabled():
    a, key = jnp.ones((1, 4, 2, 8)), jax.random.key_data(jax.random.key(3))
    v = jnp.eye(4, 8)[None, :, None] + 0 * a

    def attend():
        return dot_product_attention(a, a, v, dropout_key=key, keep=0.6, factors_scale=4.0)

    want = attend()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(attend(), want)


def test_the_kernels_take_masks_drawn_for_every_query_and_key():
    given = dict(zip(("query", "key", "value"), shapes(batch=(2, 3)), strict=True))
    rest = {"layout": "BTNH", "present": (*given, "dropout_key")}
    for drawn, taken in (
        ((2, 3, 2, 128, 128), True),
        ((2, 3, 1, 128, 128), True),
        ((1, 1, 1, 128, 128), True),
        ((1, 1, 2, 128, 128), True),
        ((1, 3, 2, 128, 128), False),
        ((2, 3, 2, 1, 128), False),
        ((2, 3, 2, 128, 1), False),
    ):
        why = cuda.refuses(given, Device.of("sm_90"), dropout_shape=drawn, **rest)
        assert (why is None) is taken, why
        assert taken or "a dropout mask of the shape" in why


def test_devices_split_the_axes_that_a_mask_does_not_have():
    a, key = jnp.zeros((4, 8, 2, 8)), jnp.zeros(2, jnp.uint32)
    for shape, whole in (((1, 1, 8, 8), set()), ((4, 1, 8, 8), {"b0"}), (None, {"b0", "h"})):
        present, full = OP._prepared((a, a, a, None, None, None, key), {"dropout_shape": shape, "keep": 0.5})
        axes = OP.axes({n: x.shape for n, x in present.items()} | {"out": a.shape}, **full)
        assert axes.whole == {*"tscd", *whole}
