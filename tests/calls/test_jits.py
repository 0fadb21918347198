"""What a jit says comes along: donation, options of the compiler, placement, fixed leaves; and the one switch that turns fusing off."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import fusionlab as fl
from fusionlab.errors import ArgumentError, ExportWarning
from fusionlab.graph.calls.wrappers import jit_of
from fusionlab.verbs import fused as fused_module

from .cells import activated, data, layer, params, repeated, update

QUICK = {"xla_backend_optimization_level": 0}


@pytest.fixture
def searches(monkeypatch):
    made = []
    original = fused_module.find_in
    monkeypatch.setattr(fused_module, "find_in", lambda *a, **k: made.append(1) or original(*a, **k))
    return made


# -- jax.jit ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"donate_argnums": 0},
        {"donate_argnames": "p"},
        {"static_argnums": (2, 3)},
        {"static_argnames": ("times", "act")},
        {"static_argnums": -1, "static_argnames": "times"},
        {"compiler_options": QUICK},
        {"keep_unused": True},
        {"inline": True},
        {"in_shardings": SingleDeviceSharding(jax.devices("cpu")[0])},
        {"out_shardings": SingleDeviceSharding(jax.devices("cpu")[0])},
    ],
    ids=lambda options: " and ".join(options),
)
def test_a_jit_is_made_again_as_it_was(options):
    def fn(p, x, times=1, act="relu"):
        return repeated(p, x, times, act)

    first = jax.jit(fn, **options)
    told = jit_of(first)
    again = told.again(told.fn)
    for name, value in first._jit_info._asdict().items():
        assert getattr(again._jit_info, name) == value, name
    assert told.fn is fn


def test_what_is_no_jit_has_none():
    assert jit_of(layer) is None
    assert jit_of(eqx.filter_jit(layer)).kind == "filter_jit"


def test_a_comparison_compiles_with_the_options_of_the_jit_and_donates_what_it_donates():
    original = jax.jit(update, donate_argnums=0, compiler_options=QUICK)
    told = fl.compare(original, fl.fuse(original), params(), data(), grad=False, timing=False)
    assert told.memory.before.alias == told.memory.after.alias > 0
    assert not any("donates" in note for note in told.notes)
    told = fl.compare(original, fl.fuse(update), params(), data(), grad=False, timing=False, numerics=False)
    assert (
        "the original donates argument 0, the fused version donates nothing; both were run as the original is called"
        in told.notes
    )


def test_the_plain_jit_and_the_check_touch_no_donated_argument_twice():
    fused = fl.fuse(jax.jit(update, donate_argnums=0), check=True)
    given = params()
    want = update(params(), data())
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), fused(given, data()), want)
    assert given["w"].is_deleted()


# -- leaves that are no arrays ------------------------------------------------------------------------------------------


def test_a_repeated_call_with_fixed_leaves_never_searches_again(searches):
    fused = fl.fuse(activated)
    for _ in range(3):
        assert fused(params(), data(), jax.nn.relu, "a")[1] == "a"
    assert len(searches) == 1
    fused(params(), data(), jnp.tanh, "a")
    assert fused(params(), data(), jnp.tanh, "b")[1] == "b"
    assert len(searches) == 3


def test_a_repeated_call_of_a_filtered_model_never_searches_again(searches):
    model = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
    fused = fl.fuse(eqx.filter_jit(lambda model, x: jax.vmap(model)(x)))
    for i in range(3):
        fused(jax.tree.map(lambda a: a * i if eqx.is_array(a) else a, model), data())  # noqa: B023 - called at once
    assert len(searches) == 1


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, -0.0)])
def test_equal_leaves_of_another_kind_are_another_program(one, other):
    def fn(x, how, note):
        return x * (2 if how is True else 3 if isinstance(how, float) else 4)

    fused = fl.fuse(fn)
    for how, times in ((one, 4), (other, 2 if other is True else 3)):
        np.testing.assert_allclose(fused(data(), how, "x"), data() * times, rtol=1e-6)


def test_a_leaf_that_cannot_be_told_apart_is_named_by_its_path():
    with pytest.raises(
        ArgumentError, match=r"options\['buffers'\]\[1\]: got bytearray\(b'\\x00'\) \(bytearray\), which is neither"
    ):
        fl.fuse(lambda x, options: x)(data(), options={"buffers": [1, bytearray(1)]})


def test_an_object_that_is_no_pytree_is_fixed():
    @dataclasses.dataclass(frozen=True)
    class Config:
        act: str

    def fn(config, p, x):
        return getattr(jax.nn, config.act)(x @ p["w"] + p["b"])

    for verb in (lambda *a: fl.find(fn, *a), fl.fuse(fn).findings):
        assert verb(Config("gelu"), params(), data()).counts()["gemm_epilogue"] == 1
    np.testing.assert_allclose(
        fl.fuse(fn)(Config("tanh"), params(), data()), fn(Config("tanh"), params(), data()), rtol=1e-5
    )
    told = fl.compare(fn, fl.fuse(fn), Config("relu"), params(), data(), grad=True, timing=False)
    assert not told.numerics.regressions


def test_the_gradient_of_equinox_is_taken_of_a_fused_loss():
    model = eqx.nn.MLP(8, 8, 16, 2, activation=jax.nn.gelu, key=jax.random.key(0))

    def loss(model, x):
        return jnp.square(jax.vmap(model)(x)).sum()

    want, got = (eqx.filter_grad(f)(model, data()) for f in (loss, fl.fuse(loss)))
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5) if eqx.is_array(w) else None, got, want
    )


# -- symbolic sizes -----------------------------------------------------------------------------------------------------


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * 0.25)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, "float32")


def programs():
    b, t = jax.export.symbolic_shape("b, t")
    p = jax.tree.map(lambda a: shape(*a.shape), params())
    yield "a layer", layer, (p, shape(b, 8)), "gemm_epilogue"
    yield "a layer of two", layer, (p, shape(b, t, 8)), "gemm_epilogue"
    yield "a twice as long one", layer, (p, shape(2 * b + 1, 8)), "gemm_epilogue"
    yield "a norm", norm, (shape(b, 16),), "layer_norm"
    yield "attention", attention, (shape(b, 16, 2, 8),) * 3, "dot_product_attention"
    yield "attention of any length", attention, (shape(b, t, 2, 8),) * 3, "dot_product_attention"
    yield "the mean over rows", lambda p, x: layer(p, x).sum(0) / x.shape[0], (p, shape(b, 8)), "gemm_epilogue"
    yield (
        "a scan",
        lambda p, x: jax.lax.scan(lambda c, _: (layer(p, c), None), x, None, 3)[0],
        (p, shape(b, 8)),
        "gemm_epilogue",
    )
    yield "a step", update, (p, shape(b, 8)), "gemm_epilogue"


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "fn", "args", "declined"), [*programs()], ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_program_of_symbolic_sizes_is_exported_and_declines_its_sites(name, fn, args, declined):
    found = fl.find(fn, *args)
    assert not found.candidates
    assert {r.code for r in found.rejections if r.pass_name == declined} == {"symbolic"}, found
    assert all(r.source is not None and "(b" in r.sentence for r in found.rejections if r.code == "symbolic")
    str(found), found.report(), found.to_dict()
    exported = jax.export.export(jax.jit(fl.fuse(fn)))(*args)
    given = [jax.tree.map(lambda s: numbers_for(s.shape), a) for a in args]
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), exported.call(*given), jax.jit(fn)(*given)
    )


def numbers_for(sizes):
    sizes = [n if isinstance(n, int) else {"b": 3, "t": 5, "2*b + 1": 7}[str(n)] for n in sizes]
    return jnp.asarray(np.random.default_rng(len(sizes)).normal(size=sizes), jnp.float32)


def test_an_exported_fused_function_needs_jax_alone(tmp_path):
    fused = fl.fuse(layer)
    exported = jax.export.export(jax.jit(fused))(params(), data())
    (tmp_path / "layer.bin").write_bytes(exported.serialize())
    np.savez(tmp_path / "args.npz", x=data(), **params())
    program = f"""
import sys, numpy as np, jax
held = np.load({str(tmp_path / "args.npz")!r})
with open({str(tmp_path / "layer.bin")!r}, "rb") as file:
    exported = jax.export.deserialize(bytearray(file.read()))
np.save({str(tmp_path / "out.npy")!r}, exported.call({{"w": held["w"], "b": held["b"]}}, held["x"]))
assert not any(name.startswith("fusionlab.") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), fused(params(), data()), rtol=1e-6)


def test_what_is_exported_for_a_card_from_a_host_without_one_says_that_it_has_no_kernels():
    with pytest.warns(ExportWarning, match="contains plain operations in place of FusionLab's kernels"):
        exported = jax.export.export(jax.jit(fl.fuse(layer)), platforms=["cuda"])(params(), data())
    assert not [line for line in exported.mlir_module().splitlines() if "custom_call" in line]


# -- the switch ---------------------------------------------------------------------------------------------------------


def test_one_variable_makes_fused_functions_the_originals(monkeypatch, searches):
    before = fl.fuse(layer)
    before(params(), data())
    monkeypatch.setenv(fused_module.DISABLE, "1")
    fused = fl.fuse(layer)
    np.testing.assert_array_equal(fused(params(), data()), jax.jit(layer)(params(), data()))
    assert len(searches) == 1
    assert "gemm_epilogue" not in str(jax.make_jaxpr(fused)(params(), data()))
    assert "gemm_epilogue" in str(jax.make_jaxpr(before)(params(), data())), "traced before it was set"
    assert "off by FUSIONLAB_DISABLE" in repr(fused)
    assert "FUSIONLAB_DISABLE is set: every fused function runs as the original" in str(fl.doctor())
    monkeypatch.setenv(fused_module.DISABLE, "0")
    fl.fuse(layer)(params(), data())
    assert len(searches) == 2
    assert "ready    fusing" in str(fl.doctor())


def test_a_filtered_jit_of_a_module_that_is_a_transformation_is_fused_without_a_warning():
    """Equinox warns of functions of JAX's that are made around a module, and the fused one is not."""
    model = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    step = eqx.filter_jit(eqx.filter_value_and_grad(lambda model, x: jax.nn.relu(model(x)).sum()))
    with warnings.catch_warnings(action="error"):
        out = fl.fuse(step)(model, jnp.ones(3))
    assert jax.tree.structure(out) == jax.tree.structure(step(model, jnp.ones(3)))
