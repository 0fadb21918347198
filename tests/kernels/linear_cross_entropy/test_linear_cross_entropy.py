"""`linear_cross_entropy` against the losses as users write them: values and gradients, memory and operations, arguments, the choice."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from fusionlab.device import Device
from fusionlab.errors import ArgumentError, UnknownNameError
from fusionlab.kernels.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, chunked, halves, reference, rows
from fusionlab.kernels.ops.linear_cross_entropy.settings import Settings
from fusionlab.ops import linear_cross_entropy
from tests.kernels.transformations import assert_agree, assert_same

from .originals import operands, original

CHUNKED = {"implementation": "xla_chunked", "chunk": 5}
# Each option, together with others that it has to work with.
OPTIONS = {
    "plain": {},
    "clip, smoothing": {"out_of_range": "clip", "label_smoothing": 0.1},
    "promised, z-loss": {"out_of_range": "promise_in_bounds", "z_loss": 0.01},
    "zero, both": {"out_of_range": "zero", "label_smoothing": 0.1, "z_loss": 0.01},
    "drop, both, tied": {"out_of_range": "drop", "label_smoothing": 0.1, "z_loss": 0.01, "transposed": True},
    "drop, softcap": {"out_of_range": "drop", "softcap": 3.0},
    "scale, softcap, classes": {"scale": 0.3, "softcap": 3.0, "classes": 30, "fill": -50.0, "label_smoothing": 0.1},
    "scale, padded, tied": {
        "scale": -2.0,
        "classes": 30,
        "fill": -40.0,
        "transposed": True,
        "z_loss": 0.01,
        "out_of_range": "clip",
    },
    "softcap, tied, smoothing": {"softcap": 3.0, "transposed": True, "label_smoothing": 0.1},
}


@pytest.fixture(params=["each chunk's", "at once"])
def at_once(request, monkeypatch):
    """The gradients made of each chunk's cotangents, or of all of them at once, as on a GPU."""
    if request.param == "at once":
        monkeypatch.setattr(Settings, "on_a_gpu", True)
        jax.clear_caches()
    yield request.param == "at once"
    if request.param == "at once":
        jax.clear_caches()


def laid_out(w, options):
    return w.T if options.get("transposed") else w


def reduced(fn, labels, **options):
    """A scalar of all results that have a derivative, and the results."""

    def run(x, w, bias, weights):
        out = fn(x, w, labels, bias, weights, **options)
        results = out if isinstance(out, tuple) else (out,)
        # A row whose loss is NaN would hide all others.
        sums = (jnp.sum(jnp.sin(jnp.where(jnp.isnan(a), 0, a))) for a in results if a.dtype != jnp.int32)
        return sum(sums), results

    return run


@pytest.mark.dear
@pytest.mark.parametrize("implementation", [{"implementation": "xla"}, CHUNKED], ids=["xla", "chunked"])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_the_originals_in_float64(name, implementation, at_once):
    if at_once and implementation is not CHUNKED:
        return
    with jax.enable_x64(True):
        x, w, labels, bias, weights = operands((3, 7), 16, 37, "float64")
        options, w = OPTIONS[name], laid_out(w, OPTIONS[name])
        for b, (u, also) in itertools.product(
            (bias, None), ((weights, ()), (weights, ("lse", "argmax", "loss")), (None, ("argmax", "lse")))
        ):
            which = (0, 1) + ((2,) if b is not None else ()) + ((3,) if u is not None and not also else ())
            got, want = (
                jax.jit(jax.value_and_grad(reduced(f, labels, also=also, **o), which, has_aux=True))(x, w, b, u)
                for f, o in ((linear_cross_entropy, options | implementation), (original, options))
            )
            if 3 in which:  # the original's `where` has no gradient of a weight of 0
                got, want = jax.tree.map(lambda a: a[..., 1:] if a.shape == labels.shape else a, (got, want))
            assert_same(got, want, 1e-10, name)


@pytest.mark.dear
def test_a_weighted_sum_in_chunks_is_the_originals(at_once):
    x, w, labels, bias, weights = operands((13,), 8, 11)
    run = jax.jit(jax.value_and_grad(partial(linear_cross_entropy, **CHUNKED), (0, 1)))
    want = jax.jit(jax.value_and_grad(original, (0, 1)))
    assert_same(run(x, w, labels, bias, weights), want(x, w, labels, bias, weights), 2e-6)


@pytest.mark.dear
@pytest.mark.parametrize("rows", [(), (0,), (1,), (17,), (2, 0), (5, 5)])
def test_any_number_of_rows(rows, at_once):
    x, w, labels, bias, weights = operands(rows, 8, 11)
    for weighted, ignored in itertools.product((True, False), repeat=2):
        given = jnp.full_like(labels, -100) if ignored else labels, bias
        given = (*given, jnp.zeros_like(weights) if ignored else weights) if weighted else given
        options = {} if weighted else {"out_of_range": "zero"}

        def graded(f, *given, **options):
            return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(f(x, w, *given, **options)), (0, 1)))(x, w)

        got = graded(linear_cross_entropy, *given, **options, **CHUNKED)
        assert_same(got, graded(original, *given, **options), 2e-6)
        assert not (weighted and ignored and any(np.any(a) for a in jax.tree.leaves(got)))


@pytest.mark.dear
@pytest.mark.parametrize("is_scalar", [True, False])
def test_under_every_transformation(is_scalar, at_once):
    x, w, labels, bias, weights = operands((7,), 4, 6)
    u = weights if is_scalar else None
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "out_of_range": "zero"}
    fused, plain = (
        lambda x, w, b, f=f, o=o: f(x, w, labels, b, u, **options, **o)
        for f, o in ((linear_cross_entropy, CHUNKED), (original, {}))
    )
    names = (
        "eager",
        "no_jit",
        "grad",
        "jvp",
        "jvp_of_last",
        "linearize",
        "linear_transpose_of_vjp",
        "jacfwd",
        "hessian",
    )
    more = (
        "reverse_over_reverse",
        "grad_of_jvp",
        "vmap_first",
        "vmap_all",
        "vmap_second",
        "vmap_of_grad",
        "grad_of_vmap",
    )
    names += (*more, "scan", "checkpoint", "checkpoint_policy", "donated")
    assert_agree(fused, plain, (x, w, bias), names, 2e-5)


@pytest.mark.dear
def test_two_uses_of_one_loss_and_of_its_rows(at_once):
    x, w, labels, bias, weights = operands((9,), 8, 11)

    def twice(f, **options):
        def run(x, w, bias):
            total, lse, rows = f(x, w, labels, bias, weights, also=("lse", "loss"), out_of_range="zero", **options)
            return total**2 + jnp.sin(total) + jnp.sum(jnp.cos(rows) * lse), total

        return jax.jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True))(x, w, bias)

    assert_same(twice(linear_cross_entropy, **CHUNKED), twice(original), 2e-6)


@pytest.mark.dear
def test_the_argmax_is_the_first_of_equal_ones_and_of_nan(at_once):
    x, w, labels, _, weights = operands((9,), 8, 11)
    w = w.at[:, 7].set(w[:, 3])
    x = x.at[4, 0].set(jnp.nan)
    found = jax.jit(partial(linear_cross_entropy, also=("argmax",), **CHUNKED))(x, w, labels, None, weights)[1]
    np.testing.assert_array_equal(found, jnp.argmax(x @ w, -1))
    assert found[4] == 0


@pytest.mark.dear
def test_a_row_of_weight_zero_is_left_out_or_multiplied(at_once):
    x, w, labels, _, weights = operands((9,), 8, 11)
    labels = labels.at[1].set(0)
    both = [linear_cross_entropy(x, w, labels, weights=weights, masked=masked, **CHUNKED) for masked in (True, False)]
    assert [bool(jnp.isnan(a)) for a in both] == [False, True]


@pytest.mark.dear
@pytest.mark.parametrize(
    ("dtype", "logits_dtype", "on_a_gpu"),
    [
        ("float32", None, False),
        ("bfloat16", None, False),
        ("bfloat16", None, True),
        ("bfloat16", "bfloat16", False),
        ("float16", None, False),
        ("float16", "float16", False),
    ],
)
def test_errors_are_no_larger_than_the_originals(dtype, logits_dtype, on_a_gpu, at_once, monkeypatch):
    """Against float64 of the same numbers: loss and gradients, mean over rows, of which some do not count, times a loss scale."""
    if on_a_gpu:  # products of a GPU, multiplied here
        made = chunked.halves
        monkeypatch.setattr(chunked, "halves", lambda *a: made(*a[:-1], replace(a[-1], device=Device.of("sm_90"))))
    rows, scale = 257, 0.3 if dtype != "float16" else 1000.0
    x, w, labels, _, _ = operands((rows,), 64, 512, dtype)
    counts = jnp.where(jnp.arange(rows) % 3 == 0, 0, 1 / rows)
    labels = jnp.where(counts == 0, -100, labels % 512)

    def graded(f, x, w, **options):
        def run(x, w):
            weights = counts.astype(jnp.promote_types(x.dtype, "float32"))
            return scale * f(x, w, labels, None, weights, **options)

        return [np.asarray(a, np.float64) for a in jax.tree.leaves(jax.jit(jax.value_and_grad(run, (0, 1)))(x, w))]

    got = graded(linear_cross_entropy, x, w, logits_dtype=logits_dtype, implementation="xla_chunked", chunk=64)
    plain = graded(original, x, w, logits_dtype=logits_dtype)
    with jax.enable_x64(True):
        true = graded(original, x.astype("float64"), w.astype("float64"))
    errors = [
        [np.linalg.norm(a - t) / np.linalg.norm(t) for a, t in zip(found, true, strict=True)] for found in (got, plain)
    ]
    least = {"float32": 1e-7, "bfloat16": 1e-6, "float16": 1e-6}[dtype]  # of a loss that happens to be rounded well
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= max(1.05 * theirs, least), errors


def test_rows_without_weight_add_nothing_in_halves():
    """Of a mean over 131072 rows, some of which do not count."""
    x, w, labels, _, _ = operands((5,), 4, 8, "bfloat16")
    weights = jnp.where(jnp.arange(5) < 2, 0, 2.0**-17)
    form = Settings(logits_dtype="float32", device=Device.of("sm_90"))
    made = {}
    for known in (halves.halves(x, w, {"loss": weights}, form), None):
        of = rows.logits(x, w, labels, None, form)
        top, mass = rows.statistics(of, form)
        dh, sizes = halves.multiplied(known, of, {"top": top, "mass": mass}, {"loss": weights}, form)
        made[known is None] = halves.products(known, dh, sizes, x, w, ("x", "w"), form)
        made[known is None]["w"] *= halves.factor(known)
    for name, want in made[True].items():
        np.testing.assert_allclose(made[False][name], want, rtol=0.01, atol=1e-3 * np.abs(want).max())


@pytest.mark.parametrize(("logits", "sent"), [("bfloat16", "bf16"), ("float32", "f32"), ("float16", "f32")])
def test_a_gradient_is_summed_over_devices_in_the_dtype_in_which_a_bfloat16_program_sums_it(logits, sent):
    form = Settings(logits_dtype=logits, across=(("m0", ("d",)),))
    mesh, spec = AbstractMesh((2,), ("d",)), PartitionSpec()
    summed = partial(reference._over_devices, axes=("d",), form=form)
    run = jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jaxpr = jax.make_jaxpr(run)({"w": jax.ShapeDtypeStruct((4, 8), "float32")})
    assert re.findall(r":(\w+)\[4,8\] = psum", str(jaxpr)) == [sent]


def compiled_step(f, rows=2048, features=32, size=2048, **options):
    x, w = jax.ShapeDtypeStruct((rows, features), "float32"), jax.ShapeDtypeStruct((features, size), "float32")
    labels, weights = jax.ShapeDtypeStruct((rows,), "int32"), jax.ShapeDtypeStruct((rows,), "float32")
    run = jax.value_and_grad(lambda x, w, y, u: f(x, w, y, None, u, **options), (0, 1))
    return jax.jit(run).lower(x, w, labels, weights).compile()


@pytest.mark.dear
def test_the_logits_never_exist_whole_and_the_sum_is_not_copied():
    ours = compiled_step(linear_cross_entropy, implementation="xla_chunked", chunk=256)
    plain = compiled_step(original)
    assert ours.memory_analysis().temp_size_in_bytes <= 0.4 * plain.memory_analysis().temp_size_in_bytes
    text = ours.as_text()
    assert "f32[2048,2048]" not in text
    assert "f32[256,2048]" in text
    assert not re.search(r"f32\[32,2048\]\S* copy\(", text)


@pytest.mark.dear
def test_no_gradient_is_made_that_nobody_asked_for():
    rows, features, size = 64, 512, 128
    x, w, labels, _, weights = operands((rows,), features, size)
    for options in ({"implementation": "xla"}, {"implementation": "xla_chunked", "chunk": 64}):
        loss = jax.jit(partial(linear_cross_entropy, **options)).lower(x, w, labels, None, weights)
        assert loss.as_text().count("dot_general") == 1
        step = jax.value_and_grad(partial(linear_cross_entropy, **options), (0, 1))
        assert jax.jit(step).lower(x, w, labels, None, weights).as_text().count("dot_general") == 3
    assert loss.compile().cost_analysis()["flops"] <= 1.05 * 2 * rows * features * size
    eqn = jax.make_jaxpr(linear_cross_entropy)(x, w, labels, None, weights).eqns[-1]
    assert eqn.primitive.arithmetic(eqn.params, [v.aval for v in eqn.invars])[0] <= 1.05 * 2 * rows * features * size


@pytest.mark.parametrize(
    ("device", "rows", "weighted", "name", "left"),
    [
        ("cpu", 4096, True, "xla_chunked", None),
        ("cpu", 4096, False, "xla_chunked", "slower"),
        ("cpu", 64, True, "xla", "same code"),
        ("sm_90", 16384, True, "cuda", None),
        ("sm_90", 16384, False, "cuda", "slower"),
        ("sm_90", 64, True, "xla", "slower"),
        ("sm_80", 16384, True, "cuda", "unmeasured"),
    ],
)
def test_where_chunks_are_taken(device, rows, weighted, name, left):
    x, w = jax.ShapeDtypeStruct((rows, 16), "bfloat16"), jax.ShapeDtypeStruct((16, 32768), "bfloat16")
    by_row = (jax.ShapeDtypeStruct((rows,), kind) for kind in ("int32", "float32"))
    labels, weights = by_row
    given = (x, w, labels, None, weights if weighted else None)
    assert LINEAR_CROSS_ENTROPY.choose(*given, device=device) == name
    found = LINEAR_CROSS_ENTROPY.left_to_xla(*given, device=device)
    assert (found and found.kind.value) == left


def test_chunks_are_even_and_hold_a_fixed_amount_of_memory():
    x, w, labels, _, weights = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands((4097,), 16, 64))
    _, full = LINEAR_CROSS_ENTROPY._prepared((x, w, labels, None, weights), {})
    form = Settings.of({**full, "device": Device.of("cpu")})
    assert chunked.chunks((4097, 16), 32768, form) == (9, 456)
    assert chunked.chunks((512, 16), 32768, form) == (1, 512)
    assert chunked.chunks((3, 16), 1 << 30, form)[0] == 3
    on_gpu = Settings(logits_dtype="bfloat16", device=Device.of("h200"))
    assert chunked.chunks((8192, 16), 32768, on_gpu) == (4, 2048)
    assert chunked.chunks((8192, 16), 32768, on_gpu, chunked.Kept.NOTHING) == (2, 4096)
    assert chunked.chunks((8192, 16), 32768, on_gpu, chunked.Kept.IN_PLACE) == (1, 8192)
    assert chunked.chunks((32768, 16), 128256, on_gpu, chunked.Kept.SUMS) == (16, 2048)
    assert chunked.chunks((2049, 16), 32768, on_gpu) == (1, 2049)
    assert chunked.chunks((3100, 16), 32768, on_gpu) == (2, 1552)
    form = Settings.of({**full, "device": Device.of("h100"), "logits_dtype": "bfloat16"})
    assert chunked.chunks((8192, 16), 32768, form) == (4, 2048)
    assert chunked.chunks((8192, 16), 128256, form) == (8, 1024)
    assert chunked.chunks((8192, 16), 32768, form, chunked.Kept.IN_PLACE) == (1, 8192)


@pytest.mark.parametrize(
    ("change", "attrs", "words"),
    [
        ({"x": ()}, {}, "x is a scalar"),
        ({"w": (8,)}, {}, "w has shape (8,), needed rank 2"),
        ({"w": (11, 8)}, {}, "needed the same E: w is V x E with transposed=True"),
        ({"w": (8, 0)}, {}, "no vocabulary"),
        ({"labels": (12,)}, {}, "labels has shape (12,), needed (13,)"),
        ({"weights": (13, 1)}, {}, "weights has shape (13, 1), needed (13,)"),
        ({"bias": (8,)}, {}, "bias has shape (8,), needed (11,)"),
        ({}, {"label_smoothing": "much"}, "label_smoothing is 'much', needed a number"),
        ({}, {"z_loss": float("nan")}, "z_loss is nan, needed a finite number"),
        ({}, {"softcap": 0}, "softcap is 0, needed a finite number above 0"),
        ({}, {"chunk": 0}, "chunk is 0, needed 1 or more rows"),
        ({}, {"logits_dtype": "bfloat16"}, "logits_dtype is bfloat16, needed that of x, float32"),
        ({}, {"logits_dtype": "words"}, "logits_dtype is 'words', needed a dtype"),
        ({}, {"transposed": 1}, "transposed is 1, needed True or False"),
        ({}, {"also": "lse"}, "also is 'lse', needed a tuple"),
        ({}, {"also": ("lse", "lse")}, "needed each name once"),
        ({}, {"also": ("top",)}, "argmax, loss, lse"),
        ({"weights": None}, {"also": ("loss",)}, "the result without weights"),
        ({}, {"out_of_range": "wrap"}, "out_of_range"),
        ({}, {"implementation": "pallas"}, "implementation"),
    ],
)
def test_a_wrong_argument_is_named(change, attrs, words):
    shapes = {"x": (13, 8), "w": (8, 11), "labels": (13,), "bias": (11,), "weights": (13,)} | change
    given = {
        slot: None if s is None else jnp.zeros(s, "int32" if slot == "labels" else "float32")
        for slot, s in shapes.items()
    }
    with pytest.raises((ArgumentError, UnknownNameError), match=re.escape(words)):
        linear_cross_entropy(**given, **attrs)


def test_a_wrong_dtype_is_named():
    x, w, labels, _, weights = operands((13,), 8, 11)
    for given, words in (
        ((x, w, weights), "labels has dtype float32, needed integers"),
        ((x, w.astype("bfloat16"), labels), "w has dtype bfloat16 but x has float32"),
        ((x, w, labels, None, labels), "weights has dtype int32, needed a float"),
    ):
        with pytest.raises(ArgumentError, match=words):
            linear_cross_entropy(*given)


@pytest.mark.devices
@pytest.mark.dear
@pytest.mark.parametrize("name", ["automatic", "explicit", "shard_map", "shard_map unchecked"])
def test_on_four_devices(on_devices, name):
    on_devices("kernels.linear_cross_entropy.on_four_devices", name)
