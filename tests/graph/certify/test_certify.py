"""The proof of a match: a wrong replacement is refused, whether its values or only its gradients are wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import fusionlab as fl
from fusionlab.graph.canonical.view import CanonicalView
from fusionlab.graph.certify import reduced_sizes as reducing
from fusionlab.graph.certify.certify import Certifier
from fusionlab.graph.certify.programs import _added
from fusionlab.graph.certify.verdict import relative_error
from fusionlab.graph.declined import Declined
from fusionlab.graph.matching import constants
from fusionlab.graph.matching.constants import constant_array
from fusionlab.graph.matching.region import cut, escapes, region_signature
from fusionlab.graph.program.signature import Memo
from fusionlab.graph.program.trace import trace
from fusionlab.kernels import meaning_of

X, W, B = (512, 96), (96, 40), (40,)
SQUARE = ((48, 48), (48, 48), (48,))


def region_of(fn, *shapes, dtype=jnp.float32, names="xwb"):
    """All of `fn` as one region whose leaves are its inputs."""
    block = trace(fn, *(jax.ShapeDtypeStruct(s, dtype) for s in shapes)).top
    view = CanonicalView(block)
    return cut(view, block.outputs[0], {n: view.ref[v.id].nid for n, v in zip(names, block.inputs, strict=False)})


def verdict(original, replacement, *shapes, dtype=jnp.float32):
    return Certifier(meaning_of).region(region_of(original, *shapes, dtype=dtype), replacement, "test")


def layer(x, w, b):
    return jax.nn.relu(x @ w + b)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "right",
    [
        layer,
        lambda x, w, b: fl.ops.gemm_epilogue(x, w, b, activation="relu"),
        lambda x, w, b: jax.nn.relu((w.T @ x.T).T + b[None]),
        lambda x, w, b: jax.nn.relu(2.0 * (x @ (0.5 * w)) + b),
    ],
    ids=["itself", "the fused op", "transposed", "scaled back"],
)
def test_a_right_replacement_is_proved(right, dtype):
    assert verdict(layer, right, X, W, B, dtype=dtype).ok


WRONG_VALUES = {
    "the weight transposed": lambda x, w, b: jax.nn.relu(x @ w.T + b),
    "rows and features exchanged": lambda x, w, b: jax.nn.relu((x @ w).T + b),
    "the operands exchanged": lambda x, w, b: jax.nn.relu(w @ x + b),
    "the bias along the rows": lambda x, w, b: jax.nn.relu(x @ w + b[:, None]),
    "a wrong factor": lambda x, w, b: jax.nn.relu(1.001 * (x @ w) + b),
    "a missing bias": lambda x, w, b: jax.nn.relu(x @ w),
    "a bias added twice": lambda x, w, b: jax.nn.relu(x @ w + b + b),
    "the bias subtracted": lambda x, w, b: jax.nn.relu(x @ w - b),
    "the bias after the activation": lambda x, w, b: jax.nn.relu(x @ w) + b,
    "another activation": lambda x, w, b: jax.nn.gelu(x @ w + b),
    "no activation": lambda x, w, b: x @ w + b,
    "a small extra term": lambda x, w, b: jax.nn.relu(x @ w + b) + 1e-3 * x.sum(1, keepdims=True),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_are_refused(name):
    found = verdict(layer, WRONG_VALUES[name], *SQUARE)
    assert found.code == "value", found
    assert found.detail.startswith("value differs by")
    assert not found.ok


@jax.custom_jvp
def relu_passing_all(h):
    return jax.nn.relu(h)


relu_passing_all.defjvp(lambda primals, tangents: (relu_passing_all(*primals), tangents[0]))


@jax.custom_vjp
def linear_reversing(x, w, b):
    return x @ w + b


linear_reversing.defvjp(
    lambda x, w, b: (linear_reversing(x, w, b), (x, w)),
    lambda saved, ct: (-ct @ saved[1].T, saved[0].T @ ct, ct.sum(0)),
)


WRONG_GRADIENTS = {
    "custom_jvp": lambda x, w, b: relu_passing_all(x @ w + b),
    "custom_vjp": lambda x, w, b: jax.nn.relu(linear_reversing(x, w, b)),
    "stop_gradient on the weight": lambda x, w, b: jax.nn.relu(x @ lax.stop_gradient(w) + b),
    "stop_gradient on the bias": lambda x, w, b: jax.nn.relu(x @ w + lax.stop_gradient(b)),
    "stop_gradient on all of it": lambda x, w, b: lax.stop_gradient(layer(x, w, b)),
}


@pytest.mark.parametrize("name", WRONG_GRADIENTS)
@pytest.mark.parametrize("side", ["in the replacement", "in the original"])
def test_right_values_with_wrong_gradients_are_refused(name, side):
    pair = (layer, WRONG_GRADIENTS[name]) if side == "in the replacement" else (WRONG_GRADIENTS[name], layer)
    found = verdict(*pair, X, W, B)
    assert found.code == "gradient", found
    assert found.detail.startswith("gradient of ")


def test_the_gradient_that_differs_is_named():
    found = verdict(layer, WRONG_GRADIENTS["stop_gradient on the bias"], X, W, B)
    assert found.detail.startswith("gradient of b differs by 1 relative")
    found = verdict(layer, WRONG_GRADIENTS["stop_gradient on the weight"], X, W, B)
    assert found.detail.startswith("gradient of w differs by 1 relative")


def test_what_cannot_be_evaluated_is_uncertified_not_believed():
    found = verdict(lambda x, w, b: jnp.sort(x @ w + b), lambda x, w, b: jnp.sort(x @ w + b), X, W, B)
    assert found.code == "uncertified"
    assert "primitive sort" in found.detail


def test_an_attention_with_a_wrong_scale_mask_or_layout_is_refused():
    def attention(q, k, v, scale=0.25, causal=True, axis=-1):
        s = jnp.einsum("bthd,bshd->bhts", q, k) * scale
        if causal:
            s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e30)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, axis), v)

    q = (2, 24, 3, 16)
    op = fl.ops.dot_product_attention

    def judge(replacement):
        return verdict(attention, replacement, q, q, q).code

    assert judge(lambda q, k, v: op(q, k, v, scale=0.25, is_causal=True)) is None
    assert judge(lambda q, k, v: op(q, k, v, scale=0.25, is_causal=True, implementation="xla_blockwise")) is None
    assert judge(lambda q, k, v: op(q, k, v, scale=0.2501, is_causal=True)) == "value"
    assert judge(lambda q, k, v: op(q, k, v, scale=0.25)) == "value"
    assert judge(lambda q, k, v: op(k, q, v, scale=0.25, is_causal=True)) == "value"
    assert judge(lambda q, k, v: op(q, v, k, scale=0.25, is_causal=True)) == "value"
    assert judge(lambda q, k, v: op(*(a.swapaxes(1, 2) for a in (q, k, v)), scale=0.25).swapaxes(1, 2)) == "value"


def test_scores_behind_projections_are_not_so_large_that_their_scale_hardly_matters():
    """Of weights of the order of 1, those of 1024 features would be about 10^6, and any softmax of them is one key's."""

    def layer(x, w, b, scale=1 / 512):
        h = jnp.sin(x)
        q, k = h @ w, h @ w.T
        return jax.nn.softmax(q @ k.T * scale + b) @ h

    def judge(replacement):
        return verdict(layer, replacement, (512, 1024), (1024, 1024), (512,)).code

    assert judge(lambda x, w, b: layer(x, w * 2, b, 1 / 2048)) is None
    assert judge(lambda x, w, b: layer(x, w, b, 1.0001 / 512)) == "value"
    assert judge(lambda x, w, b: layer(x, w, b * 1.0001)) == "value"


def test_scores_of_what_is_itself_an_input_are_not_so_large_either():
    """Layers without a norm before: tokens and weights are both inputs."""

    def own(x, w, b, scale=1 / 512):  # the tokens are read more often than the weight
        return jax.nn.softmax((x @ w) @ (x @ w.T).T * scale + b) @ x

    def together(x, w, b, scale=1 / 32):  # as often, and they have more axes
        q, k, v = jnp.split(x @ w, 3, -1)
        return jax.nn.softmax(q @ k.swapaxes(1, 2) * scale + b) @ v

    def judge(fn, replacement, *shapes):
        return verdict(fn, replacement, *shapes).code

    for fn, scale, shapes in (
        (own, 1 / 512, ((512, 1024), (1024, 1024), (512,))),
        (together, 1 / 32, ((4, 512, 1024), (1024, 3072), (512,))),
    ):
        assert (
            judge(fn, lambda x, w, b, fn=fn: fn(x * 2, w / 2, b) if fn is together else fn(x, -w, b), *shapes) is None
        )
        assert judge(fn, lambda x, w, b, fn=fn, s=scale: fn(x, w, b, 1.001 * s), *shapes) == "value"
        assert judge(fn, lambda x, w, b, fn=fn: fn(x, w, 0 * b), *shapes) == "value"


def test_heads_split_off_a_product_are_proved_at_sizes_of_a_real_model():
    def heads(x, w, b):  # the features are split and never merged again
        return (x @ w + b).reshape(512, 12, 64)

    def judge(replacement):
        return verdict(heads, replacement, (512, 768), (768, 768), (768,)).code

    assert judge(lambda x, w, b: jnp.einsum("te,ehd->thd", x, w.reshape(768, 12, 64)) + b.reshape(12, 64)) is None
    assert judge(lambda x, w, b: (x @ w + b).reshape(512, 64, 12).swapaxes(1, 2)) == "value"
    assert judge(lambda x, w, b: (x @ w.T + b).reshape(512, 12, 64)) == "value"
    assert judge(lambda x, w, b: (x @ w).reshape(512, 12, 64)) == "value"


@pytest.mark.parametrize("case", ["the same", "another scale", "no bias", "a weight turned"])
def test_an_attention_over_as_many_tokens_as_features_is_proved_at_a_few_of_them(case):
    """The 2048 features are 16 heads of 128: were those not reduced, there would be 2048 x 2048 scores of each head in float64."""

    def attend(x, w, b, scale=1 / 16):
        q, k, v = ((h @ w + b).reshape(4, 2048, 16, 128) for h in (x, jnp.sin(x), jnp.cos(x)))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(4, 2048, 2048)

    def by_head(x, w, b, scale=1 / 16):
        q, k, v = (
            jnp.einsum("bte,ehd->bhtd", h, w.reshape(2048, 16, 128)) + b.reshape(16, 1, 128)
            for h in (x, jnp.sin(x), jnp.cos(x))
        )
        weights = jax.nn.softmax(q * scale @ k.swapaxes(2, 3))
        return jnp.einsum("bhqd->bqhd", weights @ v).reshape(4, 2048, 2048)

    replacement = {
        "the same": by_head,
        "another scale": lambda x, w, b: by_head(x, w, b, 1.001 / 16),
        "no bias": lambda x, w, b: by_head(x, w, 0 * b),
        "a weight turned": lambda x, w, b: by_head(x, w.T, b),
    }[case]
    code = verdict(attend, replacement, (4, 2048, 2048), (2048, 2048), (2048,)).code
    assert code == (None if case == "the same" else "value")


@pytest.mark.parametrize("few", [False, True])
def test_what_hangs_on_the_number_of_a_head_or_feature_is_told_where_others_are_reduced_too(monkeypatch, few):
    """96 tokens of 6 heads of 16: more than are evaluated soon, if that is set to few."""
    if few:
        monkeypatch.setattr(reducing, "SOON", (1 << 14, 1 << 30))

    def attention(change=lambda q: q, after=lambda o: o):
        def attend(x, w):
            q, k, v = ((h @ w).reshape(3, 96, 6, 16) for h in (x, jnp.sin(x), jnp.cos(x)))
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", change(q), k) / 4)
            return after(jnp.einsum("bhqk,bkhd->bqhd", weights, v)).reshape(3, 96, 96)

        return attend

    def judge(old, new):
        return verdict(old, new, (3, 96, 96), (96, 96)).code

    def turned(count, sign=1.0):  # rotary positions of the first features of a head
        def turn(q):
            kept, first = q[..., count:], q[..., :count]
            angles = jnp.arange(96.0)[:, None, None] / 10 ** jnp.arange(count // 2)
            a, b = jnp.split(first, 2, axis=-1)
            c, s = jnp.cos(angles), sign * jnp.sin(angles)
            return jnp.concatenate([a * c - b * s, b * c + a * s, kept], axis=-1)

        return turn

    plain = attention()
    assert judge(plain, attention()) is None
    assert judge(plain, attention(lambda q: q * 1.001)) == "value"
    assert judge(attention(lambda q: q * (jnp.arange(6)[:, None] < 5)), plain) == "value"
    assert judge(attention(lambda q: q * (jnp.arange(16) < 15)), plain) == "value"
    assert judge(attention(after=lambda o: jnp.where(jnp.arange(6)[:, None] == 5, 0.0, o)), plain) == "value"
    assert judge(attention(after=lambda o: o * (1 + jnp.argmax(o, 2, keepdims=True))), plain) == "value"
    assert judge(attention(turned(6)), attention(turned(6))) is None
    assert judge(attention(turned(6)), attention(turned(6, -1.0))) == "value"
    assert judge(attention(turned(16)), attention(turned(16))) is None
    assert judge(attention(turned(16)), attention(turned(8))) == "value"


def test_what_is_too_much_to_evaluate_soon_is_evaluated_where_a_machine_can(monkeypatch):
    """A mask cut out of a larger one: nothing is split, so there are no parts to reduce."""
    monkeypatch.setattr(reducing, "SOON", (1 << 14, 1 << 30))

    def masked(x, size=256):
        return jnp.where(jnp.tril(jnp.ones((size, size), bool))[:64, :64], x, 0.0)

    assert verdict(masked, lambda x: masked(x, 64), (128, 64, 64)).ok
    assert (
        verdict(masked, lambda x: jnp.where(jnp.triu(jnp.ones((64, 64), bool)), x, 0.0), (128, 64, 64)).code == "value"
    )
    monkeypatch.setattr(reducing, "AT_ALL", (1 << 14, 1 << 30))
    assert verdict(masked, lambda x: masked(x, 64), (128, 64, 64)).code == "uncertified"


# -- the cache --------------------------------------------------------------------------------------------------------


def test_parts_of_a_projection_are_proved_at_sizes_of_a_real_model():
    def parts(x, w, b):  # [512, 768] @ [768, 3 x 768]
        q, k, v = jnp.split(x @ w + b, 3, axis=-1)
        return q * k + v

    def judge(replacement):
        return verdict(parts, replacement, (512, 768), (768, 2304), (2304,))

    def sliced(x, w, b):
        q, k, v = ((x @ w + b)[:, i : i + 768] for i in range(0, 2304, 768))
        return q * k + v

    assert judge(sliced).ok
    assert judge(lambda x, w, b: parts(x, w.reshape(768, 3, 768).reshape(768, 2304), b)).ok
    assert judge(lambda x, w, b: sliced(x, jnp.roll(w, 768, 1), jnp.roll(b, 768))).code == "uncertified"

    def interleaved(x, w, b):  # the parts of each of 12 heads side by side
        q, k, v = jnp.split((x @ w + b).reshape(512, 12, 192), 3, axis=-1)
        return (q * k + v).reshape(512, 768)

    def exchanged(x, w, b):
        k, q, v = jnp.split(x @ w + b, 3, axis=-1)
        return q * v + k

    assert judge(exchanged).code == "value"
    # 768 is one of 3 parts, or 12 parts of 64: not both at sizes of their own.
    assert judge(interleaved).code == "uncertified"


def test_a_step_is_proved_to_be_the_one_that_is_written():
    """A cache of a real model's size, written at a number that is an operand: each of 0, 1 and 2 is tried."""

    def write(cache, new, step, other):
        cache = lax.dynamic_update_slice(cache, new, (0, 0, step, 0))
        seen = lax.broadcasted_iota(jnp.int32, (1, 1, 640, 1), 2) <= step + other
        return jnp.sum(jnp.where(seen, cache, 0.0), axis=2)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 16, 640, 64), (4, 16, 1, 64))]
    block = trace(write, *shapes, *[jax.ShapeDtypeStruct((), jnp.int32)] * 2).top
    view = CanonicalView(block)
    leaves = zip(("cache", "new", "step", "other"), block.inputs, strict=True)
    region = cut(view, block.outputs[0], {n: view.ref[v.id].nid for n, v in leaves})

    def judge(replacement):
        return Certifier(meaning_of).region(region, replacement, "test")

    assert judge(write).ok
    assert judge(lambda cache, new, step, other: write(cache, new, step, other + 0)).ok
    wrong = {
        "at 0": lambda cache, new, step, other: write(cache, new, step * 0, step + other),
        "at the other": lambda cache, new, step, other: write(cache, new, other, step),
        "one later": lambda cache, new, step, other: write(cache, new, step + 1, other - 1),
        "not at all": lambda cache, new, step, other: write(cache, new * 0, step, other),
    }
    assert {name: judge(fn).code for name, fn in wrong.items()} == dict.fromkeys(wrong, "value")


def test_the_same_region_is_proved_once_and_counted():
    certifier = Certifier(meaning_of)
    for _ in range(3):
        assert certifier.region(region_of(layer, X, W, B), layer, "relu").ok
    assert (certifier.hits, certifier.misses) == (2, 1)


def scaled(factor):
    return lambda x, w, b: jax.nn.relu((x @ w) * factor + b)


@pytest.mark.parametrize(
    ("fn", "shape", "dtype", "what"),
    [
        (scaled(0.5), (256, 96), jnp.float32, "relu"),
        (scaled(0.5), X, jnp.bfloat16, "relu"),
        (layer, X, jnp.float32, "relu"),
        (scaled(0.25), X, jnp.float32, "relu"),
        (scaled(0.5), X, jnp.float32, "gelu"),
    ],
    ids=["shape", "dtype", "operation", "literal", "replacement"],
)
def test_whatever_matters_is_part_of_the_key(fn, shape, dtype, what):
    certifier = Certifier(meaning_of)
    certifier.region(region_of(scaled(0.5), X, W, B), layer, "relu")
    certifier.region(region_of(fn, shape, W, B, dtype=dtype), layer, what)
    assert (certifier.hits, certifier.misses) == (0, 2)


def test_a_signature_tells_captured_arrays_apart():
    one, two = (jax.random.normal(jax.random.key(i), (3, 4)) for i in range(2))

    def signature(scale, shift):
        block = trace(lambda x: x * scale + shift, jax.ShapeDtypeStruct((3, 4), jnp.float32)).top
        values = {"x": block.inputs[0], "scale": block.nodes[0].inputs[1], "shift": block.nodes[1].inputs[1]}
        view = CanonicalView(block)
        return region_signature(cut(view, block.outputs[0], {n: view.ref[v.id].nid for n, v in values.items()}))

    assert signature(one, two)[1:] != signature(one, one)[1:]
    assert len({one for _, one, *_ in signature(one, two)[0]}) == 3


def test_signatures_do_not_depend_on_ids_or_names():
    def twice(x, w, b):
        return layer(layer(x, w, b), w, b)

    block = trace(twice, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in SQUARE)).top
    view = CanonicalView(block)
    relus = [n for n in block.nodes if n.primitive == "custom_jvp_call"]
    x, w, b = (view.ref[v.id].nid for v in block.inputs)
    first = cut(view, relus[0].outputs[0], {"x": x, "w": w, "b": b})
    second = cut(view, relus[1].outputs[0], {"x": view.ref[relus[0].outputs[0].id].nid, "w": w, "b": b})
    assert region_signature(first) == region_signature(second)
    assert first.node_ids.isdisjoint(second.node_ids)


def test_a_new_certifier_remembers_nothing():
    first, second = Certifier(meaning_of), Certifier(meaning_of)
    first.region(region_of(layer, X, W, B), layer, "relu")
    second.region(region_of(layer, X, W, B), layer, "relu")
    assert (second.hits, second.misses) == (0, 1)


# -- what rounding leaves ------------------------------------------------------------------------------------------------


def tiny(x, w, b):
    return jnp.tanh(x @ w) + 1e-14 * jnp.tanh(b)


def filled(x, w, b):
    return jnp.where(x > 0, jnp.tanh(x @ w) * b, -1e30)


SMALL_ON_PURPOSE = {
    "a tiny term is dropped": (tiny, lambda x, w, b: jnp.tanh(x @ w) + 0 * b),
    "a tiny term is another": (tiny, lambda x, w, b: jnp.tanh(x @ w) + 1e-14 * jnp.sin(b)),
    "beside a large fill": (filled, lambda x, w, b: jnp.where(x > 0, jnp.sin(x @ w) * b, -1e30)),
    "beside a large fill, a factor": (filled, lambda x, w, b: jnp.where(x > 0, 2 * jnp.tanh(x @ w) * b, -1e30)),
}


@pytest.mark.parametrize("name", SMALL_ON_PURPOSE)
def test_what_is_small_on_purpose_is_not_taken_for_noise(name):
    original, wrong = SMALL_ON_PURPOSE[name]
    found = verdict(original, wrong, *SQUARE)
    assert found.code == "gradient", found
    assert verdict(original, original, *SQUARE).ok


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_a_gradient_that_cancels_is_noise(scale):
    """What is added to all keys of a query does not change its softmax: its gradient is what rounding leaves of a sum."""

    def original(x, w, b):
        return scale * (jax.nn.softmax(x @ (w + b).T) @ w)

    def right(x, w, b):
        return scale * (jax.nn.softmax(x @ w.T + (x @ b)[:, None]) @ w)

    def wrong(x, w, b):
        return scale * (jax.nn.softmax(x @ w.T + (x @ b)[None]) @ w)

    shapes = (30, 20), (40, 20), (20,)
    assert verdict(original, right, *shapes).ok
    assert verdict(original, wrong, *((48, 48), (48, 48), (48,))).code == "value"


# -- regions ----------------------------------------------------------------------------------------------------------


def test_a_region_as_a_function_gives_the_programs_values():
    region = region_of(layer, (3, 4), (4, 5), (5,))
    # JAX's arrays: numpy's own product of two of its arrays rounds otherwise on some processors.
    args = [
        jnp.asarray(np.random.default_rng(i).normal(size=v.shape), jnp.float32) for i, v in enumerate(region.inputs)
    ]
    (out,) = jaxpr_as_fun(region.jaxpr())(*args)
    np.testing.assert_array_equal(out, layer(*args))


def test_a_leaf_binds_to_what_the_boundary_reads_through_views_but_not_through_casts_or_factors():
    half = jnp.bfloat16
    region = region_of(
        lambda x, w, b: x.T.astype(half) @ w.astype(half) + (2 * b.astype(half))[None], (4, 3), (4, 5), (5,)
    )
    makers = {n: region.block.producer[v.id].primitive for n, v in region.leaves.items()}
    assert makers == {"x": "convert_element_type", "w": "convert_element_type", "b": "mul"}
    assert {str(v.dtype) for v in region.leaves.values()} == {"bfloat16"}


def test_a_value_that_is_no_leaf_stops_the_cut():
    block = trace(lambda x, w, b: x @ w + b, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in (X, W, B))).top
    view = CanonicalView(block)
    with pytest.raises(Declined, match="is read inside the site but is not one of its operands"):
        cut(view, block.outputs[0], {"x": view.ref[block.inputs[0].id].nid})


def test_an_operand_read_in_two_dtypes_is_no_operand():
    def fn(x, w, b):
        return (x @ w).astype(jnp.bfloat16).astype(jnp.float32) + (
            x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        ).astype(jnp.float32) * b

    with pytest.raises(Declined, match="operand x is read in 2 different forms"):
        region_of(fn, X, W, B)


def test_escapes_name_the_value_and_its_reader():
    def fn(x, w, b):
        h = x @ w + b
        return jax.nn.relu(h), jnp.sin(h)

    block = trace(fn, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in (X, W, B))).top
    view = CanonicalView(block)
    region = cut(view, block.outputs[0], {n: view.ref[v.id].nid for n, v in zip("xwb", block.inputs, strict=True)})
    (escape,) = escapes(region)
    assert (escape.node.primitive, escape.user.primitive) == ("add", "sin")


def test_a_constant_is_computed_and_an_argument_is_not():
    table = jnp.arange(16.0).reshape(4, 4)

    def fn(x):
        return jnp.tril(jnp.ones((4, 4), bool)), (table > 3)[:3], x > 0

    block = trace(fn, jnp.zeros((4, 4))).top
    view = CanonicalView(block)
    mask, cut_off, data = (constant_array(view, o, Memo()) for o in block.outputs)
    np.testing.assert_array_equal(mask, np.tril(np.ones((4, 4), bool)))
    np.testing.assert_array_equal(cut_off, np.arange(16).reshape(4, 4)[:3] > 3)
    assert data is None


def test_a_constant_is_as_large_as_what_is_distinct_in_it(monkeypatch):
    table, row = jnp.arange(16.0).reshape(4, 4), jnp.arange(4.0)
    monkeypatch.setattr(constants, "_LIMIT", 8)

    def fn(x):
        # Views of a captured array with more than 8 entries, with no more, and of one that is broadcast.
        return table[:3].T, table[1:2], jnp.broadcast_to(row, (9, 4)), jnp.broadcast_to(row, (9, 4)) + 1

    view = CanonicalView(trace(fn, jnp.zeros(4)).top)
    large, small, repeated, computed = (constant_array(view, o, Memo()) for o in view.block.outputs)
    assert large is None
    assert computed is None
    np.testing.assert_array_equal(small, np.arange(4.0, 8.0)[None])
    np.testing.assert_array_equal(repeated, np.broadcast_to(np.arange(4.0), (9, 4)))
    assert repeated.strides[0] == 0


def test_relative_error_is_infinite_where_specials_differ_and_nan_never_passes():
    one = np.array([1.0, 2.0])
    assert relative_error(one, one) == 0.0
    assert relative_error(one, np.array([1.0, 2.5])) == 0.25
    assert relative_error(one, np.array([1.0, np.nan])) == np.inf
    assert relative_error(np.array([1.0, np.nan]), np.array([1.0, np.nan])) == 0.0
    assert relative_error(np.array([np.inf]), np.array([-np.inf])) == np.inf
    assert relative_error(one, one[:1]) == np.inf
    assert relative_error(np.zeros(2), np.array([0.0, 1e-40])) > 0


@pytest.mark.parametrize(
    "first", [lambda b: 0.0, jnp.max, lambda b: jnp.mean(jnp.tanh(b))], ids=["alone", "max", "tanh"]
)
def test_what_is_added_to_scores_is_known_whatever_else_reads_it(first):
    def weights(s, b, g):
        least = first(b)  # traced before the sum
        e = jnp.exp(s * g + b)
        return e / e.sum(-1, keepdims=True) + least

    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert _added(jax.make_jaxpr(lambda q, b, g: weights(q @ q.T, b, g))(shape, shape, shape), 3) == [1]
