"""Random programs: every accepted site leaves outputs and gradients as they are; and the judge that says so can say otherwise.

60 programs a run; FUSIONLAB_SEEDS=start:count runs those seeds instead. Many more at once, with a record:
`python -m benchmarks random_programs`.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core as jex_core

from fusionlab.graph.rewriting.rewrite import to_jaxpr

from .fixed_programs import GELUS_BY_SIGMOID, unbounded
from .generator import Program, program, transformed
from .judge import judge
from .pieces.piece import Param

START, COUNT = (int(n) for n in os.environ.get("FUSIONLAB_SEEDS", "0:60").split(":"))
BATCH = 10
SEEDS = [range(s, min(s + BATCH, START + COUNT)) for s in range(START, START + COUNT, BATCH)]
pytestmark = [pytest.mark.whole] * ("FUSIONLAB_SEEDS" in os.environ)  # seeds that are asked for all run


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda r: f"seeds {r.start} to {r.stop - 1}")
def test_a_rewritten_random_program_is_the_program(seeds):
    found = [judge(program(seed), compiled=seed % 20 == 0) for seed in seeds]
    assert [(j.seed, j.reason) for j in found if j.verdict == "wrong"] == []
    assert [(j.seed, j.reason) for j in found if j.verdict == "uncomparable"] == []
    jax.clear_caches()


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda r: f"seeds {r.start} to {r.stop - 1}")
def test_a_rewritten_random_program_of_64_bits_is_the_program(seeds):
    with jax.enable_x64(True):
        found = [judge(program(seed)) for seed in seeds]
    assert [(j.seed, j.verdict, j.reason) for j in found if j.verdict not in ("same", "no site")] == []
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


def layer(*outer: str, act: Any = jax.nn.relu, dtype: str = "float32") -> Program:
    """act(x @ w + b), plainly."""
    params = (Param((5, 4), dtype, "data"), Param((4, 6), dtype), Param((6,), dtype, "bias"))
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
    "rows of one number": (
        lambda f: lambda *a: jnp.where(jnp.all(a[0] == a[0][:, :1], 1, keepdims=True), 0.5, f(*a)),
        "differs by .* at (zeros|constant) inputs",
    ),
    "an overflow": (lambda f: lambda *a: f(*a) * 1e6 / 1e6, "infinite or NaN at edge inputs"),
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


def test_the_judge_looks_at_the_rest_where_the_original_overflows_in_part():
    p = layer(dtype="float16", act=lambda h: jnp.exp(12 * jax.nn.relu(h)))
    half = jax.jit(p.fn)(*(jnp.asarray(a, "float16") for a in p.arguments("normal")))[0]
    assert 0 < jnp.isinf(half).sum() < half.size
    assert judge(p).verdict == "same"
    found = judge(p, rewrite=with_another(half_in(jnp.bfloat16)))
    assert found.verdict == "wrong"
    assert "from float64 rounded" in found.reason


def fused_but(wrong: Any) -> Any:
    """A rewrite that calls `wrong(found, the fused program, *arguments)`."""
    return lambda found: functools.partial(wrong, found, jex_core.jaxpr_as_fun(found.rewritten()))


def twice_the_gradient(part: int) -> Any:
    """Of the weights [part], at large inputs alone."""

    def wrong(_: Any, fused: Any, x: Any, w: Any, c: Any) -> Any:
        far = (jnp.arange(2) == part)[:, None, None] & (jnp.max(jnp.abs(x)) > 2.9)
        return fused(x, jnp.where(far, 2 * w - jax.lax.stop_gradient(w), w), c)

    return wrong


def without_notes(found: Any, fused: Any, *args: Any) -> Any:
    for c in found.candidates:
        object.__setattr__(c, "notes", ())
    return fused(*args)


UNBOUNDED_LIES = {
    "where the original overflows": (twice_the_gradient(0), "gradient of argument 1"),
    "where the original does not": (twice_the_gradient(1), "gradient of argument 1"),
    "a value": (
        lambda _, fused, x, *ps: [y * (1 + (jnp.max(jnp.abs(x)) > 2.9)) for y in fused(x, *ps)],
        "output 0",
    ),
    "no note": (without_notes, "gradient of argument 0"),
}


def test_a_gradient_that_only_the_original_loses_to_overflow_is_no_difference():
    found = judge(unbounded())
    assert (found.verdict, found.candidates, found.overflows) == ("same", {"dot_product_attention": 1}, 3)


def test_a_number_in_the_place_of_a_nan_is_a_difference_unless_a_note_says_so():
    p = layer(act=lambda h: jax.nn.relu(h) / jnp.where(h > 0, 1.0, 0.0))
    assert judge(p).verdict == "same"
    found = judge(p, rewrite=fused_but(lambda _, fused, *args: [jnp.nan_to_num(y, nan=0.0) for y in fused(*args)]))
    assert found.verdict == "wrong"


@pytest.mark.parametrize("name", UNBOUNDED_LIES)
def test_every_other_difference_is_one_there_too(name):
    wrong, where = UNBOUNDED_LIES[name]
    found = judge(unbounded(), rewrite=fused_but(wrong))
    assert found.verdict == "wrong"
    assert re.search(f"{where} differs by .* at large inputs", found.reason), found.reason


@pytest.mark.parametrize("outer", ["", "vmap", "scan", "remat", "jit", "vmap of weights"])
def test_the_judge_believes_a_rewrite_that_is_right(outer):
    found = judge(layer(outer), compiled=outer == "")
    assert (found.verdict, found.reason, found.shaken, found.overflows) == ("same", "", 0, 0)


def test_a_transformation_from_outside_is_the_one_named():
    p = layer("vmap")
    shapes = [o.shape for o in jax.eval_shape(transformed(p.fn, p.outer), *p.avals)]
    assert shapes == [(2, 5, 6)]


@pytest.mark.parametrize("name", GELUS_BY_SIGMOID)
def test_a_gelu_by_sigmoid_in_bfloat16_is_as_precise_by_tanh(name):
    """Whose derivative is taken by a sigmoid, too: 1 + tanh cancels in a tail."""
    assert judge(GELUS_BY_SIGMOID[name]).verdict == "same"
