"""The layers by hand are what they are said to be: their forms agree, decoding is recomputing, and each near miss is another function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fusionlab.errors import REJECTIONS

from ..checks import close, jit
from . import layer_parts as parts
from . import layer_variants as variants
from .layer_misses import MISSES
from .layer_parts import PROJECTIONS, SMAX, Parts, S, params

FORMS = [*PROJECTIONS.values(), variants.thirds, variants.by_head, variants.first_axis]
# Near misses whose value is the layer's: something more is returned or named, or they round alike.
SAME_VALUE = (
    "norm1_returned",
    "norm2_returned",
    "weights_returned",
    "queries_returned",
    "middle_returned",
    "checkpoint_name",
)


def result(fn, *args):
    return jax.tree.leaves(jit(fn)(*args))[0]


@pytest.mark.parametrize("project", FORMS)
def test_one_product_gives_the_same_heads_as_three(project):
    p, x = params(), parts.inputs()
    close(project(p, x), parts.separate(p, x))


@pytest.mark.parametrize("remember", [parts.write, parts.append])
@pytest.mark.parametrize("how", [Parts(), variants.POST_RELU, variants.LLAMA])
def test_token_after_token_is_all_at_once(remember, how):
    p, x = params(kv_heads=2 if how is variants.LLAMA else 4), parts.inputs()
    want = parts.encode(how, p, x, parts.causal())
    size = SMAX if remember is parts.write else 0
    heads = parts.separate(p, x)[1].shape[2]
    cache = jax.tree.map(lambda a: a * 1e3, parts.caches(size, 1, heads)[0])  # what is not yet written is never seen
    step = jit(lambda x, cache, *at: remember(how, p, x, cache, *at))
    rows = []
    for i in range(S if remember is parts.write else 4):
        y, cache = step(x[:, i : i + 1], cache, *([jnp.int32(i)] if size else []))
        rows.append(y)
    close(jnp.concatenate(rows, 1), want[:, : len(rows)], 4.0)


@pytest.mark.parametrize("name", [n for n, m in MISSES.items() if len(jax.tree.leaves(m.build()[1][1:])) == 1])
def test_a_near_miss_of_an_encoder_is_another_function(name):
    fn, args = MISSES[name].build()
    want = parts.encode(Parts(pre=name != "epsilon_post"), *args)
    difference = float(jnp.abs(result(fn, *args) - want).max())
    assert (difference == 0 or difference < 1e-5) if name in SAME_VALUE else difference > 1e-3


def test_every_near_miss_names_a_rejection():
    assert {m.code for m in MISSES.values()} <= set(REJECTIONS)
    assert all(m.says == m.says.lower() for m in MISSES.values())
