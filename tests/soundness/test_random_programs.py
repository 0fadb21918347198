"""Random programs: every accepted site leaves outputs and gradients as they are; and the judge that says so can say otherwise.

60 programs a run; FUSIONLAB_SEEDS=start:count runs those seeds instead. Many more at once, with a record:
`python -m benchmarks random_programs`.
"""

from __future__ import annotations

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core as jex_core

from fusionlab.graph.rewrite import to_jaxpr

from .generator import Program, program, transformed
from .judge import judge
from .piece import Param

START, COUNT = (int(n) for n in os.environ.get("FUSIONLAB_SEEDS", "0:60").split(":"))
BATCH = 10
SEEDS = [range(s, min(s + BATCH, START + COUNT)) for s in range(START, START + COUNT, BATCH)]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda r: f"seeds {r.start} to {r.stop - 1}")
def test_a_rewritten_random_program_is_the_program(seeds):
    found = [judge(program(seed), compiled=seed % 20 == 0) for seed in seeds]
    assert [(j.seed, j.reason) for j in found if j.verdict == "wrong"] == []
    assert [(j.seed, j.reason) for j in found if j.verdict == "uncomparable"] == []
    jax.clear_caches()


def test_a_program_is_a_function_of_its_seed():
    for seed in (3, 4, 5):
        one, two = program(seed), program(seed)
        assert one.text == two.text
        texts = [str(jax.make_jaxpr(p.fn)(*p.avals)) for p in (one, two)]
        assert texts[0] == texts[1]
        assert program(seed + 100).text != one.text


def test_the_programs_are_of_many_kinds():
    texts = [program(seed).text for seed in range(400)]
    for word in (
        "linear(",
        "attention(",
        "norm(",
        "glue(",
        "scan[",
        "vmap[",
        "remat",
        "cond[",
        "while[",
        "jit[",
        "twice",
        "bfloat16",
    ):
        assert any(word in text for text in texts), word


# -- the judge --------------------------------------------------------------------------------------------------------


def layer(*outer: str, act: Any = jax.nn.relu) -> Program:
    """act(x @ w + b), plainly."""
    params = (Param((5, 4), "float32", "data"), Param((4, 6), "float32"), Param((6,), "float32", "bias"))
    return Program(0, lambda x, w, b: [act(x @ w + b)], params, "a layer", "".join(outer), 1e4, True)


def with_another(fn: Any) -> Any:
    """A rewrite that puts `fn` in the place of every site."""

    def rewrite(found: Any) -> Any:
        sites = []
        for c in found.candidates:
            object.__setattr__(c.site, "fn", fn(c.site.fn))
            sites.append(c.site)
        return jex_core.jaxpr_as_fun(to_jaxpr(found.graph, sites))

    return rewrite


def half_in(dtype: Any) -> Any:
    return lambda f: lambda *a: f(*(x.astype(dtype).astype(x.dtype) for x in a))


LIES = {
    "a value off by 1e-4": (lambda f: lambda *a: f(*a) * 1.0001, "output 0 differs"),
    "a constant off by 1e-3": (lambda f: lambda *a: f(*a) + 1e-3, "output 0 differs"),
    "a gradient stopped": (lambda f: lambda *a: jax.lax.stop_gradient(f(*a)), "gradient of argument 0 differs"),
    "no gradient at ties": (
        lambda f: lambda *a: (lambda y: jnp.where(y == 0, jax.lax.stop_gradient(y), y))(f(*a)),
        "gradient of argument 0 differs by .* at zeros inputs",
    ),
    "a cap nobody reaches": (lambda f: lambda *a: jnp.minimum(f(*a), 100.0), "differs by .* at large inputs"),
    "operands rounded": (half_in(jnp.bfloat16), "from float64 rounded"),
    "another shape": (lambda f: lambda *a: f(*a)[::-1], "output 0 differs"),
}


@pytest.mark.parametrize("name", LIES)
def test_the_judge_catches_a_rewrite_that_is_wrong(name):
    lie, reason = LIES[name]
    act = (lambda h: jnp.maximum(h, 0)) if "ties" in name else jax.nn.relu
    found = judge(layer(act=act), rewrite=with_another(lie))
    assert (found.verdict, found.candidates) == ("wrong", {"gemm_epilogue": 1})

    assert re.search(reason, found.reason), found.reason


@pytest.mark.parametrize("outer", ["", "vmap", "scan", "remat", "jit", "vmap of weights"])
def test_the_judge_believes_a_rewrite_that_is_right(outer):
    found = judge(layer(outer), compiled=outer == "")
    assert (found.verdict, found.reason, found.shaken) == ("same", "", 0)


def test_a_transformation_from_outside_is_the_one_named():
    p = layer("vmap")
    shapes = [o.shape for o in jax.eval_shape(transformed(p.fn, p.outer), *p.avals)]
    assert shapes == [(2, 5, 6)]
