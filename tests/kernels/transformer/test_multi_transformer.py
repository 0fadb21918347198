"""multi_transformer as an op: transformations, gradients, devices, donation, export, arguments. Its numbers: tests/acceptance."""

from __future__ import annotations

import doctest
import functools
from dataclasses import replace

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab.kernels.ops.multi_transformer.public as public
import fusionlab.kernels.ops.multi_transformer.weights as weights
from fusionlab.errors import ArgumentError, BackendError, UnknownNameError
from fusionlab.evidence.tuning import calls_in
from fusionlab.graph.program.trace import trace
from fusionlab.kernels import OPS, meaning_of, plain_meaning_of
from fusionlab.kernels.op.composite import CompositePrimitive
from fusionlab.ops import TransformerLayer, multi_transformer, pack_qkv, rotary_tables, unpack_qkv

from ..transformations import TRANSFORMATIONS, assert_same, primitives
from .multi_transformer_devices import TRIALS

OP = OPS["multi_transformer"]
B, S, E, H, G, D, F = 2, 5, 12, 4, 2, 3, 16
SLOTS = {
    "norm1_scale": (E,),
    "norm1_bias": (E,),
    "q": (E, H, D),
    "k": (E, G, D),
    "v": (E, G, D),
    "q_bias": (H, D),
    "k_bias": (G, D),
    "v_bias": (G, D),
    "out": (H, D, E),
    "out_bias": (E,),
    "norm2_scale": (E,),
    "norm2_bias": (E,),
    "up": (E, F),
    "up_bias": (F,),
    "down": (F, E),
    "down_bias": (E,),
}
PROJECTIONS = {
    "separate": {},
    "concatenated": {"qkv": (E, (H + 2 * G) * D), "qkv_bias": ((H + 2 * G) * D,)},
    "interleaved": {"qkv": (E, H, 3, D), "qkv_bias": (H, 3, D)},
    "packed": {"qkv": (3, H, D, E), "qkv_bias": (3, H, D)},
}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def draw(*shape, seed=0, dtype="float32"):
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(0.4 * rng.standard_normal(shape), dtype)


def one_layer(i=0, dtype="float32", layout="separate", gated=False, cut=()):
    shapes = {s: n for s, n in SLOTS.items() if layout == "separate" or s[0] not in "qkv"} | PROJECTIONS[layout]
    shapes |= {"gate": (E, F)} if gated else {}
    return {s: draw(*n, seed=100 * i + j, dtype=dtype) for j, (s, n) in enumerate(shapes.items()) if s not in cut}


def operands(count=1, dtype="float32", **how):
    """x and `count` layers, by operand name."""
    rows = {f"{s}.{i}": a for i in range(count) for s, a in one_layer(i, dtype, **how).items()}
    return {"x": draw(B, S, E, seed=7, dtype=dtype), **rows}


def cached(given, cache, room=8, layout="BSHD", dtype="float32"):
    """The same with caches of `room` tokens."""
    count = sum(name.startswith("out.") for name in given)
    groups = G if "k.0" in given or given["qkv.0"].ndim == 2 else H
    shape = (B, room, groups, D) if layout == "BSHD" else (B, groups, room, D)
    held = {f"cache_{s}.{i}": draw(*shape, seed=9 + i, dtype=dtype) for s in "kv" for i in range(count)}
    return given | held | ({"step": jnp.int32(2)} if cache == "write" else {})


def bound(names, reference=False, every=False, **attrs):
    """The op as a function of operands with these names: its y, or all of its results."""
    run = OP.reference if reference else OP.call

    def f(*arrays):
        results = run(*arrays, present=tuple(names), **attrs)
        return results if every else results[0]

    return f


CASES = {
    "encoder": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "post_norm": ({}, {"pre_norm": False, "activation": "relu"}),
    "rms_gated": ({"gated": True, "cut": ("up_bias",)}, {"norm": "rms", "activation": "silu", "gated": True}),
    "gated_with_biases": ({"gated": True}, {"activation": "gelu_erf", "gated": True}),
    "no_norms": ({"cut": [s for s in SLOTS if s.startswith("norm")]}, {"epsilons": (None, None)}),
    "bare": ({"cut": [s for s in SLOTS if "bias" in s or "scale" in s]}, {"scale": 0.3}),
    "concatenated": ({"layout": "concatenated"}, {"qkv": "concatenated", "is_causal": True}),
    "interleaved": ({"layout": "interleaved"}, {"qkv": "interleaved"}),
    "packed": ({"layout": "packed"}, {"qkv": "packed", "is_causal": True}),
    "append": ({}, {"cache": "append", "is_causal": True}),
    "write": ({}, {"cache": "write", "is_causal": True}),
    "prefill": ({}, {"cache": "prefill", "is_causal": True}),
    "write_heads_first": ({}, {"cache": "write", "is_causal": True, "cache_layout": "BHSD"}),
    "keys": ({}, {"gives_keys": True, "cache_layout": "BHSD"}),
}


def case(name, count=1, dtype="float32"):
    how, attrs = CASES[name]
    given = operands(count, dtype, **how)
    if attrs.get("cache"):
        given = cached(given, attrs["cache"], layout=attrs.get("cache_layout", "BSHD"), dtype=dtype)
    return given, attrs | {"layers": count}


# What it is.


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_node_and_computes_its_meaning(name):
    given, attrs = case(name, 2)
    names, arrays = tuple(given), tuple(given.values())
    f, plain = bound(names, every=True, **attrs), bound(names, True, every=True, **attrs)
    assert primitives(f, *arrays) == ["multi_transformer"]
    assert "multi_transformer" not in primitives(plain, *arrays)
    assert not {"gemm_epilogue", "dot_product_attention", "layer_norm"} & set(primitives(plain, *arrays))
    assert_same(f(*arrays), plain(*arrays), 2e-6)
    assert_same(jax.jit(f)(*arrays), plain(*arrays), 2e-6)
    by_name = bound(names, every=True, implementation="xla", **attrs)
    assert_same(by_name(*arrays), plain(*arrays), 2e-6)
    (eqn,) = jax.make_jaxpr(f)(*arrays).jaxpr.eqns
    for meaning in (meaning_of(eqn), jax.extend.core.jaxpr_as_fun(plain_meaning_of(eqn))):
        assert_same(tuple(meaning(*arrays)), plain(*arrays), 2e-6)
    results = 1 + 2 * 2 * (attrs.get("cache") is not None or attrs.get("gives_keys", False))
    assert len(f(*arrays)) == results


def test_two_layers_are_one_after_the_other():
    given, attrs = case("causal", 2)
    first = {n: a for n, a in given.items() if not n.endswith(".1")}
    second = {n.replace(".1", ".0"): a for n, a in given.items() if n.endswith(".1")}
    (x,) = OP.call(*first.values(), present=tuple(first), is_causal=True)
    (want,) = OP.call(x, *second.values(), present=("x", *second), is_causal=True)
    (got,) = OP.call(*given.values(), present=tuple(given), **attrs)
    assert_same(got, want, 2e-6)


def test_more_than_ten_layers_keep_their_own_weights():
    given, attrs = case("causal", 12)
    x = given["x"]
    for i in range(12):
        own = {n.rpartition(".")[0] + ".0": a for n, a in given.items() if n.endswith(f".{i}")}
        (x,) = OP.call(x, *own.values(), present=("x", *own), is_causal=True)
    assert_same(OP.call(*given.values(), present=tuple(given), **attrs)[0], x, 2e-5)


def test_an_operand_that_is_none_is_left_out():
    given, attrs = case("encoder")
    got = OP.call(*given.values(), None, present=(*given, "mask"), **attrs)
    assert_same(got, OP.call(*given.values(), present=tuple(given), **attrs), 0)


def test_a_finite_mask_value_is_what_hidden_scores_become():
    given, attrs = case("encoder")
    given["mask"] = jnp.zeros((B, 1, S, S), bool)
    f = bound(given, mask_value=-1e9, **attrs)
    blind = bound(given, **attrs)
    alike = bound({**given, "mask": 0}, **attrs)(*(given | {"mask": jnp.full((1, 1, 1, S), -1e9)}).values())
    assert_same(f(*given.values()), alike, 1e-6)
    assert np.isfinite(blind(*given.values())).all()
    assert float(jnp.abs(f(*given.values()) - blind(*given.values())).max()) > 1e-3


# Transformations. What is compared is the reference, in float64.

NAMES = ("x", "q.0", "out.0", "norm2_scale.0", "down.0")
SECOND_ORDER = ("hessian", "reverse_over_reverse", "jacfwd", "jacrev")
SUITE = [n for n in TRANSFORMATIONS if n not in SECOND_ORDER]


def partly(name, moving, reference=False):
    """The op as a function of some operands."""
    given, attrs = case(name, dtype="float64")
    f = bound(given, reference, **attrs)

    def of_moving(*arrays):
        full = given | dict(zip(moving, arrays, strict=True))
        return f(*full.values())

    return of_moving, tuple(given[n] for n in moving)


@pytest.mark.dear
@pytest.mark.parametrize("which", SUITE)
def test_transformations_of_a_causal_layer(x64, which):
    f, args = partly("causal", NAMES)
    plain, _ = partly("causal", NAMES, reference=True)
    run = TRANSFORMATIONS[which]
    assert_same(run(f, args), run(plain, args), 1e-9, which)


@pytest.mark.parametrize("which", SECOND_ORDER)
def test_second_derivatives(x64, which):
    f, args = partly("rms_gated", ("norm1_scale.0", "down_bias.0"))
    plain, _ = partly("rms_gated", ("norm1_scale.0", "down_bias.0"), reference=True)
    run = TRANSFORMATIONS[which]
    assert_same(run(f, args), run(plain, args), 1e-8, which)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_operand_and_result(x64, name):
    given, attrs = case(name, 2, dtype="float64")
    moving = {n: a for n, a in given.items() if n != "step"}

    def loss(reference, moved):
        results = bound(given, reference, every=True, **attrs)(*(given | moved).values())
        return sum(jnp.sum(jnp.sin(a * (i + 1))) for i, a in enumerate(results))

    got = jax.jit(jax.grad(functools.partial(loss, False)))(moving)
    want = jax.grad(functools.partial(loss, True))(moving)
    for n, g in got.items():
        assert_same(g, want[n], 1e-9, n)
    zero = {n for n, g in want.items() if not np.asarray(g).any()}
    assert not {n for n in zero if not n.startswith("cache")}
    assert_same(jax.grad(functools.partial(loss, False))(moving), want, 1e-9)


def test_differentiated_it_is_its_pieces_which_have_backward_passes_of_their_own():
    given, attrs = case("causal", 2)
    f = bound(given, **attrs)
    found = primitives(jax.grad(lambda *a: f(*a).sum(), 1), *given.values())
    assert "multi_transformer" not in found
    assert found.count("gemm_epilogue") == 2 * 6
    for op in ("gemm_epilogue", "dot_product_attention", "layer_norm"):
        assert f"{op}_cotangent" in found
    forward = primitives(lambda *a: jax.jvp(lambda x: f(x, *a[1:]), a[:1], a[:1])[0], *given.values())
    assert "multi_transformer" not in forward


def test_the_gradient_of_the_reference_leaves_the_op_as_it_is():
    given, attrs = case("causal")
    f = bound(given, gradient="reference", **attrs)
    arrays = tuple(given.values())
    found = primitives(jax.grad(lambda *a: f(*a).sum()), *arrays)
    assert "multi_transformer" in found
    assert not any(n.endswith("_cotangent") for n in found)
    plain = bound(given, True, **attrs)
    assert_same(jax.grad(lambda *a: f(*a).sum())(*arrays), jax.grad(lambda *a: plain(*a).sum())(*arrays), 1e-5)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_remat_of_each_layer(x64, policy):
    given, attrs = case("causal", dtype="float64")
    f, plain = bound(given, **attrs), bound(given, True, **attrs)

    def run(g):
        layer = jax.checkpoint(lambda x: g(x, *list(given.values())[1:]), policy=policy)
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(layer(layer(x))))))(given["x"])

    assert_same(run(f), run(plain), 1e-9)


def test_a_scan_over_stacked_layers_with_their_caches():
    given, attrs = case("write", 3)
    per_layer = [{n.rpartition(".")[0]: a for n, a in given.items() if n.endswith(f".{i}")} for i in range(3)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *per_layer)

    def body(x, w):
        named = {"x": x, "step": given["step"], **{f"{slot}.0": a for slot, a in w.items()}}
        y, k, v = OP.call(*named.values(), present=tuple(named), **attrs | {"layers": 1})
        return y, (k, v)

    y, (k, v) = jax.jit(lambda x: jax.lax.scan(body, x, stacked))(given["x"])
    want = OP.call(*given.values(), present=tuple(given), **attrs)
    assert_same((y, *(a[i] for i in range(3) for a in (k, v))), want, 2e-6)


# Batches.

SHARED = {
    "mask": {"mask": (B, H, S, 8)},
    "one_mask": {"mask": (1, 1, 1, 8)},
    "rotary": {"cos": (S, 2), "sin": (S, 2)},
    "rotary_of_rows": {"cos": (B, S, 2), "sin": (B, S, 2)},
    "lengths": {"lengths": (B,)},
    "steps": {"step": (B,)},
}


@pytest.mark.parametrize("shared", [None, *SHARED])
@pytest.mark.parametrize(
    "batched", [pytest.param(("x",), marks=pytest.mark.whole), ("x", "cache_k.0", "cache_v.0"), ("cache_v.0",), "all"]
)
def test_a_batch_is_more_rows(shared, batched):
    given, attrs = case("write")
    for name, shape in SHARED.get(shared, {}).items():
        rng = np.random.default_rng(3)
        drawn = rng.integers(1, 4, shape) if name in ("lengths", "step") else rng.standard_normal(shape)
        given[name] = jnp.asarray(drawn, jnp.int32 if name in ("lengths", "step") else jnp.float32)
    attrs |= {"rotary": 1} if "cos" in given else {}
    if batched == "all":
        batched = ("x", "step", "cache_k.0", "cache_v.0", *SHARED.get(shared, {}))
    batched = tuple(dict.fromkeys(batched))
    f = bound(given, every=True, **attrs)
    axes = tuple(given[n].ndim if n in batched else None for n in given)  # the last of each
    stacked = {
        n: jnp.stack([a + i if n in ("step", "lengths") else a * (1 - 0.3 * i) for i in range(3)], -1)
        if n in batched
        else a
        for n, a in given.items()
    }
    got = jax.vmap(f, axes)(*stacked.values())
    assert primitives(jax.vmap(f, axes), *stacked.values()).count("multi_transformer") == 1
    each = [f(*({n: a[..., i] if n in batched else a for n, a in stacked.items()}).values()) for i in range(3)]
    assert_same(got, jax.tree.map(lambda *a: jnp.stack(a), *each), 2e-6)


def test_a_batch_of_weights_is_computed_by_the_pieces():
    given, attrs = case("causal")
    f = bound(given, **attrs)
    axes = tuple(0 if n == "up.0" else None for n in given)
    arrays = [jnp.stack([a, -a]) if n == "up.0" else a for n, a in given.items()]
    found = primitives(jax.vmap(f, axes), *arrays)
    assert "multi_transformer" not in found
    assert "gemm_epilogue" in found
    each = [f(*((a[i] if n == "up.0" else a) for n, a in zip(given, arrays, strict=True))) for i in range(2)]
    assert_same(jax.vmap(f, axes)(*arrays), jnp.stack(each), 2e-6)


# Dtypes.


@pytest.mark.parametrize("parameters", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["causal", "write", "rms_gated"])
def test_16_bits(name, parameters):
    given, attrs = case(name, 2)
    rough = {n: a.astype("bfloat16") for n, a in given.items() if n != "step"}
    wide = {n: a.astype("float32") for n, a in rough.items()}
    narrow = {n: a if n == "x" or n.startswith("cache") else a.astype(parameters) for n, a in rough.items()}
    step = {"step": given["step"]} if "step" in given else {}
    got = OP.call(*(narrow | step).values(), present=(*narrow, *step), **attrs)
    want = OP.reference(*(wide | step).values(), present=(*wide, *step), **attrs)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == jnp.bfloat16
        assert float(jnp.abs(g.astype("float32") - w).max()) < 4e-2 * float(jnp.abs(w).max())


def test_a_cache_of_another_dtype_is_kept_in_its_own():
    given, attrs = case("write")
    rough = given | {n: a.astype("bfloat16") for n, a in given.items() if n.startswith("cache")}
    y, k, v = OP.call(*rough.values(), present=tuple(rough), **attrs)
    assert (y.dtype, k.dtype, v.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    want = OP.call(*given.values(), present=tuple(given), **attrs)
    assert float(jnp.abs(y - want[0]).max()) < 2e-2
    assert (k[:, 7:] == rough["cache_k.0"][:, 7:]).all()


def test_the_precision_in_force_at_the_call_is_kept():
    given, attrs = case("causal")
    f = bound(given, **attrs)
    with jax.default_matmul_precision("highest"):
        closed = jax.make_jaxpr(f)(*given.values())
    lowered = jax.jit(jax.extend.core.jaxpr_as_fun(closed)).lower(*given.values()).as_text()
    assert lowered.count("dot_general") == lowered.count("precision = [HIGHEST, HIGHEST]") > 0


# Under jit: donation, export, devices.


def entry_copies(text, shape):
    """The copies, and what else makes a new array, of a shape in a compiled program."""
    dims = ",".join(map(str, shape))
    made = [line for line in text.splitlines() if f"f32[{dims}]" in line.split(" = ")[-1].split("(")[0]]
    return [line for line in made if " copy(" in line or " concatenate(" in line or " pad(" in line]


@pytest.mark.parametrize("at", ["one", "rows", "start"])
@pytest.mark.parametrize("cache_layout", ["BSHD", "BHSD"])
def test_donated_caches_are_updated_where_they_are(cache_layout, at):
    layer, room, batch = TransformerLayer(**one_layer()), 96, 3
    shape = (batch, room, G, D) if cache_layout == "BSHD" else (batch, G, room, D)
    caches = tuple((draw(*shape, seed=i), draw(*shape, seed=i + 5)) for i in range(2))

    def run(x, caches, step):
        given = {} if at == "start" else {"step": step}
        return multi_transformer(x, [layer, layer], cache=caches, cache_layout=cache_layout, **given)

    step = jnp.asarray([7, 9, 11], jnp.int32) if at == "rows" else jnp.int32(7)
    x = draw(batch, 1, E)
    want = run(x, caches, step)
    compiled = jax.jit(run, donate_argnums=1).lower(x, caches, step).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 4 * batch * room * G * D * 4
    assert not entry_copies(compiled.as_text(), shape)
    pointers = {c.unsafe_buffer_pointer() for pair in caches for c in pair}
    y, made = compiled(x, caches, step)
    assert {c.unsafe_buffer_pointer() for pair in made for c in pair} == pointers
    assert_same((y, made), want, 2e-6)


def test_caches_that_are_not_donated_stay():
    given, attrs = case("write")
    before = np.array(given["cache_k.0"])
    _, k, _ = jax.jit(bound(given, every=True, **attrs))(*given.values())
    np.testing.assert_array_equal(given["cache_k.0"], before)
    assert (np.array(k) != before).any()


def test_generating_in_a_while_loop():
    layer, caches = TransformerLayer(**one_layer()), [(jnp.zeros((B, 8, G, D)),) * 2]
    x, cache = multi_transformer(draw(B, 3, E), layer, cache=caches)

    def body(carry):
        step, x, cache = carry
        x, cache = multi_transformer(x, layer, cache=cache, step=step)
        return step + 1, x, cache

    _, looped, kept = jax.jit(lambda x, cache: jax.lax.while_loop(lambda c: c[0] < 8, body, (jnp.int32(3), x, cache)))(
        x[:, -1:], cache
    )
    x = x[:, -1:]
    for step in range(3, 8):
        x, cache = multi_transformer(x, layer, cache=cache, step=step)
    assert_same((looped, kept), (x, cache), 1e-5)


@pytest.mark.parametrize("platforms", [("cpu",), ("cuda",), ("cpu", "cuda")])
def test_it_is_exported(platforms):
    given, attrs = case("write", 2)
    f = jax.jit(bound(given, every=True, **attrs))
    exported = jax.export.export(f, platforms=platforms)(*given.values())
    assert "dynamic_update_slice" in exported.mlir_module()
    if "cpu" in platforms:
        assert_same(tuple(exported.call(*given.values())), f(*given.values()), 1e-6)


def test_it_is_exported_for_any_batch():
    given, attrs = case("causal")
    (b,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((b, *a.shape[1:]) if n == "x" else a.shape, a.dtype) for n, a in given.items()]
    f = jax.jit(bound(given, **attrs))
    exported = jax.export.export(f)(*shapes)
    more = [jnp.concatenate([a, a, -a]) if n == "x" else a for n, a in given.items()]
    assert_same(exported.call(*more), f(*more), 1e-6)


@pytest.mark.devices
@pytest.mark.parametrize("name", TRIALS)
def test_on_four_devices(on_devices, name):
    """One of them by hand: `python -m pytest "tests/kernels/transformer/test_multi_transformer.py::test_on_four_devices[explicit]"`."""
    on_devices("kernels.transformer.multi_transformer_devices", name)


# What is told of it.


def test_implementations_and_their_names():
    given, attrs = case("write")
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given.values()]
    told = {v.name: v.verdict for v in OP.backends(*shapes, present=tuple(given), **attrs)}
    assert told == {"xla": "possible", "composed": "chosen", "cuda": "unavailable"}
    named = OP.backends(*shapes, present=tuple(given), implementation="xla", **attrs)
    assert {v.name: v.verdict for v in named} == {"xla": "same code", "composed": "possible", "cuda": "unavailable"}
    assert OP.choose(*shapes, present=tuple(given), **attrs) == "composed"
    assert OP.choose(*shapes, present=tuple(given), implementation="xla", **attrs) == "xla"
    assert OP.residuals(*shapes, present=tuple(given), **attrs) == ()
    left = OP.left_to_xla(*shapes, present=tuple(given), **attrs)
    assert (left.kind, OP.declines) == ("in pieces", False)
    assert "name the pass" in left.reason
    with pytest.raises(BackendError, match=r"implementation 'cuda' cannot run this call on .*: it needs a CUDA device"):
        OP.call(*given.values(), present=tuple(given), implementation="cuda", **attrs)
    with pytest.raises(
        UnknownNameError, match="unknown multi_transformer implementation 'gpu'; valid: composed, cuda, xla"
    ):
        OP.call(*given.values(), present=tuple(given), implementation="gpu", **attrs)


@pytest.mark.parametrize(
    ("attrs", "text"),
    [
        ({}, "layer: a = x + attend(layer_norm(x)), y = a + mlp(layer_norm(a)), mlp gelu_tanh"),
        (
            {"layers": 2, "pre_norm": False, "norm": "rms", "gated": True, "is_causal": True},
            "2 layers: a = rms_norm(x + attend(x)), y = rms_norm(a + mlp(a)), mlp gelu_tanh gated, causal",
        ),
        (
            {"epsilons": (None, 1e-5), "cache": "write"},
            "layer: a = x + attend(x), y = a + mlp(layer_norm(a)), mlp gelu_tanh, cache write",
        ),
    ],
)
def test_its_formula(attrs, text):
    assert OP.formula(**attrs) == text


def test_its_operations_are_those_of_its_pieces():
    def counted(name):
        given, attrs = case(name, 2)
        node = trace(bound(given, **attrs), *given.values()).top.nodes[0]
        assert isinstance(node.eqn.primitive, CompositePrimitive)
        return node.eqn.primitive.arithmetic(node.params, [v.aval for v in node.inputs])

    (flops, transcendentals), (causal, _) = counted("encoder"), counted("causal")
    rows = B * S
    products = 2 * rows * (E * (H + 2 * G) * D + H * D * E + 2 * E * F)
    scores = 2 * 2 * B * H * D * S * S
    assert 2 * (products + scores) < flops < 2 * (products + scores) * 1.5
    assert transcendentals > 2 * rows * F
    hidden = scores * (S - 1) // (2 * S)  # an attention of ours steps over them
    assert flops - causal >= 2 * hidden


def test_what_is_tuned_is_the_layer_and_its_pieces():
    given, attrs = case("rms_gated", 2)
    found = {c.primitive.name for c in calls_in(jax.make_jaxpr(bound(given, **attrs))(*given.values()).jaxpr)}
    assert found == {"multi_transformer", "gemm_epilogue", "dot_product_attention", "gated_matmul", "layer_norm"}


@pytest.mark.parametrize("module", [public, weights])
def test_docstring_examples_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# Arguments.

BAD = {
    "x has shape (2, 5), rank 2": {"x": (2, 5)},
    "x has shape (2, 0, 12)": {"x": (2, 0, 12)},
    "out.0 has shape (11, 12), rank 2; needed [H, D, E], or [H D, E]": {"out.0": (11, 12)},
    "out.0 has shape (4, 3, 11), needed (4, 3, 12), [H, D, E]": {"out.0": (4, 3, 11)},
    "q.0 has shape (12, 3, 4), needed (12, 4, 3), [E, H, D]": {"q.0": (12, 3, 4)},
    "k.0 has shape (12, 6); needed [E, G, D]": {"k.0": (12, 6)},
    "3 key heads and 4 heads": {"k.0": (12, 3, 3)},
    "v.0 has shape (12, 1, 3), needed (12, 2, 3), [E, G, D]": {"v.0": (12, 1, 3)},
    "k_bias.0 has shape (4, 3), needed (2, 3), [G, D]": {"k_bias.0": (4, 3)},
    "norm1_scale.0 has shape (5,), needed (12,)": {"norm1_scale.0": (5,)},
    "norm2_bias.0 has shape (5,), needed (12,)": {"norm2_bias.0": (5,)},
    "up.0 has shape (16, 12), needed (12, 12), [E, F]": {"up.0": (16, 12), "up_bias.0": (12,)},
    "up_bias.0 has shape (12,), needed (16,)": {"up_bias.0": (12,)},
    "down.0 has shape (12, 16), needed (16, 12), [F, E]": {"down.0": (12, 16)},
    "mask has shape (2, 3, 5, 5), needed [1 or 2, 1 or 4, 1 or 5, 5]": {"mask": (2, 3, 5, 5)},
    "lengths has shape (3,), needed (2,)": {"lengths": (3,)},
}


@pytest.mark.parametrize("message", BAD)
def test_shapes_are_refused_by_name(message):
    given, attrs = case("encoder")
    dtypes = {"lengths": "int32"}
    given |= {n: jnp.ones(s, dtypes.get(n, "float32")) for n, s in BAD[message].items()}
    with pytest.raises(ArgumentError) as error:
        OP.call(*given.values(), present=tuple(given), **attrs)
    assert message in str(error.value)


BAD_CACHES = {
    "cache_k.0 has shape (2, 8, 6), rank 3; needed rank 4, BSHD": {"cache_k.0": (2, 8, 6)},
    "cache_k.0 has shape (2, 8, 4, 3), needed (2, 8, 2, 3), BSHD with the tokens along S": {"cache_k.0": (2, 8, 4, 3)},
    "cache_v.0 has shape (2, 9, 2, 3), needed (2, 8, 2, 3)": {"cache_v.0": (2, 9, 2, 3)},
    "x has 5 tokens, and the caches hold 4": {"cache_k.0": (2, 4, 2, 3), "cache_v.0": (2, 4, 2, 3)},
    "step has shape (3,), needed a scalar, or (2,)": {"step": (3,)},
    "mask has shape (2, 1, 5, 5), needed [1 or 2, 1 or 4, 1 or 5, 8]": {"mask": (2, 1, 5, 5)},
}


@pytest.mark.parametrize("message", BAD_CACHES)
def test_caches_are_refused_by_name(message):
    given, attrs = case("write")
    given |= {n: jnp.ones(s, "int32" if n == "step" else "float32") for n, s in BAD_CACHES[message].items()}
    with pytest.raises(ArgumentError) as error:
        OP.call(*given.values(), present=tuple(given), **attrs)
    assert message in str(error.value)


BAD_ATTRIBUTES = [
    ({"activation": "gelu"}, UnknownNameError, "Did you mean 'gelu_erf'|valid: .*gelu_tanh"),
    ({"norm": "batch"}, UnknownNameError, "unknown multi_transformer norm 'batch'"),
    ({"qkv": "fused"}, UnknownNameError, "unknown multi_transformer qkv 'fused'"),
    ({"cache": "ring"}, UnknownNameError, "unknown multi_transformer cache 'ring'"),
    ({"cache_layout": "SBHD"}, UnknownNameError, "unknown multi_transformer cache_layout"),
    ({"dropout": 0.1}, UnknownNameError, "unknown multi_transformer attribute 'dropout'"),
    ({"gradient": "mine"}, UnknownNameError, "gradient"),
    ({"layers": 0}, ArgumentError, "layers is 0, needed a whole number from 1 on"),
    ({"layers": 2}, ArgumentError, r"q\.1 is missing, needed an array for qkv='separate'"),
    ({"heads": 3}, ArgumentError, r"heads is 3, and out\.0 \(4, 3, 12\) has 4 heads"),
    ({"kv_heads": 4}, ArgumentError, "kv_heads is 4, and the weights have 2 key heads"),
    ({"epsilons": 1e-5}, ArgumentError, "epsilons is 1e-05, needed a pair"),
    ({"epsilons": (1e-5, -1.0)}, ArgumentError, r"epsilon is -1\.0, needed a finite number, 0 or more"),
    ({"epsilons": (None, 1e-5)}, ArgumentError, r"norm1_scale\.0 is given, and epsilons\[0\] is None"),
    ({"scale": float("nan")}, ArgumentError, "scale is nan"),
    ({"mask_value": float("inf")}, ArgumentError, "mask_value is inf"),
    ({"pre_norm": 1}, ArgumentError, "pre_norm is 1, needed True or False"),
    ({"rotary": 3}, ArgumentError, "rotary is 3, needed None, 1 or 2"),
    ({"rotary": 1}, ArgumentError, "cos is missing, needed an array for rotary"),
    ({"gated": True}, ArgumentError, r"gate\.0 is missing, needed an array for gated=True"),
    ({"cache": "append"}, ArgumentError, r"cache_k\.0 is missing, needed an array for cache='append'"),
    ({"qkv": "packed"}, ArgumentError, r"qkv\.0 is missing, needed an array for qkv='packed'"),
]


@pytest.mark.parametrize(("attrs", "kind", "message"), BAD_ATTRIBUTES)
def test_attributes_are_refused_by_name(attrs, kind, message):
    given, _ = case("encoder")
    with pytest.raises(kind, match=message):
        OP.call(*given.values(), present=tuple(given), **attrs)


def test_a_traced_scale_is_refused():
    given, _ = case("encoder")
    with pytest.raises(ArgumentError, match=r"scale is .* known when tracing"):
        jax.jit(lambda s: OP.call(*given.values(), present=tuple(given), scale=s))(1.0)


def test_operands_that_nothing_reads_are_refused():
    given, _ = case("encoder")
    for name, shape, why in (
        ("step", (), "only cache='write' has a step"),
        ("gate.0", (E, F), "gated is False"),
        ("qkv.0", (E, 1), "qkv is 'separate'"),
        ("cache_k.0", (B, 8, G, D), "cache is None"),
        ("cos", (S, 2), "rotary is None"),
    ):
        more = given | {name: jnp.zeros(shape, "int32" if name == "step" else "float32")}
        with pytest.raises(ArgumentError, match=f"{name} is given, and .*{why}; leave it out"):
            OP.call(*more.values(), present=tuple(more))
    with pytest.raises(UnknownNameError, match=r"unknown multi_transformer operand 'up\.1'"):
        OP.call(*given.values(), given["up.0"], present=(*given, "up.1"))
    with pytest.raises(ArgumentError, match="a name for each operand"):
        OP.call(*given.values(), present=("x",))
    with pytest.raises(ArgumentError, match="x is given twice"):
        OP.call(given["x"], given["x"], present=("x", "x"))


def test_dtypes_are_refused_by_name():
    given, _ = case("encoder")
    for name, dtype, message in (
        ("x", "int32", "x has dtype int32, needed one of float32"),
        ("up.0", "int8", r"up\.0 has dtype int8, needed one of"),
        ("mask", "int32", "mask has dtype int32, needed bool or one of"),
        ("lengths", "float32", "lengths has dtype float32, needed an integer dtype"),
    ):
        shape = {"mask": (1, 1, S, S), "lengths": (B,)}.get(name)
        more = given | {name: given[name].astype(dtype) if shape is None else jnp.ones(shape, dtype)}
        with pytest.raises(ArgumentError, match=message):
            OP.call(*more.values(), present=tuple(more))


def test_a_mask_wider_than_the_scores_is_refused(x64):
    given, _ = case("encoder")
    with pytest.raises(ArgumentError, match="mask has dtype float64, wider than the scores of float32 tokens"):
        OP.call(*given.values(), jnp.zeros((1, 1, S, S), "float64"), present=(*given, "mask"))


def test_a_finite_mask_value_hides_less_than_lengths_do():
    given, _ = case("encoder")
    with pytest.raises(ArgumentError, match=r"mask_value is -1e[+]09, which hides less"):
        OP.call(*given.values(), jnp.ones(B, "int32"), present=(*given, "lengths"), mask_value=-1e9)
    given, attrs = case("write")
    with pytest.raises(ArgumentError, match=r"mask_value is -1e[+]09, which hides less"):
        OP.call(*given.values(), present=tuple(given), mask_value=-1e9, **attrs)


LAYER = TransformerLayer(**one_layer())
PAIR = (jnp.zeros((B, 8, G, D)),) * 2


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ([], {}, "layers has to be a TransformerLayer"),
        ([LAYER, {}], {}, "layers has to be a TransformerLayer"),
        (
            [LAYER, TransformerLayer(**one_layer(layout="packed"))],
            {},
            r"layers\[1\] differs from layers\[0\] in the form of q, k and v",
        ),
        (replace(LAYER, q=None), {}, "q and qkv are neither given"),
        (replace(LAYER, qkv=jnp.ones((E, 3 * E))), {}, "q and qkv are both given"),
        (replace(LAYER, q=None, qkv=jnp.ones((E, 3, H, D))), {}, r"qkv has shape \(12, 3, 4, 3\), needed"),
        (LAYER, {"cache": PAIR}, r"cache has 2 entries, needed a pair \(k, v\) for each of 1 layers"),
        (LAYER, {"cache": [PAIR[:1]]}, r"cache\[0\] is tuple, needed a pair of arrays"),
        (LAYER, {"cache": 3}, "cache has int"),
        (LAYER, {"step": 1}, "step is given, and there is no cache"),
        (LAYER, {"step": 1, "cache": [PAIR], "prefix": [PAIR]}, "step is given, and a prefix is given"),
        (LAYER, {"step": 1.0, "cache": [PAIR]}, "step has dtype float32, needed an integer dtype"),
        (LAYER, {"prefix": [PAIR], "cache": [PAIR]}, "prefix has 8 tokens and x 5, and the caches hold 8"),
        (LAYER, {"prefix": [tuple(a[:1] for a in PAIR)]}, r"prefix\[0\] has k of shape \(1, 8, 2, 3\)"),
        (LAYER, {"rotary": jnp.ones((5, 2))}, "rotary is .*, needed a pair of arrays"),
        (LAYER, {"rotary": (jnp.ones((S, 2)), jnp.ones((S, 4)))}, "alike for cos and sin"),
        (LAYER, {"rotary": (jnp.ones((S, 2)),) * 2, "rotary_dims": 2}, "with W a multiple of 4"),
        (LAYER, {"rotary": (jnp.ones((S, 4)),) * 2}, "up to the 3 of a head"),
    ],
)
def test_what_a_caller_gives_is_refused_by_name(layers, options, message):
    with pytest.raises(ArgumentError, match=message):
        multi_transformer(draw(B, S, E), layers, **options)


def test_repacking_refuses_by_name():
    a = jnp.ones((E, E))
    with pytest.raises(ArgumentError, match="heads is None, needed heads on an axis"):
        pack_qkv(a, a, a)
    with pytest.raises(ArgumentError, match=r"k has shape \(12, 10\), needed heads of 3"):
        pack_qkv(a, a[:, :10], a, heads=4)
    with pytest.raises(UnknownNameError, match="unknown multi_transformer qkv 'separate'"):
        pack_qkv(a, a, a, heads=4, layout="separate")
    with pytest.raises(ArgumentError, match="needed rank 4 with 3 at axis 0"):
        unpack_qkv(a)
    with pytest.raises(ArgumentError, match="heads is None, needed the number of query heads"):
        unpack_qkv(a, layout="concatenated")
    with pytest.raises(ArgumentError, match="needed 1 or 2 and a size that is a multiple"):
        rotary_tables(jnp.arange(3), jnp.arange(3), size=6)


def test_no_backend_is_named_that_a_piece_has():
    given, attrs = case("encoder")
    with pytest.raises(UnknownNameError):
        OP.choose(*given.values(), present=tuple(given), implementation="cudnn", **attrs)
