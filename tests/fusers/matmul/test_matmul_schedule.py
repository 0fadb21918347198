"""Pass matmul_schedule: which products a route takes, with what around them, and what never changes."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.kernels import OPS
from fusionlab.kernels.ops.matmul import MATMUL, support
from tests.kernels.emulated_blas import products_on_the_cpu

from ..checks import normal

ARCHS = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "cpu")
ON = fl.Strategy(matmul_schedule={"library": True})
OFF = fl.Strategy(matmul_schedule={"library": False})
X, W, B, R = normal((24, 16), (16, 8), (8,), (24,))
HX, HW, HB, HR = (a.astype(jnp.bfloat16) for a in (X, W, B, R))


def find(fn, *args, passes=ON, device="sm_90", **options):
    return fl.find(fn, *args, passes=passes, device=device, **options)


def rewritten(found):
    """The program with every candidate applied, as a function of the flat arguments."""
    program = jex_core.jaxpr_as_fun(found.rewritten())

    def call(*args):
        out = program(*jax.tree.leaves(args))
        return out[0] if len(out) == 1 else out

    return call


def agree(fn, *args, passes=ON, within=3e-6, grad=True):
    """What is found; values and gradients of the rewritten program, its library calls by numpy, are the program's own."""
    found = find(fn, *args, passes=passes)
    new = rewritten(found)
    with products_on_the_cpu(support):
        pairs = [(jax.jit(new)(*args), fn(*args))]
        if grad:
            every = tuple(range(len(args)))
            pairs += [
                (jax.grad(lambda *a, f=f: (f(*a).astype(jnp.float32) ** 2).sum(), every)(*args),) for f in (new, fn)
            ]
            pairs = [pairs[0], (pairs[1][0], pairs[2][0])]
    for got, want in pairs:
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (g.shape, g.dtype) == (w.shape, w.dtype)
            scale = max(1.0, float(np.abs(np.asarray(w, np.float64)).max()))
            np.testing.assert_allclose(
                np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=0, atol=within * scale
            )
    return found


def one(fn, *args, **options):
    (site,) = agree(fn, *args, **options).candidates
    return site


# -- the original's three tests ------------------------------------------------------------------------------------------------


def single_mma_op(a, b):
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def mma_op_and_cast(a, b):
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(jnp.float16)


def matmul_with_bias(a, b, bias):
    return (jnp.matmul(a, b, preferred_element_type=jnp.float32) + bias[:, None]).astype(jnp.float16)


ONES = [jnp.ones(s, jnp.float16) for s in ((2, 3), (3, 4), (2,))]
ORIGINAL = {single_mma_op: 2, mma_op_and_cast: 2, matmul_with_bias: 3}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("fn", ORIGINAL)
def test_the_switch_changes_the_route_and_the_tag_says_it(fn, arch):
    args = ONES[: ORIGINAL[fn]]
    able = arch not in ("sm_70", "cpu")
    for passes, tag in ((ON, "evaluate" if able else "xla"), (OFF, "xla"), ("matmul_schedule", "xla")):
        found = find(fn, *args, passes=passes, device=arch)
        (row,) = found.routes()
        assert row.tag == tag
        assert len(found.candidates) == (tag == "evaluate")
        assert not found.rejections
        assert found.routes().counts() == {"evaluate": 0, "kernel": 0, "xla": 0} | {tag: 1}
    out = 4.0 if fn is matmul_with_bias else 3.0
    new = rewritten(find(fn, *args, device=arch))
    with products_on_the_cpu(support) as plans:
        got = jax.jit(new)(*args)
    assert (got == out).all()
    assert got.dtype == (jnp.float32 if fn is single_mma_op else jnp.float16)
    assert len(plans) == able  # one call, with all of it
    if able:
        (plan,) = plans
        assert (plan.dtype, plan.result_dtype) == ("float16", got.dtype.name)  # no round trip through half precision


def test_the_compiled_program_holds_one_call_a_product():
    def layer(x, w, b, r):
        return (0.5 * (x @ w + b)).sum(0), (x @ w) * 2 + r[:, None]

    args = (X, W, B, R)
    with products_on_the_cpu(support):
        counts = {}
        for name, passes in (("on", ON), ("off", OFF)):
            text = jax.jit(rewritten(find(layer, *args, passes=passes))).lower(*args).compile().as_text()
            calls = len(re.findall(r"custom-call\(.*fusionlab", text))
            counts[name] = (calls, len(re.findall(r"= f32\[24,8\]\S* dot\(", text)))
    assert counts["on"] == (2, 0)
    assert counts["off"][0] == 0
    assert counts["off"][1] >= 1


# -- what a route absorbs --------------------------------------------------------------------------------------------------------

ABSORBED = {
    "a product": (lambda x, w, b, r: x @ w, "a @ b"),
    "columns": (lambda x, w, b, r: x @ w + b, "a @ b + bias"),
    "the bias first": (lambda x, w, b, r: b + x @ w, "a @ b + bias"),
    "rows": (lambda x, w, b, r: x @ w + r[:, None], "a @ b + bias"),
    "a number": (lambda x, w, b, r: x @ w + r[0], "a @ b + bias"),
    "subtracted": (lambda x, w, b, r: x @ w - b, "a @ b + -1 * bias"),
    "subtracted from": (lambda x, w, b, r: b - x @ w, "-1 * (a @ b) + bias"),
    "alpha": (lambda x, w, b, r: 0.5 * (x @ w), "0.5 * (a @ b)"),
    "divided": (lambda x, w, b, r: (x @ w) / 4.0, "0.25 * (a @ b)"),
    "negated": (lambda x, w, b, r: -(x @ w) * 3, "-3 * (a @ b)"),
    "alpha of both": (lambda x, w, b, r: 2.0 * (x @ w + b), "2 * (a @ b) + 2 * bias"),
    "alpha and beta": (lambda x, w, b, r: 2.0 * (3.0 * (x @ w) + b), "6 * (a @ b) + 2 * bias"),
    "relu": (lambda x, w, b, r: jax.nn.relu(x @ w + r[:, None]), "relu(a @ b + bias)"),
    "gelu": (lambda x, w, b, r: jax.nn.gelu(0.5 * (x @ w)), "gelu_tanh(0.5 * (a @ b))"),
    "transposed operands": (lambda x, w, b, r: jnp.einsum("km,nk->mn", x.T, w.T), "a @ b"),
    "a batch": (
        lambda x, w, b, r: jnp.einsum("bmk,bkn->bmn", jnp.stack([x, x]), jnp.stack([w, -w])) + b,
        "a @ b + bias",
    ),
}


@pytest.mark.parametrize("name", ABSORBED)
def test_a_route_absorbs_what_stands_behind_a_product(name):
    fn, formula = ABSORBED[name]
    site = one(fn, X, W, B, R, within=1e-5)
    assert site.formula == formula
    assert site.attrs["product"] == "float32"
    assert site.backend.name == "cublaslt"


@pytest.mark.parametrize("columns", [8, 24])
def test_a_bias_along_rows_is_told_from_one_along_columns_also_of_a_square(columns):
    w, b = normal((16, columns), (columns,), seed=1)
    along = normal((24,), seed=2)[0]
    with products_on_the_cpu(support) as plans:
        for fn, bias in ((lambda x, w, b: x @ w + b, b), (lambda x, w, b: x @ w + b[:, None], along)):
            new = rewritten(find(fn, X, w, bias))
            np.testing.assert_allclose(jax.jit(new)(X, w, bias), fn(X, w, bias), rtol=1e-5, atol=1e-5)
    assert [(p.epilogue, p.beta) for p in plans] == [("BIAS", 0.0), ("DEFAULT", 1.0)]


def test_alpha_of_a_sum_is_right_against_float64():
    def fn(x, w, b):
        return 0.37 * (x @ w + b)

    site = one(fn, X, W, B, within=1e-5)
    assert site.formula == "0.37 * (a @ b) + 0.37 * bias"
    with products_on_the_cpu(support):
        got = jax.jit(rewritten(find(fn, X, W, B)))(X, W, B)
    want = 0.37 * (np.asarray(X, np.float64) @ np.asarray(W, np.float64) + np.asarray(B, np.float64))
    assert np.abs(np.asarray(got, np.float64) - want).max() < 1e-6 * np.abs(want).max()


# -- what stays as it is written -------------------------------------------------------------------------------------------------


def test_a_rounding_point_of_the_program_stays():
    """A bfloat16 product that is widened afterwards was rounded before: the route takes the product, and leaves the cast."""

    def fn(x, w):
        return (x @ w).astype(jnp.float32)

    site = one(fn, HX, HW, within=2e-2)
    assert site.formula == "a @ b"
    assert site.attrs["out"] == "bfloat16"
    assert rewritten(find(fn, HX, HW))(HX, HW).dtype == jnp.float32


OUTSIDE = {
    "a residual": lambda x, w, b, r: x @ w + jnp.sin(x[:, :8]),
    "a whole array": lambda x, w, b, r: x @ w + x[:, :8],
    "two products": lambda x, w, b, r: x @ w + (2 * x) @ w,
    "a number it is divided into": lambda x, w, b, r: 1.0 / (4 + x @ w),
    "a factor that is an array": lambda x, w, b, r: (x @ w) * b,
    "a factor of the program's": lambda x, w, b, r: (x @ w) * b[0],
    "a factor of nothing": lambda x, w, b, r: (x @ w) * 0.0,
    "itself": lambda x, w, b, r: (lambda h: h * h)(x @ w),
    "an unknown function": lambda x, w, b, r: jnp.sin(x @ w),
    "a name": lambda x, w, b, r: checkpoint_name(x @ w, "h") + b,
    "a stop_gradient": lambda x, w, b, r: jax.lax.stop_gradient(x @ w) + b,
    "a reshape": lambda x, w, b, r: (x @ w).reshape(6, 4, 8) + b,
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_no_part_of_a_call_stays_behind_it(name):
    found = agree(OUTSIDE[name], X, W, B, R, within=1e-4)
    assert {c.formula for c in found.candidates} == {"a @ b"}


def test_an_inner_value_that_is_read_elsewhere_ends_the_call():
    def returned(x, w, b):
        h = x @ w
        return h, h + b

    def read(x, w, b):
        h = x @ w + b
        return jax.nn.relu(h) + jnp.cos(h)

    (site,) = find(returned, X, W, B).candidates
    assert site.formula == "a @ b"
    (site,) = find(read, X, W, B).candidates
    assert site.formula == "a @ b + bias"


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_products_of_other_numbers_are_routed_to_xla(dtype):
    args = (X.astype(dtype), W.astype(dtype))
    found = find(lambda x, w: x @ w, *args)
    assert not found.candidates
    (row,) = found.routes()
    assert row.tag == "xla"
    assert "not supported by the op" in row.why


# -- casts around a product --------------------------------------------------------------------------------------------------------


def widened(x, w):
    return (x.astype(jnp.float32) @ w.astype(jnp.float32)).astype(jnp.bfloat16)


def test_operands_that_are_only_widened_are_multiplied_as_they_are():
    site = one(widened, HX, HW, passes="matmul_schedule", within=2e-2)
    assert site.formula == "bfloat16(a @ b)"
    assert site.backend.name == "xla"
    assert not site.same_code
    assert "without widening" in site.notes[0]
    assert not find(widened, HX, HW, passes="matmul_schedule", device="cpu").candidates
    assert site.arithmetic == "bfloat16, summed in float32"


def test_values_of_what_is_widened_are_the_same_to_the_bit():
    found = find(lambda x, w: x.astype(jnp.float32) @ w.astype(jnp.float32), HX, HW, passes="matmul_schedule")
    new = rewritten(found)
    want = np.asarray(HX, np.float64) @ np.asarray(HW, np.float64)
    assert len(found.candidates) == 1
    np.testing.assert_allclose(jax.jit(new)(HX, HW), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("widened", ["before it is broadcast", "after it", "both"])
def test_a_bias_of_16_bits_is_added_as_it_is_wherever_the_program_widens_it(widened, cast):
    """By numpy's promotion it is widened, then broadcast. XLA's own kernels of a product add no bias that they have to widen."""

    def fn(x, w, b):
        h = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        if widened != "after it":
            b = b.astype(jnp.float32)
        b = jnp.broadcast_to(b, h.shape).astype(jnp.float32)
        return (h + b).astype(x.dtype) if cast else h + b

    found = agree(fn, HX, HW, HB, within=2e-2)  # gradients in bfloat16
    (site,) = found.candidates
    assert site.leaves["bias"].dtype == jnp.bfloat16
    assert site.attrs["out"] == ("bfloat16" if cast else "float32")


def test_what_is_not_only_widened_stays_float32():
    def one_side(x, w):
        return x.astype(jnp.float32) @ w

    def scaled(x, w):
        return (x.astype(jnp.float32) * 1.001) @ w.astype(jnp.float32)

    def mixed(x, w):
        return x.astype(jnp.float32) @ w.astype(jnp.float16).astype(jnp.float32)

    for fn, args in ((one_side, (HX, W)), (scaled, (HX, HW)), (mixed, (HX, HW))):
        assert not find(fn, *args, passes="matmul_schedule").candidates
        (site,) = find(fn, *args).candidates
        assert "bfloat16" not in site.arithmetic


def test_what_the_library_cannot_absorb_stays_behind_what_it_can_where_the_switch_is_on():
    def fn(x, w, r):
        return jax.nn.silu(x @ w + r[:, None])

    site = one(fn, X, W, R, within=1e-5)
    assert (site.formula, site.backend.name) == ("a @ b + bias", "cublaslt")
    assert not find(fn, X, W, R, passes="matmul_schedule").candidates  # and as one where nothing was asked for


@pytest.mark.parametrize(
    "precision", [jax.lax.DotAlgorithmPreset.F32_F32_F32, jax.lax.DotAlgorithmPreset.F16_F16_F32, "highest", "high"]
)
def test_more_than_the_default_precision_is_not_asked_for_with_operands_of_another_dtype(precision):
    def fn(x, w):
        return jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32), precision=precision)

    assert not find(fn, HX, HW, passes="matmul_schedule").candidates


def repeated(factor, count):
    def fn(x, w, b):
        h = x @ w + b
        for _ in range(count):
            h = h * factor
        return h

    return fn


@pytest.mark.parametrize(("factor", "count"), [(1e30, 2), (1e30, 12), (1e-30, 2), (1e-30, 12)])
def test_factors_are_taken_as_long_as_their_product_is_a_number_of_the_dtype_and_not_0(factor, count):
    site = one(repeated(factor, count), X, W, B, grad=False)
    assert site.attrs["alpha"] == site.attrs["beta"] == pytest.approx(factor, rel=1e-6, abs=0)


def test_a_float16_factor_is_no_float32_one():
    (site,) = find(repeated(300.0, 2), *(a.astype(jnp.float16) for a in (X, W, B))).candidates
    assert site.attrs["alpha"] == 300.0


# -- beside other passes ---------------------------------------------------------------------------------------------------------


def test_a_larger_fusion_wins_and_the_table_says_so():
    def fn(x, w, b, w2):
        return jax.nn.relu(x @ w + b) @ w2

    args = (X, W, B, normal((8, 4))[0])
    found = find(fn, *args, passes=fl.Strategy(gemm_epilogue=True, matmul_schedule={"library": True}))
    # gemm_epilogue would run XLA's own code.
    assert [c.pass_name for c in found.candidates] == ["matmul_schedule", "matmul_schedule"]
    found = find(fn, *args, passes=["gemm_epilogue", "matmul_schedule"])
    assert [c.pass_name for c in found.candidates] == ["gemm_epilogue"]
    first, second = found.routes()
    assert (first.site, first.tag) == (found.candidates[0].id, "xla")
    assert "claimed by gemm_epilogue" in first.why
    assert second.site == ""
    assert [a.route.name for a in second.answers] == ["library", "kernel", "xla"]


def test_a_fusion_that_runs_faster_than_xla_keeps_its_product(monkeypatch):
    from fusionlab.kernels.choose.choices import CHOICES, Choice

    monkeypatch.setattr(
        type(CHOICES),
        "lookup",
        lambda self, arch, text: Choice("cuda", {"xla": 2.0, "cuda": 1.0}) if "gemm" in text else None,
    )
    found = find(
        lambda x, w, b: jax.nn.relu(x @ w + b),
        X,
        W,
        B,
        passes=fl.Strategy(gemm_epilogue=True, matmul_schedule={"library": True}),
    )
    (site,) = found.candidates
    assert (site.pass_name, site.backend.name) == ("gemm_epilogue", "cuda")
    (lost,) = found.rejections
    assert (lost.code, lost.winner) == ("overlap", site.id)
    (row,) = found.routes()
    assert (row.tag, row.site) == ("kernel", site.id)


def test_by_default_nothing_unmeasured_is_fused_and_nothing_is_declined():
    found = fl.find(lambda x, w: jnp.sin(x) @ w, X, W)
    assert found.counts()["matmul_schedule"] == 0
    assert not found.rejections
    (row,) = found.routes()
    assert row.tag == "xla"
    assert [a.code for a in row.answers] == ["device", "device", ""]
    assert "sin before it" in row.split


def test_no_measurement_is_asked_for_before_a_route_says_what_it_supports(monkeypatch):
    def never(*_):
        raise AssertionError("asked")

    monkeypatch.setattr(type(MATMUL), "measured", never)
    for arch in ("sm_70", "cpu"):
        assert find(single_mma_op, *ONES[:2], passes="matmul_schedule", device=arch).routes().counts()["xla"] == 1


# -- regions, gradients ------------------------------------------------------------------------------------------------------------


def test_products_inside_loops_and_remat_are_routed():
    def loop(x, w):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]

    w = normal((16, 16), seed=3)[0]
    found = agree(loop, X, w, within=1e-5)
    assert [c.block_path != "" for c in found.candidates] == [True]
    found = agree(jax.checkpoint(lambda x, w: 0.5 * (x @ w)), X, W, within=1e-5)
    assert [c.formula for c in found.candidates] == ["0.5 * (a @ b)"]


@pytest.mark.parametrize(
    ("fn", "specs", "args", "formula"),
    [
        (lambda x, w: 2.0 * jax.lax.psum(x @ w, "d"), (P(), P("d")), (X, W), "a @ b"),
        (
            lambda x, w, r: jax.nn.relu(2.0 * (x @ w) + r[:, None]),
            (P("d"), P(), P("d")),
            (X, W, R),
            "relu(2 * (a @ b) + bias)",
        ),
    ],
    ids=["summed", "with rows"],
)
def test_a_product_inside_a_shard_map_that_checks_what_varies(fn, specs, args, formula):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    inside = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=specs[0])
    assert one(inside, *args, within=1e-5).formula == formula


def test_a_bias_that_is_sharded_over_an_explicit_axis_stays_behind_the_product():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, w, b = (jax.device_put(a, NamedSharding(mesh, P(*axes))) for a, axes in ((X, ()), (W, ()), (B, ("d",))))
        (site,) = find(lambda x, w, b: jax.nn.relu(x @ w + b), x, w, b).candidates
        assert site.formula == "a @ b"


def test_a_train_step_is_paired_with_its_backward_products():
    def step(x, w, r):
        return jax.value_and_grad(lambda x, w: ((x @ w + r[:, None]) ** 2).sum(), (0, 1))(x, w)

    found = find(step, X, W, R)
    (site,) = found.candidates
    assert site.backward is not None
    new = rewritten(found)
    with products_on_the_cpu(support):
        got, want = jax.jit(new)(X, W, R), jax.tree.leaves(step(X, W, R))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-4)
    assert [row.tag for row in found.routes()] == ["evaluate", "xla", "xla"]
    assert {row.site for row in found.routes()} == {site.id}
    assert all("in the backward pass of" in row.why for row in list(found.routes())[1:])


def test_a_users_derivative_rule_keeps_its_products():
    @jax.custom_vjp
    def f(x, w):
        return x @ w

    f.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, ct: (ct @ saved[1].T, saved[0].T @ ct))
    found = find(lambda x, w: f(x, w), X, W)
    assert not found.candidates
    assert [r.code for r in found.rejections] == ["custom_rule"]
    (row,) = found.routes()
    assert "the user's own" in row.why


def test_a_fused_program_traced_again_finds_nothing_new():
    new = rewritten(find(ABSORBED["rows"][0], X, W, B, R))
    found = find(lambda *args: new(*args), X, W, B, R)
    assert not found.candidates
    assert [n.primitive for n in found.graph.nodes()].count("matmul") == 1


@pytest.mark.parametrize("library", ["on", 0, 1])
def test_the_switch_is_checked(library):
    with pytest.raises(ArgumentError, match=f"library is {library!r}, needed True, False or None"):
        find(single_mma_op, *ONES[:2], passes=fl.Strategy(matmul_schedule={"library": library}))


# -- the table ---------------------------------------------------------------------------------------------------------------------


def test_the_table_prints_tells_and_is_data():
    def fn(x, w, r):
        h = jnp.sin(x) @ w
        return 2.0 * (x @ w + r[:, None]), jnp.exp(h)

    found = find(fn, X, W, R)
    table = found.routes()
    text = str(table)
    assert text.startswith("2 products on a CUDA sm_90 device (simulated): 2 evaluate, 0 kernel, 0 xla\n")
    assert "evaluate 2 * (a @ b) + 2 * bias, 24x16x8, f32 x f32 -> f32" in text
    assert "library: takes it: the switch is on" in text
    assert re.search(r"split: %\d+ = sin before it, %\d+ = exp after it", text)
    data = table.to_dict()
    assert data["counts"] == {"evaluate": 2, "kernel": 0, "xla": 0}
    assert [p["site"] for p in data["products"]] == [c.id for c in found.candidates]
    assert math.prod(data["products"][0]["sizes"]) == 24 * 16 * 8
    frame = table.to_dataframe()
    assert list(frame["tag"]) == ["evaluate", "evaluate"]
    assert "<table>" in table._repr_html_()
    assert len(find(lambda x: x + 1, X).routes()) == 0


@pytest.mark.parametrize("named", ["cuda", "xla", "cublaslt"])
def test_a_named_implementation_is_the_only_route_asked(named):
    def fn(x, w, b):
        return jax.nn.silu(x @ w + b)

    found = fl.find(fn, X, W, B, passes="matmul_schedule", implementation=named, device="cpu")
    (row,) = found.routes()
    assert row.tag == "xla"
    others = [a for a in row.answers if a.route.implementation != named and not a.takes]
    assert all("another implementation was named" in a.sentence for a in others)
    assert not any("switch is off" in a.sentence for a in row.answers)
    assert not found.candidates


def test_a_scope_named_by_the_model_cannot_inject_markup():
    def fn(x, w):
        return x @ w

    table = find(fn, X, W).routes()
    bad = type(table)("<script>", tuple(type(r)(**{**vars(r), "source": "<i>"}) for r in table))
    assert "<script>" not in bad._repr_html_()
    assert "<i>" not in bad._repr_html_()


def test_a_kernel_of_our_own_takes_what_was_measured_fastest(monkeypatch):
    from fusionlab.kernels.choose.choices import Choice

    monkeypatch.setattr(type(MATMUL), "measured", lambda *_: Choice("cuda", {"xla": 2.0, "cuda": 1.0}))

    def experts(x, w):
        return jax.nn.silu(jnp.einsum("ebk,ekn->ebn", x, w))

    found = find(experts, *normal((4, 8, 16), (4, 16, 32)), passes="matmul_schedule")
    (site,) = found.candidates
    assert (site.formula, site.backend.name) == ("silu(a @ b)", "cuda")
    assert found.routes().counts()["kernel"] == 1


def test_the_op_is_told_in_the_catalogue():
    (entry,) = [p for p in fl.passes() if p.name == "matmul_schedule"]
    assert "library" in entry.options
    assert OPS["matmul"].implementations.keys() == {"xla", "cublaslt", "cuda"}


@pytest.mark.parametrize(
    ("times", "tag"),
    [
        ({"xla": 10.0, "cublaslt": 9.5}, "xla"),
        ({"xla": 10.0, "cublaslt": 8.5}, "evaluate"),
        ({"cublaslt": 1.0}, "evaluate"),
    ],
)
def test_a_small_gain_at_other_sizes_is_none_at_these(monkeypatch, times, tag):
    from fusionlab.kernels.choose.choices import CHOICES, Choice, Measured

    near = Choice("cublaslt", times, source="a table, at other sizes")
    monkeypatch.setattr(CHOICES, "_mine", lambda arch: Measured())
    # Measured at 16 rows, only a clear gain counts at 8; measured at 8 rows, any gain does.
    for rows, expected in ((16, tag), (8, "evaluate")):
        a, b = (jax.ShapeDtypeStruct(s, X.dtype) for s in ((rows, 16), W.shape))
        given, full = OPS["matmul"].prepare({"a": a, "b": b}, {})
        text = OPS["matmul"].case("call", given, **full)
        monkeypatch.setattr(CHOICES, "_table", lambda arch, text=text: Measured({text: near}))
        (row,) = find(lambda x, w: x @ w, X[:8], W, passes="matmul_schedule").routes()
        assert row.tag == expected
