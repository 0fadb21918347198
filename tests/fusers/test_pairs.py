"""Forward sites of a program that is differentiated already, with their backward passes."""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp

import fusionlab as fl
from fusionlab.models import transformer

from .checks import normal

X, W, B = normal((6, 8), (8, 8), (8,))


def step(layers):
    params = transformer.init(jax.random.key(0), layers, embed=32)
    x = transformer.inputs(jax.random.key(1), 2, 16, 32)
    adam = transformer.init_adam(params)
    return partial(transformer.train_step, heads=4), (params, adam, x, x)


def test_every_site_of_a_train_step_has_its_backward():
    fn, args = step(2)
    found = fl.find(fn, *args)
    sites = {x.id: x for x in (*found.candidates, *found.rejections)}
    # The first norm, without its scale, is a site: of its input, which is data, no gradient is asked for.
    first = "layer_norm@layer_0/ln1#1"
    assert set(sites[first].region.leaves) == {"x"}
    assert {p.site for p in found.pairs} == sites.keys() - {first}
    whole = {p.site: (set(p.gradients), set(p.absent)) for p in found.pairs}
    for name, (gradients, absent) in whole.items():
        leaves = set(sites[name].region.leaves)
        assert gradients | absent == leaves
        assert absent <= {"x"}, (name, absent)
    assert sum(bool(absent) for _, absent in whole.values()) <= 3  # queries, keys and values read that norm


def test_a_function_that_is_not_differentiated_has_no_pairs():
    found = fl.find(lambda x: jax.nn.relu(x @ W + B), X)
    assert found.pairs == ()
    assert "backward" not in found.report()


def test_a_pair_is_told_in_text_and_data():
    def loss(w, b):
        return jnp.sum(jax.nn.relu(X @ w + b) ** 2)

    found = fl.find(jax.value_and_grad(loss, (0, 1)), W, B)
    pairs = {p.site: p for p in found.pairs}
    (declined,) = [r for r in found.rejections if r.code == "escapes"]
    pair = pairs[declined.id]
    assert (set(pair.gradients), pair.absent) == ({"w", "b"}, ("x",))
    data = found.to_dict()["pairs"]
    assert json.loads(json.dumps(data)) == data
    assert {d["site"] for d in data} == pairs.keys()
    assert f"dw = {pair.gradients['w']!r}" in found.explain(declined.id)
    assert "no gradient of x" in found.report()
    assert "backward passes in this program:" in found.report()


def test_sites_of_a_fused_and_differentiated_function_are_no_pairs():
    fused = jax.grad(lambda w: fl.fuse(lambda w: jnp.sum(jax.nn.relu(X @ w + B)))(w))
    found = fl.find(fused, W)
    assert not found.candidates
    assert found.pairs == ()
