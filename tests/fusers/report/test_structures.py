"""Folding: small sites become nodes of the fused ops, and what they are parts of is matched on top of them."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.fusers.passes.lerp.examples import LERP
from fusionlab.fusers.report.structure_forms import FOLDED, SOFTMAX
from fusionlab.fusers.report.structures import STRUCTURE_KINDS, folded_views
from fusionlab.graph.matching.pattern import pattern_of
from fusionlab.models import transformer
from tests.asked import by_default, by_name

from ..checks import normal

X, W, V, B = normal((6, 8), (8, 16), (8, 16), (16,))


OTHER_PASSES = ("gemm_epilogue", "dot_product_attention", "layer_norm")


def kinds(fn, *args):
    """Kind -> how often, with every kind that occurs; the pass that fuses blends is off, so that they are told."""
    found = fl.find(fn, *args, passes=OTHER_PASSES).structures
    return {k: n for k in STRUCTURE_KINDS if (n := sum(s.kind == k for s in found))}


def weights(e=8, hidden=24, heads=None):
    """One layer's weights; the projections with an axis for the heads if `heads` is given."""
    inner = (e,) if heads is None else (heads, e // heads)
    shapes = {
        "q": (e, *inner),
        "k": (e, *inner),
        "v": (e, *inner),
        "o": (*inner, e),
        "up": (e, hidden),
        "down": (hidden, e),
    }
    biases = {"bq": inner, "bk": inner, "bv": inner, "bo": (e,), "bu": (hidden,), "bd": (e,)}
    rest = {"gate": (e, hidden), "s1": (e,), "s2": (e,)}
    names = [*shapes, *biases, *rest]
    return dict(zip(names, normal(*(shapes | biases | rest).values()), strict=True))


def norm(x, scale):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale


def rms(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def layer(
    p,
    x,
    *,
    norm=norm,
    first=True,
    biased=True,
    out_biased=None,
    gated=False,
    causal=False,
    act=jax.nn.gelu,
    swap=False,
    residual=1.0,
    heads=2,
):
    """A transformer layer as people write it."""
    by_heads = p["q"].ndim == 3
    end_biased = biased if out_biased is None else out_biased

    def linear(h, w, b):
        return h @ p[w] + p[b] if biased else h @ p[w]

    def split(h, w, b):
        if by_heads:
            y = jnp.einsum("bte,ehc->bthc", h, p[w])
            return y + p[b] if biased else y
        y = linear(h, w, b)
        shape = (*y.shape[:-1], heads, y.shape[-1] // heads)
        return jnp.swapaxes(y.reshape(*y.shape[:-1], shape[-1], heads), -1, -2) if swap else y.reshape(shape)

    def attend(h):
        q, k, v = split(h, "q", "bq"), split(h, "k", "bk"), split(h, "v", "bv")
        s = jnp.einsum("bthc,bshc->bhts", q, k) / jnp.sqrt(q.shape[-1])
        if causal:
            s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
        a = jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(s), v)
        if by_heads:
            y = jnp.einsum("bthc,hce->bte", a, p["o"])
        else:
            y = a.reshape(*a.shape[:2], -1) @ p["o"]
        return y + p["bo"] if end_biased else y

    def feed(h):
        u = act(linear(h, "up", "bu"))
        return linear(u * (h @ p["gate"] + p["bu"] if biased else h @ p["gate"]) if gated else u, "down", "bd")

    if first:
        x = x + residual * attend(norm(x, p["s1"]))
        return x + feed(norm(x, p["s2"]))
    x = norm(x + residual * attend(x), p["s1"])
    return norm(x + feed(x), p["s2"])


INPUT = normal((3, 5, 8))[0]
SPELLINGS = {
    "norm before": {},
    "norm after": {"first": False},
    "no biases": {"biased": False},
    "rms norm": {"norm": rms},
    "gated": {"gated": True, "act": jax.nn.silu},
    "gated, no biases": {"gated": True, "biased": False, "norm": rms},
    "causal": {"causal": True},
    "relu, norm after": {"act": jax.nn.relu, "first": False},
    "the result alone bare": {"out_biased": False},
    "the result alone biased": {"biased": False, "out_biased": True},
}


# Weights with an axis for the heads, of which only some are biased, are not among the examples.
BOTH = [(name, by_heads) for name in SPELLINGS for by_heads in (False, True) if not (by_heads and "alone" in name)]


@pytest.mark.parametrize(("spelling", "by_heads"), BOTH)
def test_a_transformer_layer_is_one_structure_in_every_spelling(spelling, by_heads):
    p = weights(heads=2 if by_heads else None)
    found = fl.find(lambda p, x: layer(p, x, **SPELLINGS[spelling]), p, INPUT)
    (whole,) = [s for s in found.structures if s.kind == "transformer_layer"]
    assert ("norm after" in whole.text) == ("norm after" in spelling)
    assert ("gated" in whole.text) == ("gated" in spelling)
    assert set(whole.sites) == {c.id for c in found.candidates}
    assert whole.node_ids >= {n for c in found.candidates for n in c.node_ids}


@pytest.mark.parametrize("by_heads", [False, True])
def test_a_transformer_layer_whose_gated_pair_is_one_op(by_heads):
    p = weights(heads=2 if by_heads else None)
    passes = fl.Strategy(
        **dict.fromkeys((p.name for p in by_default()), True) | {"gated_matmul": {"prefer": "concatenated"}}
    )
    found = fl.find(lambda p, x: layer(p, x, **SPELLINGS["gated, no biases"]), p, INPUT, passes=passes, device="cpu")
    assert "gated_matmul" in {c.op for c in found.candidates}
    (whole,) = [s for s in found.structures if s.kind == "transformer_layer"]
    assert "gated" in whole.text
    assert set(whole.sites) == {c.id for c in found.candidates}
    assert "glu_pair" not in {s.kind for s in found.structures}


@pytest.mark.parametrize(
    "changed",
    [{"residual": 0.5}, {"swap": True}, {"act": lambda h: h}],
    ids=["a scaled residual", "heads split the other way round", "no activation"],
)
def test_what_computes_something_else_is_no_transformer_layer(changed):
    p = weights()
    assert "transformer_layer" in kinds(lambda x: layer(p, x), INPUT)
    assert "transformer_layer" not in kinds(lambda x: layer(p, x, **changed), INPUT)


def test_a_layer_whose_feed_forward_reads_another_value_is_none():
    p = weights()

    def parallel(p, x):  # attention and feed-forward side by side
        return layer(p, x) - x + norm(x, p["s1"])

    def other(x, y):
        h = layer(p, x)
        return h + (layer(p, y) - y)

    assert kinds(parallel, p, INPUT).get("transformer_layer") == 1
    assert kinds(other, INPUT, INPUT + 1).get("transformer_layer") == 2
    assert "repeated_layers" not in kinds(other, INPUT, INPUT + 1)


def test_equal_layers_in_a_row_are_told_by_what_they_compute_and_where_it_goes():
    many = [weights() for _ in range(4)]

    def stack(ps, x, acts=(jax.nn.gelu,) * 4):
        for i, p in enumerate(ps):
            with jax.named_scope(f"of_another_name_{i}"):
                x = layer(p, x, act=acts[i])
        return x

    (row,) = [s for s in fl.find(stack, many, INPUT).structures if s.kind == "repeated_layers"]
    assert row.text.startswith("4 equal layers in a row")
    assert len(row.sites) == 4 * 9
    silu = (jax.nn.gelu, jax.nn.gelu, jax.nn.silu, jax.nn.silu)
    rows = [s.text[:14] for s in fl.find(lambda p, x: stack(p, x, silu), many, INPUT).structures if "rep" in s.kind]
    assert rows == ["2 equal layers", "2 equal layers"]
    mixed = (jax.nn.gelu, jax.nn.silu, jax.nn.gelu, jax.nn.silu)
    assert "repeated_layers" not in kinds(lambda p, x: stack(p, x, mixed), many, INPUT)


@pytest.mark.parametrize("wrap", ["scan", "remat", "vmap", "jit"])
def test_layers_are_found_inside_regions(wrap):
    p = weights()
    stacked = jax.tree.map(lambda a: jnp.stack([a, a, a]), p)
    inside = {
        "scan": lambda x: jax.lax.scan(lambda h, q: (layer(q, h), None), x, stacked)[0],
        "remat": jax.checkpoint(lambda x: layer(p, x)),
        "vmap": jax.vmap(lambda x: layer(p, x[None])[0]),
        "jit": jax.jit(lambda x: layer(p, x)),
    }[wrap]
    assert kinds(inside, INPUT).get("transformer_layer") == 1


def test_the_models_layers_are_found_with_their_parts():
    params = transformer.init(jax.random.key(0), 3, embed=32)
    x = transformer.inputs(jax.random.key(1), 2, 16, 32)

    def model(ps, x):
        for p in ps:
            x = transformer.block(p, x, heads=4)
        return x

    want = {"transformer_layer": 3, "repeated_layers": 1, "qkv_siblings": 3, "residual_norm": 5}
    assert kinds(model, params, x) == want


def test_a_function_that_is_fused_already_has_the_same_structures():
    p = weights()

    def two(x):
        return layer(p, layer(p, x))

    before, after = fl.find(two, INPUT), fl.find(fl.fuse(two, passes=by_name()), INPUT)
    assert not after.candidates
    assert [s.kind for s in after.structures] == [s.kind for s in before.structures]
    assert all(not s.sites for s in after.structures)


def test_a_folded_view_holds_a_node_for_each_site():
    p = weights()
    found = fl.find(lambda x: layer(p, x), INPUT)
    ((view, _),) = folded_views(found)
    assert sorted(t.of.id for ts in view.tiles_at.values() for t in ts) == sorted(c.id for c in found.candidates)
    assert "exp" not in view.by_op
    assert "dot" not in view.by_op
    assert len(view.by_op["gemm_epilogue"]) == 6
    inner = {v.id for c in found.candidates for n in c.site.nodes for v in n.outputs} - {
        c.root.id for c in found.candidates
    }
    assert not inner & view.ref.keys()


CUBE = normal((3, 3, 5, 8), (8, 8, 8))[0]


def test_two_axes_of_one_value_do_not_meet():
    w1, w2 = W, V
    square = normal((8, 8, 4))[0]
    assert kinds(lambda x, y, w: x + w * (y - x.T), W[:, :8], W[:, :8] + 1, jnp.asarray(0.3)) == {}
    assert kinds(lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True).swapaxes(0, 1), square) == {}
    turned = normal((6, 6, 8))[0]
    assert kinds(lambda x: jax.nn.silu(x @ w1) * (x.swapaxes(0, 1) @ w2), turned) == {}


def test_layers_read_turned_are_in_no_row():
    p, q = weights(), weights()
    cube = normal((5, 5, 8))[0]
    assert kinds(lambda x: layer(q, layer(p, x)), cube)["repeated_layers"] == 1
    axial = kinds(lambda x: layer(q, layer(p, x).swapaxes(0, 1)), cube)
    assert axial["transformer_layer"] == 2
    assert "repeated_layers" not in axial


def test_layers_that_branch_are_in_rows_of_their_own_kind():
    p = [weights() for _ in range(4)]

    def branches(x, first):
        a = layer(p[0], x)
        one, two = layer(p[1], a), layer(p[2], a, act=jax.nn.silu)
        return (one + two) if first else (two + one)

    for first in (True, False):
        (row,) = [
            s for s in fl.find(lambda x, f=first: branches(x, f), INPUT).structures if s.kind == "repeated_layers"
        ]
        assert row.text.startswith("2 equal layers")

    def late(x):
        a = layer(p[0], x)
        b = layer(p[1], a)
        return layer(p[2], b) + layer(p[3], a)

    (row,) = [s for s in fl.find(late, INPUT).structures if s.kind == "repeated_layers"]
    assert row.text.startswith("3 equal layers")


def test_layers_of_other_numbers_or_masks_are_not_equal():
    p = weights()

    def attend(cap=None, mask=None):
        def block(x):
            h = norm(x, p["s1"])
            q, k, v = ((h @ p[n]).reshape(*h.shape[:-1], 2, 4) for n in "qkv")
            s = jnp.einsum("bthc,bshc->bhts", q, k) * 0.5
            s = s if cap is None else cap * jnp.tanh(s / cap)
            s = s if mask is None else jnp.where(mask, s, -1e9)
            a = jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(s), v)
            x = x + a.reshape(*x.shape) @ p["o"]
            return x + jax.nn.gelu(norm(x, p["s2"]) @ p["up"]) @ p["down"]

        return block

    near, far = (np.abs(np.subtract.outer(range(5), range(5))) < n for n in (2, 3))
    for one, two, equal in (
        ({"cap": 20.0}, {"cap": 20.0}, True),
        ({"cap": 20.0}, {"cap": 50.0}, False),
        ({"mask": near}, {"mask": near}, True),
        ({"mask": near}, {"mask": far}, False),
    ):
        found = kinds(lambda x, one=one, two=two: attend(**two)(attend(**one)(x)), INPUT)
        assert found["transformer_layer"] == 2
        assert ("repeated_layers" in found) is equal


# -- pairs, siblings, residuals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "second", [lambda x: x @ V, lambda x: x @ V + B, lambda x: (x @ V + B) * 1.0], ids=["bare", "biased", "times one"]
)
def test_a_gated_pair(second):
    assert kinds(lambda x: jax.nn.silu(x @ W) * second(x), X) == {"glu_pair": 1}
    assert kinds(lambda x: second(x) * jax.nn.gelu(x @ W + B), X) == {"glu_pair": 1}


@pytest.mark.parametrize(
    "near",
    [
        lambda x: jax.nn.silu(x @ W) * ((x + 1) @ V),
        lambda x: (x @ W + B) * (x @ V),
        lambda x: jax.nn.silu(x @ W) + x @ V,
        lambda x: jax.nn.silu(x @ W) * (x @ V) ** 2,
        lambda x: 2 * jax.nn.silu(x @ W) * jnp.tanh(x @ V),
        lambda x: fl.ops.gemm_epilogue(x, W, activation="silu") * (x @ W),
    ],
    ids=["of two values", "no activation", "a sum", "squared", "both activated", "one weight"],
)
def test_what_is_nearly_a_gated_pair(near):
    assert "glu_pair" not in kinds(near, X)


HALF = V.shape[1] // 2
PACKED = {
    "split": lambda x: (lambda a, g: a * jax.nn.gelu(g))(*jnp.split(x @ V, 2, -1)),
    "split, with a bias": lambda x: (lambda a, g: jax.nn.silu(a) * g)(*jnp.split(x @ V + B, 2, -1)),
    "sliced": lambda x: (lambda h: h[..., :HALF] * jax.nn.relu(h[..., HALF:]))(x @ V + B),
    "interleaved": lambda x: (lambda h: h[..., ::2] * jax.nn.sigmoid(h[..., 1::2]))(x @ V),
    "stacked": lambda x: (lambda h: jax.nn.gelu(h[0]) * h[1])(jnp.einsum("...d,dcf->c...f", x, V.reshape(-1, 2, HALF))),
    "jax.nn.glu": lambda x: jax.nn.glu(x @ V + B),
    "of 16 bits, in float32": lambda x: (
        lambda h: jax.nn.silu(h[..., :HALF].astype(jnp.float32)) * h[..., HALF:].astype(jnp.float32)
    )(x.astype(jnp.bfloat16) @ V.astype(jnp.bfloat16)),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_a_gated_pair_whose_weights_are_packed_in_one_product(name):
    """Told in every form, and declined with a sentence by the pass: a part of a weight would have to be copied."""
    fn = PACKED[name]
    found = fl.find(fn, X)
    assert [r.code for r in found.rejections if r.pass_name == "gemm_epilogue"] == ["activation"]
    assert "packed into one" in str(found.rejections[0])
    step = jax.value_and_grad(lambda x: fn(x).sum())
    scanned = lambda x: jax.lax.scan(lambda s, row: (s + fn(row).sum(), None), 0.0, x[None])[0]  # noqa: E731
    for form in (fn, step, scanned, jax.vmap(fn)):
        assert kinds(form, X) == {"packed_gate": 1}, form


@pytest.mark.parametrize(
    "near",
    [
        lambda x: (lambda h: h[..., :HALF] * jax.nn.relu(h[..., :HALF]))(x @ V),
        lambda x: (lambda h: jnp.tanh(h[..., :HALF]) * jax.nn.sigmoid(h[..., HALF:]))(x @ V),
        lambda x: (lambda h: h[..., :HALF] * h[..., HALF:])(x @ V),
        lambda x: x[..., :4] * jax.nn.relu(x[..., 4:8]),
        lambda x: (x @ V)[..., :HALF] * jax.nn.relu((x @ (V + 1))[..., HALF:]),
        lambda x: (lambda h: h[..., :HALF] + jax.nn.relu(h[..., HALF:]))(x @ V),
    ],
    ids=["one part", "both activated", "none activated", "no product", "two products", "a sum"],
)
def test_what_is_nearly_a_packed_gate(near):
    assert "packed_gate" not in kinds(near, X)


def attention(q, k, v):
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) * 0.3) @ v


QKV = normal((8, 8), (8, 8), (8, 8), (8, 24))
BATCH = normal((2, 6, 8))[0]


def test_siblings_read_one_value():
    wq, wk, wv, joint = QKV
    assert kinds(lambda x: attention(x @ wq, x @ wk, x @ wv), BATCH) == {"qkv_siblings": 1}
    assert kinds(lambda x: attention(x @ wq + wq[0], x @ wk, x @ wv + wv[0]), BATCH) == {"qkv_siblings": 1}
    turned = {"qkv_siblings": 1}  # between the product and the attention
    assert kinds(lambda x: attention(jnp.roll(x @ wq, 1, -1), jnp.cos(x @ wk), x @ wv), BATCH) == turned
    assert kinds(lambda x, y: attention(x @ wq, y @ wk, y @ wv), BATCH, BATCH + 1) == {}
    assert kinds(lambda x: attention(*jnp.split(x @ joint, 3, -1)), BATCH) == {}
    assert kinds(lambda x: attention(x @ wq, x @ wk, x), BATCH) == {}
    assert kinds(lambda x, y, z: attention(x @ wq, y @ wq, z @ wq), BATCH, BATCH + 1, BATCH + 2) == {}  # of one weight
    assert kinds(lambda x: attention(x @ wq, x.swapaxes(1, 2) @ wk, x.swapaxes(1, 2) @ wv), normal((2, 8, 8))[0]) == {}
    twice = kinds(lambda x, c: attention(attention(x @ wq, c, c), x @ wk, x @ wv), BATCH, BATCH + 1)
    assert twice == {}


def test_siblings_are_counted_once_where_the_function_is_fused_and_differentiated():
    wq, wk, wv, _ = QKV

    def loss(x):
        return attention(x @ wq, x @ wk, x @ wv).sum()

    assert kinds(jax.value_and_grad(fl.fuse(loss)), BATCH) == {"qkv_siblings": 1}


def test_a_residual_that_a_norm_reads():
    s = jnp.ones(8)
    assert kinds(lambda x, y: norm(x + y, s), X, X + 1) == {"residual_norm": 1}
    assert kinds(lambda x, y: rms(x + y, s), X, X + 1) == {"residual_norm": 1}
    assert kinds(lambda x, y: norm(x + 0.5 * y, s), X, X + 1) == {}
    assert kinds(lambda x, y: norm(x * y, s), X, X + 1) == {}
    assert kinds(lambda x, y: norm(x + y, s), X, X[:1] + 1) == {}


@pytest.mark.parametrize("checked", [True, False])
def test_a_row_parallel_product(checked):
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def shard(fn):
        specs = {"in_specs": (spec(None, "d"), spec("d", None), spec()), "out_specs": spec()}
        return jax.shard_map(fn, mesh=mesh, check_vma=checked, **specs)

    found = fl.find(shard(lambda x, w, b: jax.lax.psum(x @ w, "d") + b), X, W, B)
    (row,) = found.structures
    assert row.kind == "row_parallel"
    assert row.sites == tuple(c.id for c in found.candidates)
    assert kinds(shard(lambda x, w, b: jax.lax.psum(jnp.tanh(x @ w), "d") + b), X, W, B) == {}
    for near in (
        lambda s, b: s * b,
        lambda s, b: s + 1.0,
        lambda s, b: s / 4 + b,
        lambda s, b: 2 * s - 3 * b,
        lambda s, b: b - s,
        lambda s, b: s + b[:6, None],
        lambda s, b: s + jnp.broadcast_to(b, (6, 16)) * s,
    ):
        assert kinds(shard(lambda x, w, b, near=near: near(jax.lax.psum(x @ w, "d"), b)), X, W, B) == {}
    scores = kinds(shard(lambda x, w, b: jax.lax.psum(jnp.einsum("mk,mk->m", x, x), "d") + 1e-6), X, W, B)
    assert scores == {}


# -- what no pass fuses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "softmax",
    [
        jax.nn.softmax,
        lambda x: jax.nn.softmax(3 * x, axis=0),
        lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True),
        lambda x: jnp.exp(jax.nn.log_softmax(x)),
        lambda x: jnp.exp(x - jax.nn.logsumexp(x, axis=-1, keepdims=True)),
    ],
)
def test_a_softmax_by_itself(softmax):
    assert kinds(softmax, X) == {"softmax": 1}
    assert kinds(lambda x: softmax(x @ W), X) == {"softmax": 1}


@pytest.mark.parametrize(
    "near",
    [
        jax.nn.log_softmax,
        jax.nn.sigmoid,
        lambda x: jnp.exp(x) / jnp.exp(2 * x).sum(-1, keepdims=True),
        lambda x: jnp.exp(x) / jnp.exp(x).sum(0, keepdims=True).sum(-1, keepdims=True) ** 2,
        lambda x: jnp.exp(x) / (1 + jnp.exp(x).sum(-1, keepdims=True)),
        lambda x: (
            jnp.exp(2 * x - x.max(-1, keepdims=True)) / jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)
        ),
    ],
)
def test_what_is_no_softmax(near):
    assert kinds(near, X) == {}


def test_the_softmax_of_an_attention_is_its_own_fused_or_not():
    q = normal((2, 5, 4))[0]
    assert kinds(lambda q: attention(q, q, q), q) == {}

    def weights_too(q):
        p = jax.nn.softmax(q @ q.swapaxes(-1, -2))
        return p, p @ q

    found = fl.find(weights_too, q)
    assert [r.code for r in found.rejections] == ["escapes"]
    assert not found.structures


@pytest.mark.parametrize("w", [0.25, "scalar", "vector", "full"])
@pytest.mark.parametrize("blend", [f.text for f in LERP if "number" not in f.text])
def test_a_blend_in_every_spelling(blend, w):
    fn = eval(f"lambda x, y, w: {blend}")
    y = X[:1] + 1
    if w == 0.25:
        assert kinds(lambda x, y: fn(x, y, w), X, X + 1) == {"lerp": 1}
        return
    weight = {"scalar": jnp.asarray(0.3), "vector": jnp.linspace(0, 1, 8), "full": X * 0.1}[w]
    assert kinds(fn, X, X + 1, weight) == {"lerp": 1}
    assert kinds(lambda x, y, w: fn(y, x, w), X, y, weight) == {"lerp": 1}  # one of them broadcast


@pytest.mark.parametrize(
    "near",
    [
        lambda x, y, w: x * w + y * w,
        lambda x, y, w: x * (2 - w) + y * w,
        lambda x, y, w: x + w * (y + x),
        lambda x, y, w: x * (1 - w) - y * w,
        lambda x, y, w: 0.9 * x + 0.2 * y,
        lambda x, y, w: x + y,
        lambda x, y, w: 1.5 * x - 0.5 * y,
    ],
)
def test_what_is_no_blend(near):
    assert kinds(near, X, X + 1, jnp.asarray(0.3)) == {}


def test_a_blend_that_is_fused_is_a_site_and_no_structure():
    found = fl.find(lambda x, y, w: (x + 0.5 * (y - x), x * (1 - w) + y * w), X, X + 1, 0.3 * X)
    assert [c.pass_name for c in found.candidates] == ["lerp"]
    assert [s.kind for s in found.structures] == ["lerp"]  # the other, which rounds differently
    assert [r.code for r in found.rejections] == ["rounding"]
    assert found.concepts()["lerp"] == 2


def test_numbers_that_bfloat16_rounds():
    x, y = normal((6, 8), (6, 8), dtype=jnp.bfloat16)
    assert kinds(lambda x, y: 0.999 * x + 0.001 * y, x, y) == {"lerp": 1}  # what Adam does: 0.999 is 1 there
    assert kinds(lambda x, y: 0.9 * x + 0.1 * y, x, y) == {"lerp": 1}
    assert kinds(lambda x, y: x + 0.001 * y, x, y) == {}
    assert kinds(lambda x, y: 0.9 * x + 0.12 * y, x, y) == {}


def test_a_blend_of_values_that_carry_factors_of_their_own():
    def moments(m, x):
        g = jax.grad(lambda x: jnp.mean(x**2))(x)
        return 0.9 * m + 0.1 * g, 0.999 * m + 0.001 * (g * g), m + 0.1 * (g - m)

    assert kinds(moments, X, X + 1) == {"lerp": 3}


# -- reports ----------------------------------------------------------------------------------------------------------


def test_a_structure_is_told_in_text_data_and_html(tmp_path):
    found = fl.find(lambda x: jax.nn.softmax(jax.nn.silu(x @ W) * (x @ V + B)), X)
    pair, softmax = found.structures
    assert (pair.id, softmax.id) == ("glu_pair@#1", "softmax@#1")
    assert pair.source is not None
    assert pair.source.file.endswith("test_structures.py")
    data = found.to_dict()["structures"]
    assert json.loads(json.dumps(data)) == data == [pair.to_dict(), softmax.to_dict()]
    assert data[0]["sites"] == [c.id for c in found.candidates]
    report, page = found.report(), found.to_html(tmp_path / "found.html")
    for s in (pair, softmax):
        assert s.id in report
        assert s.id in page
        assert s.text in report
    assert found[pair.id] is pair
    assert pair.id in found.explain(pair.id)
    assert pair.id in found.explain(next(iter(pair.node_ids)))


def test_a_program_without_structures_says_nothing_of_them():
    found = fl.find(lambda x: x @ W + B, X)
    assert found.structures == ()
    assert "structures:" not in found.report()


def test_every_form_compiles_to_a_pattern_of_its_own():
    patterns = [pattern_of(f.example) for f in (*FOLDED, *SOFTMAX, *LERP)]
    assert len({p.example.name for p in patterns}) == len(patterns)
    assert {f.kind for f in (*FOLDED, *SOFTMAX, *LERP)} | {
        "packed_gate",
        "qkv_siblings",
        "row_parallel",
        "repeated_layers",
        "gated_attention",
        "triangle_multiplication",
    } == STRUCTURE_KINDS.keys()


def test_what_is_in_a_site_that_is_fused_with_its_backward_pass_is_no_structure_of_its_own():
    q, k, v = normal((2, 8, 2, 4), (2, 8, 2, 4), (2, 8, 2, 4))

    def loss(q, k, v, w):
        out = jax.nn.dot_product_attention(q, k, v)
        return jnp.sum(out + w * (v - out))

    found = fl.find(jax.value_and_grad(loss, argnums=(0, 1, 2)), q, k, v, jnp.float32(0.3))
    assert {c.pass_name for c in found.candidates} == {"dot_product_attention", "lerp"}
    assert all(c.backward for c in found.candidates)
    assert found.structures == ()
