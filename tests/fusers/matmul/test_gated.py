"""The gated pair act(x @ w) * (x @ v) as one call: where it is asked for, what it becomes, and what is no pair."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fusionlab as fl
from fusionlab.errors import REJECTIONS, ArgumentError
from fusionlab.kernels.choose import choices
from fusionlab.kernels.ops.gated_matmul import GATED_MATMUL, cuda
from tests.kernels.emulated import kernels_on_the_cpu

from ..checks import close, normal

PAIR = fl.Strategy(gated_matmul={"prefer": "concatenated"})
KERNEL = fl.Strategy(gated_matmul={"prefer": "kernel"})
BOTH = fl.Strategy(gemm_epilogue=True, gated_matmul={"prefer": "concatenated"})
X, W, V, D, B = normal((3, 8, 16), (16, 24), (16, 24), (24, 16), (24,))
HX, HW, HV, HD = (a.astype(jnp.bfloat16) for a in (X, W, V, D))
silu = jax.nn.silu


def find(fn, *args, passes=PAIR, device="cpu"):
    return fl.find(fn, *args, passes=passes, device=device)


def pairs(found):
    return [c for c in found.candidates if c.op == "gated_matmul"]


def agree(fn, *args, passes=PAIR, factor=1.0):
    """The one candidate; values and gradients of the fused function are those of the program."""
    (site,) = pairs(find(fn, *args, passes=passes))
    fused = fl.fuse(fn, passes=passes, check=True)
    close(jax.jit(fused)(*args), jax.jit(fn)(*args), factor)
    every = tuple(range(len(args)))

    def loss(f):
        return jax.jit(jax.grad(lambda *a: (f(*a).astype(jnp.float32) ** 2).mean(), every))

    close(loss(fused)(*args), loss(fn)(*args), 3 * factor)
    return site


def products(fn, *args):
    return jax.jit(fn).lower(*args).as_text().count("dot_general")


def feed_forward(x, w, v, d):
    return (silu(x @ w) * (x @ v)) @ d


def wide(a, b):
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def matmul_nt(x, w):
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())))


FORMS = {
    "silu": lambda x, w, v: silu(x @ w) * (x @ v),
    "the other way round": lambda x, w, v: (x @ v) * silu(x @ w),
    "the activated product second": lambda x, w, v: (x @ w) * silu(x @ v),
    "gelu": lambda x, w, v: jax.nn.gelu(x @ w) * (x @ v),
    "gelu of erf": lambda x, w, v: jax.nn.gelu(x @ w, approximate=False) * (x @ v),
    "relu": lambda x, w, v: jax.nn.relu(x @ w) * (x @ v),
    "sigmoid": lambda x, w, v: jax.nn.sigmoid(x @ w) * (x @ v),
    "silu, written out": lambda x, w, v: (lambda h: h * jax.nn.sigmoid(h))(x @ w) * (x @ v),
    "einsum": lambda x, w, v: silu(jnp.einsum("btk,kn->btn", x, w)) * jnp.einsum("btk,kn->btn", x, v),
    "weights turned": lambda x, w, v: silu(x @ w.T.T) * (x @ v),
    "columns x inner": lambda x, w, v: silu(matmul_nt(x, w.T)) * matmul_nt(x, v.T),
    "rows under vmap": lambda x, w, v: jax.vmap(lambda r: silu(r @ w) * (r @ v))(x),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_pair_is_one_call(name):
    site = agree(FORMS[name], X, W, V)
    assert site.pass_name == "gated_matmul"
    assert dict(site.attrs)["w_contract"] == (name == "columns x inner")


def test_of_16_bits_it_is_rounded_once_and_says_so():
    site = agree(FORMS["silu"], HX, HW, HV)
    assert site.notes == (
        "x @ w, its activation and x @ v stay in float32 and are rounded to bfloat16 once, at the end",
    )
    exact = FORMS["silu"](*(np.asarray(a, np.float64) for a in (HX, HW, HV)))
    errors = [
        np.abs(np.asarray(f(HX, HW, HV), np.float64) - exact).mean()
        for f in (FORMS["silu"], fl.fuse(FORMS["silu"], passes=PAIR))
    ]
    assert errors[1] < 0.8 * errors[0]


def test_of_16_bits_with_sums_in_float32_it_is_what_the_program_says():
    def fn(x, w, v):
        return (silu(wide(x, w)) * wide(x, v)).astype(x.dtype)

    assert agree(fn, HX, HW, HV).notes == ()
    np.testing.assert_array_equal(
        fl.fuse(fn, passes=fl.Strategy(gated_matmul={"prefer": "concatenated"}))(HX, HW, HV), fn(HX, HW, HV)
    )


F32 = jnp.float32
WIDENED = {
    "both sides widened": lambda x, w, v: (silu((x @ w).astype(F32)) * (x @ v).astype(F32)).astype(x.dtype),
    "the gate widened": lambda x, w, v: (silu((x @ w).astype(F32)) * (x @ v)).astype(x.dtype),
    "the gate rounded again": lambda x, w, v: silu((x @ w).astype(F32)).astype(x.dtype) * (x @ v),
    "written out": lambda x, w, v: (lambda h: h * jax.nn.sigmoid(h) * (x @ v))((x @ w).astype(F32)).astype(x.dtype),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDENED)
def test_of_16_bits_and_computed_in_float32_it_is_one_call_as_near_to_float64(name):
    fn = WIDENED[name]
    agree(fn, HX, HW, HV)
    exact = FORMS["silu"](*(np.asarray(a, np.float64) for a in (HX, HW, HV)))
    errors = [np.abs(np.asarray(f(HX, HW, HV), np.float64) - exact).mean() for f in (fn, fl.fuse(fn, passes=PAIR))]
    assert errors[1] <= errors[0]
    step = jax.value_and_grad(lambda *a: (fn(*a).astype(F32) ** 2).mean(), (0, 1, 2))
    assert pairs(find(step, HX, HW, HV))
    close(jax.jit(fl.fuse(step, passes=PAIR))(HX, HW, HV)[1], jax.jit(step)(HX, HW, HV)[1], 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_rounds_a_pair_of_float32_stays_behind_it(dtype):
    """As a layer does whose parameters are float32 and whose activations are not."""

    def fn(x, w, v):
        return (silu(x @ w) * (x @ v)).astype(dtype)

    assert agree(fn, X, W, V).root.dtype == jnp.float32


def test_of_float16_with_sums_in_float32_the_gradient_keeps_their_range():
    """x @ w is 1e5 and more, which float16 has not: its gradient would be no number."""

    def fn(x, w, v):
        return (silu(wide(x, w)) * wide(x, v)).astype(x.dtype)

    def gradients(f):
        return jax.jit(jax.grad(lambda *a: f(*a).astype(jnp.float32).sum(), (0, 1, 2)))(*args)

    args = X.astype(jnp.float16), (3e4 * W).astype(jnp.float16), (1e-4 * V).astype(jnp.float16)
    assert not np.isfinite(np.asarray(wide(*args[:2]).astype(jnp.float16))).all()
    close(gradients(fl.fuse(fn, passes=PAIR)), gradients(fn))
    (told,) = find(fn, *args).rejections
    assert told.code == "dtype"
    assert "float16" in told.sentence
    strategy = fl.Strategy(gated_matmul={"prefer": "concatenated"}, gated_matmul_grad=False)
    assert pairs(find(fn, *args, passes=strategy))  # JAX's own gradient of it keeps float32 too
    close(gradients(fl.fuse(fn, passes=strategy)), gradients(fn))


def test_x_may_be_cast_for_each_product():
    """As layers do that each cast their operands."""

    def fn(x, w, v):
        return silu(x.astype(w.dtype) @ w) * (x.astype(v.dtype) @ v)

    site = agree(fn, X, HW, HV, factor=4e3)  # the gradient of x is one of 16 bits, widened
    assert {name: str(leaf.dtype) for name, leaf in site.region.leaves.items()} == {
        "x": "float32",
        "w": "bfloat16",
        "v": "bfloat16",
    }


def test_products_go_from_three_to_two_to_none_of_its_own():
    assert products(feed_forward, X, W, V, D) == 3
    assert products(fl.fuse(feed_forward, passes=fl.Strategy(gated_matmul=True)), X, W, V, D) == 3
    assert products(fl.fuse(feed_forward, passes=PAIR), X, W, V, D) == 2


def test_the_kernel_is_one_launch_and_the_pair_no_product(emulator):
    args = HX, HW, HV, HD
    # What stands for the device is the op's own: the search is told of a GPU.
    found = find(feed_forward, *args, passes=KERNEL, device="sm_90")
    (site,) = pairs(found)
    assert site.backend.name == "cuda"
    program = jex_core.jaxpr_as_fun(found.rewritten())
    with kernels_on_the_cpu(emulator, cuda):
        text = jax.jit(program).lower(*args).as_text()
        assert (text.count("dot_general"), text.count("fusionlab_")) == (1, 1)
        close(jax.jit(program)(*args)[0], feed_forward(*args))
        loss = [
            jax.grad(lambda *a, f=f: (f(*a).astype(jnp.float32) ** 2).mean(), (0, 1, 2, 3))
            for f in (lambda *a: program(*a)[0], feed_forward)
        ]
        close(jax.jit(loss[0])(*args), jax.jit(loss[1])(*args), 3.0)
    # Compiled for something else it is XLA's again.
    assert jax.jit(program).lower(*args).as_text().count("dot_general") == 3


def test_the_routes_say_who_has_the_products():
    rows = list(find(feed_forward, HX, HW, HV, HD, passes=KERNEL, device="sm_90").routes())
    assert [(row.tag, row.formula) for row in rows] == [("kernel", "silu(x @ w) * (x @ v)")] * 2 + [("xla", "a @ b")]
    assert rows[0].reason == "claimed by gated_matmul, cuda: named by `prefer`, and it can run"
    assert {row.site for row in rows[:2]} == {"gated_matmul@#1"}
    assert not rows[2].reason


def test_it_wins_over_the_sites_of_its_parts_where_it_is_asked_for():
    found = find(feed_forward, X, W, V, D, passes=BOTH)
    assert [c.op for c in found.candidates] == ["gated_matmul"]
    (lost,) = [r for r in found.rejections if r.pass_name == "gemm_epilogue"]
    assert (lost.code, lost.winner) == ("overlap", "gated_matmul@#1")


def test_it_wins_over_a_site_that_runs_faster_than_xla_too(monkeypatch):
    faster = choices.Choice("cuda", {"xla": 2.0, "cuda": 1.0})
    monkeypatch.setattr(choices.Choices, "lookup", lambda self, arch, text: faster if "gemm" in text else None)
    args = HX, HW, HV, HD
    (site,) = find(feed_forward, *args, passes="gemm_epilogue", device="sm_90").candidates
    assert site.backend.name == "cuda"
    found = find(feed_forward, *args, passes=BOTH, device="sm_90")
    assert [c.op for c in found.candidates] == ["gated_matmul"]


def test_by_default_the_pair_stays_as_it_is():
    for device in ("cpu", "sm_90"):
        found = find(feed_forward, HX, HW, HV, HD, passes=None, device=device)
        assert [c.op for c in found.candidates] == ["gemm_epilogue"]
        told = [(r.code, r.waits) for r in found.rejections if r.pass_name == "gated_matmul"]
        assert told == ([] if device == "cpu" else [("unmeasured", True)])
        assert [s.kind for s in found.structures] == ["glu_pair"]


def test_what_was_measured_faster_is_taken_by_default(monkeypatch, tmp_path):
    x, w, d = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 1024), (1024, 4096), (4096, 1024)))
    given, full = GATED_MATMUL.prepare({"x": x, "w": w, "v": w}, {})
    text = GATED_MATMUL.case("call", given, **full)
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", str(tmp_path / "plans.json"))
    for name in ("xla", "cuda"):
        one = choices.Choice(name, {"xla": 3.0, "cuda": 4.0} | {name: 1.0})
        choices.write(tmp_path / "plans.json", "sm_90", choices.Measured({text: one}, device="a GPU"))
        found = find(feed_forward, x, w, w, d, passes=None, device="sm_90")
        assert [c.op for c in found.candidates] == ["gated_matmul" if name == "cuda" else "gemm_epilogue"]
        assert not [r for r in found.rejections if r.pass_name == "gated_matmul"]
    assert "measured: cuda 1 µs" in pairs(found)[0].backend.reason
    assert not pairs(find(feed_forward, x, w, w, d, passes=None))  # on a CPU nothing was measured


def test_inside_loops_and_remat():
    def layers(x, w, v, d):
        def body(c, one):
            return c + jax.checkpoint(feed_forward)(c, *one), None

        return jax.lax.scan(body, x, (w, v, d))[0]

    stacked = tuple(jnp.stack([a, 0.5 * a]) / 4 for a in (W, V, D))
    agree(layers, X, *stacked)


def test_a_train_step_is_fused_with_its_backward_pass():
    step = jax.value_and_grad(lambda w, v, d, x: (feed_forward(x, w, v, d) ** 2).mean(), (0, 1, 2))
    args = W, V, D, X
    found = find(step, *args)
    (site,) = pairs(found)
    assert set(site.backward.gradients) >= {"w", "v"}
    close(jax.jit(fl.fuse(step, passes=PAIR, check=True))(*args), jax.jit(step)(*args), 3.0)


def test_a_gradient_may_stay_jax_s_own():
    with pytest.warns(FutureWarning, match="gated_matmul=dict"):  # as it was asked for while it was an option
        strategy = fl.Strategy(matmul_schedule={"gated": "concatenated", "library": False}, matmul_schedule_grad=False)
    now = {"gated_matmul": {"prefer": "concatenated"}, "matmul_schedule": {"library": False}}
    assert dict(strategy) == now | {"gated_matmul_grad": False, "matmul_schedule_grad": False}
    saved = fl.Strategy.from_json('{"matmul_schedule": true}')  # of before, when gated pairs were part of it
    assert dict(saved) == {"matmul_schedule": True}
    assert fl.find(lambda x: x, 1.0, passes=saved).passes == ("gated_matmul", "matmul_schedule")
    alone = fl.Strategy(matmul_schedule=True, gated_matmul=False)
    assert fl.find(lambda x: x, 1.0, passes=alone).passes == ("matmul_schedule",)
    with pytest.warns(FutureWarning, match="gated_matmul=dict"):  # by both names
        both = fl.Strategy(matmul_schedule={"gated": "concatenated"}, gated_matmul=True)
    assert both["gated_matmul"] == {"prefer": "concatenated"}
    (site,) = pairs(find(FORMS["silu"], X, W, V, passes=strategy))
    assert dict(site.attrs)["gradient"] == "reference"
    agree(FORMS["silu"], X, W, V, passes=strategy)


@jax.custom_jvp
def mine(h):
    return silu(h)


@mine.defjvp
def _(primals, tangents):
    return mine(primals[0]), 2 * tangents[0]


def by_heads(x, w):
    return jnp.einsum("btk,khn->bthn", x, w.reshape(16, 4, 6))


def two(x, w, v):
    p, q = x @ w, x @ v
    return p, q


def reads(which):
    def fn(x, w, v):
        p, q = two(x, w, v)
        a = silu(p)
        return a * q, (p, q, a)[which]

    return fn


NEAR = {
    "x @ w is read outside": (reads(0), "escapes"),
    "x @ v is read outside": (reads(1), "escapes"),
    "the activated value is read outside": (reads(2), "escapes"),
    "another x": (lambda x, w, v: silu(x @ w) * ((2 * x + 1) @ v), None),
    "x in another form": (lambda x, w, v: silu(x @ w) * (x.astype(jnp.bfloat16).astype(x.dtype) @ v), "structure"),
    "one weight twice": (lambda x, w, v: silu(x @ w) * (x @ w), "structure"),
    "one weight, in two products": (lambda x, w, v: silu(x @ w) * jnp.matmul(x, w, precision="highest"), "structure"),
    "other precisions": (lambda x, w, v: silu(x @ w) * jnp.matmul(x, v, precision="highest"), "structure"),
    "a bias before the activation": (lambda x, w, v: silu(x @ w + B) * (x @ v), "bias"),
    "a bias on the other side": (lambda x, w, v: silu(x @ w) * (x @ v + B), "bias"),
    "no activation": (lambda x, w, v: (x @ w) * (x @ v), None),
    "an activation that is not known": (lambda x, w, v: jnp.sin(x @ w) * (x @ v), "activation"),
    "both are activated": (lambda x, w, v: silu(x @ w) * silu(x @ v), None),
    "a derivative of the user's own": (lambda x, w, v: mine(x @ w) * (x @ v), "custom_rule"),
    "x @ w is named": (lambda x, w, v: silu(checkpoint_name(x @ w, "gate")) * (x @ v), "named_residual"),
    "x @ v is named": (lambda x, w, v: silu(x @ w) * checkpoint_name(x @ v, "up"), "named_residual"),
    "the activated value is named": (lambda x, w, v: checkpoint_name(silu(x @ w), "act") * (x @ v), "named_residual"),
    "no gradient of x @ v": (lambda x, w, v: silu(x @ w) * jax.lax.stop_gradient(x @ v), "stop_gradient"),
    "no gradient of x @ w": (lambda x, w, v: silu(jax.lax.stop_gradient(x @ w)) * (x @ v), "stop_gradient"),
    "a factor between": (lambda x, w, v: (2.0 * silu(x @ w)) * (x @ v), "structure"),
    "a sum": (lambda x, w, v: silu(x @ w) + (x @ v), None),
    "weights that lie differently": (lambda x, w, v: silu(matmul_nt(x, w.T)) * (x @ v), "axes"),
    "weights of heads": (lambda x, w, v: silu(by_heads(x, w)) * by_heads(x, v), "axes"),
    "turned round": (lambda x, w, v: silu(jnp.einsum("kn,btk->nbt", w, x)) * jnp.einsum("kn,btk->nbt", v, x), "axes"),
    "a cast between": (lambda x, w, v: silu(x @ w) * (x @ v).astype(jnp.bfloat16).astype(jnp.float32), "dtype"),
}  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("name", NEAR)
def test_what_is_no_pair_is_not_fused_and_says_why(name):
    fn, code = NEAR[name]
    found = find(fn, X, W, V)
    assert not pairs(found)
    told = [r for r in found.rejections if r.pass_name == "gated_matmul"]
    assert [r.code for r in told] == ([code] if code else [])
    assert all(r.code in REJECTIONS and r.sentence for r in told)
    assert not find(fn, X, W, V, passes=fl.Strategy(gated_matmul=True)).rejections


HALF = {
    "float32 sums that are not rounded": lambda x, w, v: silu(wide(x, w)) * wide(x, v),
    "float32 sums on one side": lambda x, w, v: silu(wide(x, w)) * (x @ v),
    "rounded to another dtype": lambda x, w, v: (silu(wide(x, w)) * wide(x, v)).astype(jnp.float16),
    "widened before the activation": lambda x, w, v: silu((x @ w).astype(jnp.float32)) * (x @ v),
    "widened, and rounded to another dtype": lambda x, w, v: (silu((x @ w).astype(F32)) * (x @ v)).astype(jnp.float16),
    "float32 sums that are read beside their rounding": lambda x, w, v: (
        lambda y: y.astype(x.dtype) + jnp.tanh(y).astype(x.dtype)
    )(silu(wide(x, w)) * wide(x, v)),
    "float32 sums that are returned beside their rounding": lambda x, w, v: (
        lambda y: (y, y.astype(x.dtype))
    )(silu(wide(x, w)) * wide(x, v)),
}  # fmt: skip


@pytest.mark.parametrize("name", HALF)
def test_other_roundings_stay_as_the_program_has_them(name):
    found = find(HALF[name], HX, HW, HV)
    assert not pairs(found)
    assert [r.code for r in found.rejections] in (["dtype"], [])


def test_what_a_named_kernel_does_not_take_is_declined_with_the_way_that_does():
    found = find(feed_forward, X, W, V, D, passes=KERNEL, device="sm_90")
    (told,) = found.rejections
    assert told.code == "implementation"
    assert "operands of float32" in told.sentence
    assert "implementation='concatenated' takes it" in told.sentence
    (told,) = find(feed_forward, HX, HW, HV, HD, passes=KERNEL).rejections
    assert "it needs a CUDA device" in told.sentence


def test_a_global_name_is_the_only_one_asked():
    assert not pairs(fl.find(feed_forward, X, W, V, D, passes=PAIR, implementation="xla", device="cpu"))
    # With the pass an implementation that is named is what is preferred.
    asked = {"passes": "gated_matmul", "implementation": "concatenated", "device": "cpu"}
    assert len(pairs(fl.find(feed_forward, X, W, V, D, **asked))) == 1


@pytest.mark.parametrize("gated", ["cuda", True, 1, "xla"])
def test_the_option_is_checked(gated):
    with pytest.raises(ArgumentError, match="needed 'concatenated', 'kernel' or None"):
        find(feed_forward, X, W, V, D, passes=fl.Strategy(gated_matmul={"prefer": gated}))


def test_a_fused_program_traced_again_finds_nothing_new():
    fused = fl.fuse(feed_forward, passes=PAIR)
    assert not find(fused, X, W, V, D).candidates


def test_inside_a_shard_map_that_checks_what_varies():
    """Columns of the pair on each device, as in a feed-forward that is split over devices."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def fn(x, w, v, d):
        def local(x, w, v, d):
            return jax.lax.psum(feed_forward(x, w, v, d), "d")

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "d"), P(None, "d"), P("d")), out_specs=P())(
            x, w, v, d
        )

    agree(fn, X, W, V, D)


def test_a_users_derivative_rule_keeps_its_pair():
    @jax.custom_jvp
    def block(x, w, v):
        return silu(x @ w) * (x @ v)

    block.defjvp(lambda primals, tangents: (block(*primals), 2 * block(*primals)))
    found = find(lambda x, w, v: block(x, w, v), X, W, V)
    assert not pairs(found)
    assert [r.code for r in found.rejections] == ["custom_rule"]


def test_a_matrix_may_be_its_own_weight():
    (square,) = normal((16, 16))
    agree(lambda x, v: silu(x @ x) * (x @ v), square, W[:, :16])
    agree(lambda x, w: silu(x @ w) * (x @ w.T), square, W[:, :16])


# -- copies on the way --------------------------------------------------------------------------------------------------


def copied(a):
    """As jnp.array does, and libraries whose arrays have names."""
    return jnp.array(a, copy=True)


COPIED = {
    "both products": lambda x, w, v, d: (silu(copied(x @ w)) * copied(x @ v)) @ d,
    "twice, and the activated one": lambda x, w, v, d: (copied(jax.nn.gelu(x @ w)) * copied(copied(x @ v))) @ d,
    "the bare one alone": lambda x, w, v, d: (copied(x @ w) * jax.nn.relu(x @ v)) @ d,
}
NOT_COPIED_PAIRS = {
    "no activation": lambda x, w, v, d: (copied(x @ w) * copied(x @ v)) @ d,
    "of two values": lambda x, w, v, d: (silu(copied(x @ w)) * copied(x[:, ::-1] @ v)) @ d,
    "one is stopped": lambda x, w, v, d: (silu(copied(x @ w)) * copied(jnp.cumsum(x @ v, 0))) @ d,
}


def train_step(fn):
    def step(x, *params):
        loss, grads = jax.value_and_grad(lambda p: (fn(x, *p) ** 2).mean())(params)
        return loss, [p - 0.1 * g for p, g in zip(params, grads, strict=True)]

    return step


def scanned(fn):
    return lambda x, *params: jax.lax.scan(lambda c, one: (c, fn(one, *params)), 0.0, x)[1]


@pytest.mark.parametrize("name", COPIED)
def test_a_pair_is_told_through_copies(name):
    fn = COPIED[name]
    for program in (fn, train_step(fn), scanned(fn), scanned(train_step(fn)), jax.vmap(fn, (0, None, None, None))):
        found = fl.find(program, X, W, V, D)
        assert [s.kind for s in found.structures] == ["glu_pair"], found
        close(jax.jit(fl.fuse(program))(X, W, V, D), jax.jit(program)(X, W, V, D), 4)


@pytest.mark.parametrize("name", NOT_COPIED_PAIRS)
def test_what_is_no_pair_is_none_through_copies(name):
    for program in (NOT_COPIED_PAIRS[name], train_step(NOT_COPIED_PAIRS[name])):
        assert "glu_pair" not in {s.kind for s in fl.find(program, X, W, V, D).structures}


@pytest.mark.parametrize("name", COPIED)
def test_a_pair_with_copies_becomes_one_call_or_says_why_not(name):
    fn = COPIED[name]
    found = find(fn, X, W, V, D)
    assert len(pairs(found)) == 1 or [r.code for r in found.rejections] == ["structure"], found
    assert not any("the search failed" in r.sentence for r in find(train_step(fn), X, W, V, D, passes=BOTH).rejections)
    close(jax.jit(fl.fuse(fn, passes=PAIR))(X, W, V, D), jax.jit(fn)(X, W, V, D), 4)
