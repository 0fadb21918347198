"""An example function becomes a pattern: leaves, captured scalars, axis letters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fusionlab.graph.matching.pattern import Example, pattern_of

LINEAR = Example("linear", lambda x, w, b: x @ w + b, {"x": "mk", "w": "kn", "b": "n"})
ATTENTION = Example(
    "attention",
    lambda q, k, v, scale: jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btc,bsc->bts", q, k) * scale), v),
    {"q": "btc", "k": "bsc", "v": "bsd"},
    ("scale",),
)


def ops(pattern):
    return sorted(n.op for n in pattern.nodes if n.op not in ("leaf", "one"))


def test_a_linear_layer_is_a_product_and_a_sum():
    pattern = pattern_of(LINEAR)
    assert ops(pattern) == ["dot", "sum"]
    assert pattern.size == 2
    assert pattern.nodes[pattern.root].op == "sum"
    assert sorted(pattern.leaf_of.values()) == ["b", "w", "x"]
    assert pattern.edges == {}


def test_letters_name_the_nodes_that_have_the_axis():
    pattern = pattern_of(LINEAR)
    dot = next(n.id for n in pattern.nodes if n.op == "dot")
    leaf = {name: nid for nid, name in pattern.leaf_of.items()}
    assert pattern.letters == {
        "m": {leaf["x"], dot, pattern.root},
        "k": {leaf["x"], leaf["w"]},  # contracted: the product itself no longer has it
        "n": {leaf["w"], leaf["b"], dot, pattern.root},
    }


@pytest.mark.parametrize(
    ("fn", "power", "const"),
    [
        (lambda x, y, s: x + s * y, 1.0, 1.0),
        (lambda x, y, s: x + 3.0 * s * y, 1.0, 3.0),
        (lambda x, y, s: x + y / s, -1.0, 1.0),
        (lambda x, y, s: x - y * s * s, 2.0, -1.0),
        (lambda x, y, s: x + y / jnp.sqrt(jnp.float32(s)), -0.5, 1.0),
    ],
    ids=["s", "3 s", "1 / s", "-s^2", "s^-0.5"],
)
def test_a_scalar_is_captured_with_the_power_it_enters_in(fn, power, const):
    pattern = pattern_of(Example("scaled", fn, {"x": "mk", "y": "mk"}, ("s",)))
    (edge,) = pattern.edges.values()
    assert edge.scalar == "s"
    assert edge.power == power
    assert edge.const == pytest.approx(const, rel=1e-5)


def test_a_fixed_number_of_the_example_is_not_captured():
    pattern = pattern_of(Example("fixed", lambda x, y: x + 0.5 * y, {"x": "mk", "y": "mk"}))
    assert pattern.edges == {}
    assert sorted(o.coef for o in pattern.nodes[pattern.root].operands) == [0.5, 1.0]


def test_two_scalars_are_told_apart():
    pattern = pattern_of(Example("two", lambda x, y, a, b: a * x + b * y, {"x": "mk", "y": "mk"}, ("a", "b")))
    by_leaf = {
        pattern.leaf_of[pattern.nodes[nid].operands[i].nid]: edge.scalar for (nid, i), edge in pattern.edges.items()
    }
    assert by_leaf == {"x": "a", "y": "b"}


def test_attention_captures_its_scale_once():
    pattern = pattern_of(ATTENTION)
    assert {e.scalar for e in pattern.edges.values()} == {"scale"}
    assert ops(pattern).count("dot") == 2
    assert ops(pattern).count("exp") == 1


def test_a_constant_that_depends_on_sizes_is_refused():
    example = Example("mean", lambda x: jnp.exp(jnp.mean(x, 1)), {"x": "mk"}, concrete=True)
    with pytest.raises(ValueError, match="example mean: a constant depends on sizes"):
        pattern_of(example)


def test_an_example_whose_structure_depends_on_a_scalar_is_refused():
    def branchy(x, s):
        return jnp.sin(x) * s if s < 0.5 else jnp.sin(x) * s + x

    example = Example("branchy", branchy, {"x": "mk"}, ("s",), concrete=True)
    with pytest.raises(ValueError, match="example branchy: its structure depends on"):
        pattern_of(example)


def test_one_letter_for_two_different_axes_is_refused():
    with pytest.raises(ValueError, match="one letter names two axes"):
        pattern_of(Example("outer", lambda x, y: x[:, None] * y[None, :], {"x": "m", "y": "m"}))


def test_an_example_is_compiled_once():
    assert pattern_of(LINEAR) is pattern_of(LINEAR)
