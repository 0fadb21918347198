"""A fault of FusionLab's own costs the site, not the call: wherever it is planted, `find` and `fuse` go on and tell it."""

import re

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError, OutOfMemoryError, UnknownNameError
from fusionlab.fusers import find
from fusionlab.fusers.engine import pairing, proposing
from fusionlab.fusers.passes.attention import dot_product_attention, proposals
from fusionlab.fusers.passes.lerp import lerp
from fusionlab.fusers.passes.linear import epilogues, gemm_epilogue
from fusionlab.fusers.passes.norm import layer_norm
from fusionlab.fusers.passes.norm import surroundings as norms
from fusionlab.fusers.passes.transformer import multi_transformer
from fusionlab.fusers.report import findings as findings_module
from fusionlab.graph.canonical import blocks as views
from fusionlab.graph.canonical import view as canonical
from fusionlab.graph.certify import activations as fingerprint
from fusionlab.graph.certify import certify
from fusionlab.graph.program import boundary
from fusionlab.kernels.op.op import Op


def layer(x, p):
    h = x + attend(x @ p["q"], x @ p["k"], x @ p["v"]) @ p["o"]
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5) * p["g"]
    return h + 0.3 * (jax.nn.gelu(x @ p["f"] + p["b"]) - h)


def attend(q, k, v):
    return jax.nn.softmax(q @ k.T / 4, -1) @ v


X = jax.random.normal(jax.random.key(0), (8, 16))
P = {n: jax.random.normal(jax.random.key(i), (16, 16)) / 4 for i, n in enumerate("qkvof")} | {
    n: jnp.ones(16) for n in "gb"
}


def loss(p, x):
    return jnp.sum(layer(x, p) ** 2)


def step(p, x):
    return jax.value_and_grad(loss)(p, x)


def scanned(x, p):
    return jax.lax.scan(lambda h, _: (layer(h, p), None), x, None, length=3)[0]


PROGRAMS = {"forward": (layer, (X, P)), "a train step": (step, (P, X)), "a scan": (scanned, (X, P))}

# What fails -> where: something that every search of the programs above goes through, or of those named.
PLACES = {
    "interpretation": (views, "CanonicalView"),
    "interpretation of a norm": (norms.Surroundings, "__init__"),
    "interpretation of blends": (lerp, "blends"),
    "interpretation of products": (gemm_epilogue, "_ProductSite"),
    "the match of an attention": (dot_product_attention, "match"),
    "activations": (epilogues, "recognise"),
    "cones": (epilogues, "cone"),
    "certification": (certify, "_prove"),
    "tracing what would replace it": (proposing, "make_jaxpr"),
    "signatures": (proposing, "region_signature"),
    "the plan of an attention": (proposals, "attention_plan"),
    "the plan of a norm": (layer_norm._NormSite, "plan"),
    "choosing a backend": (Op, "backends"),
    "residuals": (Op, "residuals"),
    "overlaps": (find, "settle"),
    "shares": (find, "with_shares_left"),
    "pairs": (pairing, "find_backward"),
    "pairs of a block": (pairing, "in_order"),
    "joined views": (pairing, "joined_views"),
    "groups of linear layers": (gemm_epilogue, "grouped"),
    "structures": (findings_module, "structures_of"),
}


def broken(*args, **kwargs):
    raise TypeError("planted, of\nseveral lines")


def faults(found):
    return [r for r in found.rejections if r.failed]


@pytest.fixture
def quiet(monkeypatch):
    """As a user has it: a fault is a rejection."""
    monkeypatch.delenv(boundary.VARIABLE)


@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_fails_find_goes_on(quiet, monkeypatch, place):
    told = []
    for fn, args in PROGRAMS.values():
        with monkeypatch.context() as patch:
            patch.setattr(*PLACES[place], broken)
            found = fl.find(fn, *args)
            assert found.report()
            told += faults(found)
    for one in told:
        assert one.code == "uncertified"
        assert "TypeError: planted, of. several lines." in one.sentence
        assert one.origin in one.sentence
        assert "test_boundary.py" in one.origin
        assert one.node_ids
        assert set(one.node_ids) <= one.site_ids
        assert one.to_dict()["origin"] == one.origin
        assert one.edit is None
    assert told or place in ("structures",)


def test_without_the_variable_of_the_tests_a_fault_comes_through(monkeypatch):
    monkeypatch.setattr(certify, "_prove", broken)
    with pytest.raises(TypeError, match="planted"):
        fl.find(layer, X, P)
    monkeypatch.setenv(boundary.VARIABLE, "0")
    assert faults(fl.find(layer, X, P))


def test_the_fused_function_is_the_original_where_all_of_it_fails(quiet, monkeypatch):
    monkeypatch.setattr(certify, "_prove", broken)
    assert jnp.array_equal(fl.fuse(layer)(X, P), jax.jit(layer)(X, P))


def test_only_what_failed_is_lost(quiet, monkeypatch):
    sound = fl.find(layer, X, P)
    monkeypatch.setattr(layer_norm._NormSite, "plan", broken)
    found = fl.find(layer, X, P)
    assert {r.pass_name for r in faults(found)} == {"layer_norm"}
    assert {c.id for c in found.candidates} == {c.id for c in sound.candidates if c.pass_name != "layer_norm"}


def test_behind_an_unknown_activation_the_linear_part_stays(quiet, monkeypatch):
    monkeypatch.setattr(fingerprint, "profile", broken)
    monkeypatch.setattr(fingerprint, "_known_signature", lambda *known: None)
    found = fl.find(lambda x, p: jax.nn.gelu(x @ p["f"] + p["b"]), X, P, passes="gemm_epilogue")
    assert [c.formula for c in found.candidates] == ["x @ w + b"]
    (told,) = faults(found)
    assert told.edit is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError, OutOfMemoryError])
def test_an_interruption_and_exhausted_memory_come_through(quiet, monkeypatch, kind):
    def stop(*args):
        raise kind("stop")

    monkeypatch.setattr(certify, "_prove", stop)
    with pytest.raises(kind, match="stop"):
        fl.find(layer, X, P)


def test_a_device_without_memory_comes_through(quiet, monkeypatch):
    def stop(message):
        def fail(*args):
            raise jax.errors.JaxRuntimeError(message)

        return fail

    monkeypatch.setattr(certify, "_prove", stop("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        fl.find(layer, X, P)
    monkeypatch.setattr(certify, "_prove", stop("INTERNAL: no such thing"))
    assert faults(fl.find(layer, X, P))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"gemm_epilogue": {"grouping": "no"}}, UnknownNameError),
        ({"matmul_schedule": {"library": 0}}, ArgumentError),
        ({"gated_matmul": {"prefer": "no"}}, ArgumentError),
    ],
)
def test_a_wrong_option_is_the_callers_error(quiet, options, kind):
    with pytest.raises(kind):
        fl.find(layer, X, P, passes=fl.Strategy(**options))


def test_a_reading_that_fails_is_told_once(quiet, monkeypatch):
    passes = [p.name for p in multi_transformer.PASSES.values()]
    fn, args = multi_transformer.PASSES[60].sample()
    monkeypatch.setattr(multi_transformer.LayerReader, "read", broken)
    (told,) = faults(fl.find(fn, *args, passes=passes))
    assert len(told.site_ids) > 1


def test_what_a_users_own_pass_raises_is_told_with_the_users_line(quiet):
    class Mine:
        name, op, formula, needs, options = "mine", "lerp", "", "", {"deep": (1, "how deep it looks", (1, 2))}

        def sample(self):
            return layer, (X, P)

        def search(self, search):
            yield from search.certifier.nothing_of_this_name

    fl.register(Mine())
    try:
        found = fl.find(layer, X, P)
        assert "option deep=1: how deep it looks" in str(fl.passes())
        assert "mine_grad" in fl.find(layer, X, P, passes={"mine": {"deep": 2.0}}).gradients
        with pytest.raises(ArgumentError, match="mine: deep is 3, needed 1 or 2"):
            fl.find(layer, X, P, passes={"mine": {"deep": 3}})
    finally:
        fl.unregister("mine")
    (told,) = faults(found)
    assert told.pass_name == "mine"
    assert re.fullmatch(r"test_boundary.py:\d+ in search", told.origin)
    assert "nothing_of_this_name" in told.sentence
    assert found.candidates


def test_a_block_that_cannot_be_read_leaves_the_others(quiet, monkeypatch):
    real = canonical.CanonicalView.__init__

    def fail_inside(self, block, *args, **kwargs):
        if block.path:
            raise IndexError("inside")
        real(self, block, *args, **kwargs)

    def both(x, p):
        return jax.nn.gelu(scanned(x, p) @ p["f"] + p["b"])

    monkeypatch.setattr(canonical.CanonicalView, "__init__", fail_inside)
    found = fl.find(both, X, P, passes=["gemm_epilogue", "layer_norm"])
    assert len(found.candidates) == 1
    assert [r.pass_name for r in faults(found)] == ["gemm_epilogue", "layer_norm"]
    assert all("the body" in r.sentence and "was not searched" in r.sentence for r in faults(found))
