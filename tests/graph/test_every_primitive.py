"""The search takes any program: one of every primitive that `jax.lax` names, alone, differentiated, and with sites around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.graph.program.trace import trace

from .every_primitive import EXCLUDED, NOT_DIFFERENTIABLE, Program, primitive_names, programs

PROGRAMS = tuple(programs())
BY_NAME = {program.name: program for program in PROGRAMS}
every = pytest.mark.parametrize("program", PROGRAMS, ids=repr)


def dtype(x: Any) -> Any:
    return getattr(x, "dtype", None)


def gradient(program: Program) -> Callable[..., Any]:
    """The gradient of the sum of a program's inexact results with respect to its float32 arguments."""

    def total(*args: Any) -> Any:
        leaves = [x for x in jax.tree.leaves(program.fn(*args)) if dtype(x) is not None]
        return sum((jnp.sum(jnp.real(x)) for x in leaves if jnp.issubdtype(x.dtype, np.inexact)), jnp.zeros(()))

    return jax.grad(total, argnums=tuple(i for i, a in enumerate(program.args) if dtype(a) == np.float32))


def amid_sites(program: Program) -> Program:
    """The program between linear layers: each float32 argument of rank 2 or more is the result of one, and each float32 array
    that comes out, of rank 1 or more, goes through another one with a relu.
    """
    generator = np.random.default_rng(0)

    def layer_for(a: Any) -> Any:
        """Input, weight and bias of a linear layer that gives what has the shape of `a`; None where there is none."""
        if dtype(a) != np.float32 or a.ndim < 2:
            return None
        n = int(np.prod(a.shape[1:]))
        return tuple(generator.uniform(0.1, 0.3, s).astype(np.float32) for s in ((a.shape[0], 5), (5, n), (n,)))

    def after(out: Any) -> Any:
        if dtype(out) != np.float32 or not out.ndim:
            return out
        w = np.full((out.shape[-1], 3), 0.1, np.float32)
        return jax.nn.relu(out.reshape(-1, out.shape[-1]) @ w + np.arange(3, dtype=np.float32))

    def fn(layers: Any, *args: Any) -> Any:
        given = [
            a if layer is None else (layer[0] @ layer[1] + layer[2]).reshape(a.shape)
            for layer, a in zip(layers, args, strict=True)
        ]
        return jax.tree.map(after, program.fn(*given))

    return Program(program.name, fn, ([layer_for(a) for a in program.args], *program.args))


def test_the_programs_use_every_primitive_of_the_list():
    used = {node.primitive for program in PROGRAMS for node in trace(program.fn, *program.args).nodes()}
    assert not primitive_names() - used
    assert not used & EXCLUDED.keys(), "not out of reach after all"
    assert len(primitive_names()) >= 165


def test_there_are_at_least_a_hundred_programs_with_names_of_their_own():
    assert len(BY_NAME) == len(PROGRAMS) >= 100
    assert not NOT_DIFFERENTIABLE - BY_NAME.keys()


@pytest.mark.parametrize("name", sorted(NOT_DIFFERENTIABLE))
def test_what_is_not_differentiated_cannot_be(name):
    with pytest.raises((NotImplementedError, ValueError, TypeError, AssertionError)):
        jax.make_jaxpr(gradient(BY_NAME[name]))(*BY_NAME[name].args)


@every
def test_the_search_does_not_raise(program):
    assert "gemm_epilogue: " in str(fl.find(program.fn, *program.args))
    if program.differentiable:
        fl.find(gradient(program), *program.args)


@every
def test_the_search_does_not_raise_where_sites_are_around(program):
    amid = amid_sites(program)
    found = fl.find(amid.fn, *amid.args)
    assert list(map(str, found.rewritten().out_avals)) == [str(a.aval) for a in found.graph.top.outputs]
    results = jax.tree.leaves(jax.eval_shape(program.fn, *program.args))
    layers = sum(dtype(x) == np.float32 and x.ndim > 0 for x in results)
    assert found.counts()["gemm_epilogue"] >= layers, found


# Programs whose neighbours are fused, and which run in no time.
FUSED = "tanh reduce_max sort scatter_add scan cond remat triangular_solve psum"


@pytest.mark.parametrize("name", FUSED.split())
def test_what_is_fused_around_a_primitive_computes_the_same(name):
    amid = amid_sites(BY_NAME[name])
    fused = fl.fuse(amid.fn)
    assert fused.findings(*amid.args).candidates
    for got, want in zip(jax.tree.leaves(fused(*amid.args)), jax.tree.leaves(amid.fn(*amid.args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
