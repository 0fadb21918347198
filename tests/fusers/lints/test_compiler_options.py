"""Options of the compiler are lints that are tried and never listed, for programs that have something for them to change."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.device import Device
from fusionlab.evidence.advice.tried import TriedLint, try_lints
from fusionlab.fusers.lints.compiler_options import LEAST_BY_OPTION, OPTIONS
from fusionlab.fusers.lints.rules import every_lint, lints_of, rule_names
from fusionlab.graph.program.trace import bind_users
from fusionlab.progress import Stages

PRODUCTS, STACKS, GRAPHS, NO_GRAPHS = (option.name for option in OPTIONS)
H200 = Device.of("h200")


def of(fn, *shapes, device=H200):
    graph = fl.trace(fn, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))
    return {lint.rule: lint for lint in every_lint(graph, device) if lint.options}


def stacked(w, x):
    return jax.lax.scan(lambda x, w: (x @ w, x), x, w)


def test_each_option_is_for_programs_that_it_changes_something_for():
    assert set(of(lambda x, w: x @ w, (64, 64), (64, 64))) == {PRODUCTS, GRAPHS}
    assert set(of(stacked, (4, 64, 64), (64, 64))) == {PRODUCTS, STACKS, GRAPHS}
    assert set(of(lambda w, x: stacked(w, x)[0] * 1, (4, 64, 64), (64, 64))) == {PRODUCTS, STACKS, GRAPHS}
    assert set(of(lambda w, x: jax.lax.scan(lambda x, w: (x * w, None), x, w)[0], (4, 64), (64,))) == {GRAPHS}
    assert set(of(lambda x, w: x @ w, (32768, 8192), (8192, 32768))) == {PRODUCTS, NO_GRAPHS}
    assert set(of(lambda x: jnp.tanh(jnp.sin(x) * jnp.exp(x)).sum(), (4096, 4096))) == {GRAPHS}
    assert not of(stacked, (4, 64, 64), (64, 64), device=Device.of("cpu"))


def test_products_in_fused_ops_count():
    fused = fl.fuse(lambda x, w: jnp.tanh(x @ w), passes=["gemm_epilogue"])
    graph = fl.trace(fused, *(jax.ShapeDtypeStruct((256, 256), jnp.float32),) * 2)
    assert not any(n.primitive == "dot_general" for b in graph.blocks() for n in b.nodes)
    lints = {lint.rule: lint for lint in every_lint(graph, H200)}
    (node,) = lints[PRODUCTS].node_ids
    assert graph.node_by_id[node].primitive == "gemm_epilogue"


def test_an_option_is_neither_listed_nor_an_edit_of_the_program():
    graph = fl.trace(stacked, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 64, 64), (64, 64))))
    assert not any(lint.options for lint in lints_of(graph, H200))
    with pytest.raises(fl.errors.UnknownNameError, match=PRODUCTS):
        rule_names(PRODUCTS)


def test_the_edit_is_what_jit_takes():
    lint = of(stacked, (4, 64, 64), (64, 64))[PRODUCTS]
    assert lint.id == f"{PRODUCTS}@#1"
    assert lint.edit == "jax.jit(..., compiler_options={'xla_gpu_enable_triton_gemm': False})"
    assert lint.options == {PRODUCTS: False}
    assert lint.share is None
    assert lint.least == LEAST_BY_OPTION
    assert lint.to_dict()["share"] is None
    jax.jit(lambda x: x + 1, compiler_options=lint.options)(1.0)


def test_options_are_tried_and_one_that_the_compiler_does_not_know_is_left_out():
    args = jnp.ones((4, 64, 64)), jnp.ones((64, 64))
    graph = fl.trace(stacked, *args)
    known = every_lint(graph, H200)
    unknown = dataclasses.replace(known[-1], options={"xla_gpu_enable_nonsense": True})
    call = bind_users(jax.jit(stacked, compiler_options={STACKS: False}), args, {})
    found = try_lints(graph, call, (unknown, *known), 2, 1.0, Stages())
    assert [t.lint.id for t in found.tried] == [lint.id for lint in known]
    assert not any(t.differing for t in found.tried)
    assert "(an option of the compiler has to save more than 1% of the time)" in str(found)
    text = str(dataclasses.replace(found.tried[0], differing=("out",)))
    assert "no advice, out differ" in text


def test_options_that_help_are_tried_together(monkeypatch):
    args = jnp.ones((4, 64, 64)), jnp.ones((64, 64))
    graph = fl.trace(stacked, *args)
    known = every_lint(graph, H200)
    monkeypatch.setattr(
        TriedLint, "helps", property(lambda self: self.lint.rule in (PRODUCTS, GRAPHS, "compiler_options"))
    )
    found = try_lints(graph, bind_users(stacked, args, {}), known, 2, 1.0, Stages())
    *single, both = found.tried
    assert [t.lint.id for t in single] == [lint.id for lint in known]
    assert both.lint.options == {PRODUCTS: False, GRAPHS: 1}
    assert str(both).startswith("compiler_options@#1 saves ")
    assert both.lint.edit == f"jax.jit(..., compiler_options={both.lint.options})"
    monkeypatch.setattr(TriedLint, "helps", property(lambda self: self.lint.rule == PRODUCTS))
    assert len(try_lints(graph, bind_users(stacked, args, {}), known, 2, 1.0, Stages()).tried) == len(known)
