"""dot_product_attention by cuDNN: what is refused and why, and the calls a program is lowered to. Its numbers need a GPU (tests/gpu)."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.device import Device
from fusionlab.errors import BackendError
from fusionlab.kernels.ops.dot_product_attention import choosing
from fusionlab.kernels.ops.dot_product_attention.cudnn import backend as cudnn
from fusionlab.kernels.ops.dot_product_attention.cudnn import call as cudnn_call
from fusionlab.kernels.ops.dot_product_attention.op import DOT_PRODUCT_ATTENTION as OP
from fusionlab.ops import dot_product_attention


def shapes(t=128, s=128, n=2, h=64, hv=None, dtype="bfloat16", batch=(2,)):
    dims = ((*batch, t, n, h), (*batch, s, n, h), (*batch, s, n, hv or h))
    return tuple(jax.ShapeDtypeStruct(d, dtype) for d in dims)


def verdict(*operands, device="sm_90", **attrs):
    return next(v for v in OP.backends(*operands, device=device, **attrs) if v.name == "cudnn")


def test_what_this_file_was_written_for_is_what_jax_has():
    assert cudnn_call.why_missing() is None


def test_what_it_takes():
    for device in ("sm_80", "sm_86", "sm_90", "sm_100"):
        for dtype in ("bfloat16", "float16"):
            for layout in ("BTNH", "BNTH"):
                found = verdict(*shapes(dtype=dtype), device=device, layout=layout, is_causal=True)
                assert found.verdict != "unavailable", found
    assert verdict(*shapes(h=256)).verdict != "unavailable"
    assert verdict(*shapes(t=100, s=77)).verdict != "unavailable"


MASK = jax.ShapeDtypeStruct((1, 1, 128, 128), jnp.bool_)
REFUSED = {
    "float32": (shapes(dtype="float32"), {}, "query has dtype float32"),
    "features no multiple of 8": (shapes(h=20), {}, "20 features per head"),
    "too many features": (shapes(h=256), {"device": "sm_80"}, "up to 128 on sm_80"),
    "another value": (shapes(h=64, hv=32), {}, "values have other features than keys (32, 64)"),
    "an old device": (shapes(), {"device": "sm_75"}, "older than sm_80"),
    "a CPU": (shapes(), {"device": "cpu"}, "needs a CUDA device"),
    "a mask of odd lengths": (
        (*shapes(t=99, s=77), None, jax.ShapeDtypeStruct((1, 1, 99, 77), jnp.bool_)),
        {},
        "even lengths alone",
    ),
    "a mask that hides little": ((*shapes(), None, MASK), {"mask_value": -100.0}, "leaves masked keys a weight"),
    "a mask of 256 features": ((*shapes(h=256), None, MASK), {}, "may leave a query no key"),
    "factors": ((*shapes(), None, None, MASK), {}, "factors"),
    "softcap": (shapes(), {"softcap": 30.0}, "softcap"),
    "a wide bias": (
        (*shapes(), jax.ShapeDtypeStruct((128, 128), jnp.float32)),
        {},
        "dtype float32: it would be rounded",
    ),
    "a bias of keys": ((*shapes(), jax.ShapeDtypeStruct((1, 128), jnp.bfloat16)), {}, "all 128 x 128 scores"),
    "no queries": (shapes(t=0), {}, "nothing to compute"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_why(case):
    operands, attrs, part = REFUSED[case]
    found = verdict(*operands, **attrs)
    assert found.verdict == "unavailable"
    assert part in found.reason


def test_an_old_cudnn_is_refused_where_the_device_says_its_version():
    old = dataclasses.replace(Device.of("sm_90"), cudnn="8.9.7")
    assert cudnn.refuses_device(old) == "cuDNN 8.9.7 is older than 9.0"
    assert cudnn.refuses_device(dataclasses.replace(old, cudnn="9.10.2")) is None


def test_a_bias_runs_only_where_nothing_is_kept(on_hopper):
    bias = jax.ShapeDtypeStruct((1, 2, 128, 128), jnp.bfloat16)
    program = jax.jit(lambda q, k, v, b: dot_product_attention(q, k, v, bias=b, implementation="cudnn"))
    text = program.trace(*shapes(), bias).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaScaleBiasSoftmax(" in text
    grad = jax.jit(jax.grad(lambda *a: program(*a).astype("float32").sum()))
    with pytest.raises(BackendError, match="one statistic per row"):
        grad.trace(*shapes(), bias).lower(lowering_platforms=("cuda",))


@pytest.fixture
def on_hopper(monkeypatch):
    hopper = Device("cuda", "sm_90", "a Hopper", simulated=True)
    monkeypatch.setattr(Device, "current", classmethod(lambda cls: hopper))


def test_a_mask_of_keys_takes_either_of_two_routes_at_run_time(on_hopper):
    mask = jax.ShapeDtypeStruct((2, 1, 1, 128), jnp.bool_)

    def loss(q, k, v, mask):
        out = dot_product_attention(q, k, v, mask=mask, mask_value=-1e9, is_causal=True, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    step = jax.jit(jax.grad(loss, (0, 1, 2)))
    text = step.trace(*shapes(), mask).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.case") == 2
    for name in ("@__cudnn$fmhaSoftmax(", "@__cudnn$fmhaSoftmaxBackward("):
        assert text.count(name) == 1
    assert text.count("PADDING_CAUSAL") == 2
    for entry in ("attention_forward", "attention_query", "attention_keys"):
        assert text.count(f"{entry}\\22") == 1
    assert text.count("mask_probe") >= 1


def test_a_mask_of_keys_needs_both_routes_and_a_value_that_masks():
    def masked(shape, **attrs):
        return verdict(*shapes(), None, jax.ShapeDtypeStruct(shape, jnp.bool_), **attrs)

    assert masked((2, 1, 1, 128)).verdict != "unavailable"
    assert masked((1, 128)).verdict != "unavailable"
    assert masked((2, 2, 1, 128)).verdict != "unavailable"
    assert "leaves masked keys a weight" in masked((1, 128), mask_value=-100.0).reason
    mask = jax.ShapeDtypeStruct((2, 1, 1, 128), jnp.bool_)
    assert "256 features" in verdict(*shapes(h=256), None, mask).reason


@pytest.mark.parametrize("shape", [(2, 1, 128, 128), (128, 128), (2, 2, 1, 128), (1, 2, 128, 128)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_of_scores_is_a_bias_where_every_query_sees_a_key(on_hopper, shape, is_causal):
    mask = jax.ShapeDtypeStruct(shape, jnp.bool_)

    def loss(q, k, v, mask):
        out = dot_product_attention(q, k, v, mask=mask, is_causal=is_causal, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    step = jax.jit(jax.grad(loss, (0, 1, 2)))
    text = step.trace(*shapes(), mask).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.case") == 2
    for name in ("@__cudnn$fmhaScaleBiasSoftmax(", "@__cudnn$fmhaScaleBiasSoftmaxBackward("):
        assert text.count(name) == 1
    for entry in ("attention_forward", "attention_query", "attention_keys"):
        assert text.count(f"{entry}\\22") == 1
    assert "mask_probe" not in text


def test_whether_every_query_sees_a_key_is_asked_of_what_it_may_see():
    def sees(mask, queries, is_causal=False):
        return bool(cudnn._all_see(jnp.asarray(mask), queries, is_causal))

    assert sees([[[1, 0], [0, 1]]], 2)
    assert not sees([[[1, 0], [0, 0]]], 2)
    assert sees([[[1, 0], [0, 1]]], 2, True)
    assert not sees([[[0, 1], [1, 1]]], 2, True)  # the first query sees the first key alone
    assert sees([[[1, 1]]], 2, True)
    assert not sees([[[0, 1]]], 2, True)  # one row for both queries
    assert sees([[[0, 1]]], 2)


def test_a_mask_as_a_bias_has_all_scores_and_stays_finite():
    from fusionlab.kernels.ops.dot_product_attention.layouts import AttentionSizes

    q = AttentionSizes.of((2, 3, 4, 1, 8), "BTNH")
    for shape, first in (((4, 6), 1), ((2, 1, 1, 4, 6), 6), ((1, 3, 1, 1, 6), 6)):
        mask = jnp.zeros((1,) * (5 - len(shape)) + shape, bool)
        for dtype in (jnp.bfloat16, jnp.float16):
            bias = cudnn._as_bias(mask, q, dtype)
            assert bias.shape == (first, 1, 4, 6)
            assert bias.dtype == dtype
            assert jnp.isfinite(bias).all()
            assert float(bias.max()) < -40000


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("batch", [(2,), (), (2, 3)])
def test_forward_and_backward_are_one_call_each_and_no_copy_in_between(on_hopper, layout, batch):
    def loss(q, k, v):
        out = dot_product_attention(q, k, v, is_causal=True, layout=layout, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*shapes(batch=batch)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == 1
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert "CAUSAL" in text
    assert [o.shape for o in jax.tree.leaves(lowered.out_info)] == [a.shape for a in shapes(batch=batch)]


def test_a_causal_local_window_is_handed_on_with_the_rows_own_key(on_hopper):
    def loss(q, k, v):
        out = dot_product_attention(q, k, v, is_causal=True, window=31, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*shapes()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("sliding_window_length") == 2
    assert text.count("sliding_window_length\\22: 32") == 2
    plain = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True, implementation="cudnn"))
    assert "sliding_window_length\\22: 0" in plain.trace(*shapes()).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("operands", "window", "part"),
    [
        (shapes(), (31, 2), "a local window of 2 keys after the row"),
        (shapes(), 31, "a local window of 31 keys after the row"),
        (shapes(t=64), (31, 0), "a local window of 64 queries over 128 keys"),
        ((*shapes(), None, jax.ShapeDtypeStruct((2, 1, 1, 128), jnp.bool_)), (31, 0), "a local window and a mask"),
        ((*shapes(), jax.ShapeDtypeStruct((2, 128, 128), jnp.bfloat16)), (31, 0), "a local window and a bias"),
    ],
)
def test_other_local_windows_are_refused(operands, window, part):
    found = verdict(*operands, window=window)
    assert found.verdict == "unavailable"
    assert part in found.reason
    assert (
        next(v for v in OP.backends(*operands, device="sm_90", window=window) if v.name == "cuda").verdict
        != "unavailable"
    )


def test_key_heads_that_are_shared_are_handed_on_as_they_are(on_hopper):
    q, k = (jax.ShapeDtypeStruct((2, 128, heads, 64), jnp.bfloat16) for heads in (8, 2))

    def loss(q, k, v):
        return dot_product_attention(q, k, v, is_causal=True, implementation="cudnn").astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k).lower(lowering_platforms=("cuda",))
    calls = [line for line in lowered.as_text().splitlines() if "__cudnn$fmha" in line]
    assert len(calls) == 2
    for line in calls:
        assert "(tensor<2x128x8x64xbf16>, tensor<2x128x2x64xbf16>, tensor<2x128x2x64xbf16>" in line
    assert [o.shape for o in jax.tree.leaves(lowered.out_info)] == [q.shape, k.shape, k.shape]
    assert verdict(q, k, k).verdict != "unavailable"


def test_what_was_measured_for_as_many_key_heads_is_not_taken_for_fewer():
    q, k = (jax.ShapeDtypeStruct((2, 128, heads, 64), jnp.bfloat16) for heads in (8, 2))
    cases = []
    for key in (q, k):
        present, full = OP._prepared((q, key, key), {}, Device.of("sm_90"))
        cases.append(choosing.case("call", present, {**full, "residuals": False}))
    assert "key heads" not in cases[0]
    assert '"key heads":2' in cases[1]


def test_what_was_measured_tells_features_of_values_from_those_of_queries_and_keys():
    query, key, value = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 16))
    )
    present, full = OP._prepared((query, key, value), {}, Device.of("sm_90"))
    told = choosing.case("call", present, {**full, "residuals": False})
    for part in ('"features":[8,16]', '"batch":2', '"heads":3', '"queries":5', '"keys":7'):
        assert part in told


def test_of_the_gradients_only_those_wanted_and_not_the_value_alone(on_hopper):
    def loss(wanted):
        def of(q, k, v):
            return dot_product_attention(q, k, v, implementation="cudnn").astype(jnp.float32).sum()

        return jax.jit(jax.grad(of, wanted)).trace(*shapes()).lower(lowering_platforms=("cuda",))

    assert len(jax.tree.leaves(loss((0, 2)).out_info)) == 2
    with pytest.raises(BackendError, match="the gradient of the value alone"):
        loss(2)


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_gradients_of_hidden_keys_are_zero_whatever_cudnn_leaves_there(monkeypatch, layout):
    lengths = jnp.asarray([8, 3, 1])
    arrays = [jnp.full((3, 8, 8, 4), float(i + 1)) for i in range(3)]

    def of_lengths(given, form, by_cudnn, by_cuda):
        return by_cudnn((jnp.full_like(lengths, 8), lengths), None)

    monkeypatch.setattr(cudnn, "_by_mask", of_lengths)
    monkeypatch.setattr(cudnn_call, "backward", lambda qkv, *_: list(qkv))
    saved = dict(zip(("query", "key", "value"), arrays, strict=True)) | {
        "out": arrays[0],
        "logsumexp": jnp.zeros((3, 8, 8)),
    }
    wanted = ("query", "key", "value")
    found = cudnn.cotangent(saved, arrays[0], wanted, {}, types.SimpleNamespace(layout=layout))
    for name, given, grad in zip(wanted, arrays, found, strict=True):
        by_key = grad.swapaxes(1, layout.index("T"))
        for row, length in zip(by_key, (8, 3, 1), strict=True):
            kept = 8 if name == "query" else length
            assert (row[:kept] == given[0, 0, 0, 0]).all()
            assert not row[kept:].any()


def test_the_same_bits_every_time_leave_out_its_backward_alone():
    def routes(**attrs):
        shape = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16)
        roles = {}
        for role, more in (("call", {"residuals": True}), ("cotangent", {"wanted": ("query", "key", "value")})):
            shapes = dict.fromkeys(("query", "key", "value"), shape) | ({"ct": shape} if role == "cotangent" else {})
            full = OP.with_defaults(attrs) | {"saves": "logsumexp", "present": ("query", "key", "value")}
            full |= {"implementation": None, "live": (True, True, True), "scale": 0.125, **more}
            roles[role] = OP.decide(role, shapes, Device.of("sm_90"), **full)
        return roles

    assert {role: found.implementation for role, found in routes().items()} == {"call": "cudnn", "cotangent": "cudnn"}
    found = routes(deterministic=True)
    assert {role: decision.implementation for role, decision in found.items()} == {"call": "cudnn", "cotangent": "cuda"}
    assert "not cudnn: the same bits in every run are required" in found["cotangent"].reason


def test_the_pass_hands_the_option_on():
    a = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16)

    def attend(q, k, v):
        s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) / 8
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s).astype(v.dtype), v)

    for asked in (False, True):
        passes = fl.Strategy(dot_product_attention={"deterministic": asked})
        (site,) = fl.find(attend, a, a, a, passes=passes, device="sm_90").candidates
        assert site.plan.attrs.get("deterministic", False) is asked
