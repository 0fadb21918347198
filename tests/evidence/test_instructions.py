"""Whether two compiled programs are the same code: names and origins do not count, everything else does."""

from __future__ import annotations

import jax
from jax import numpy as jnp

from fusionlab.evidence.instruments.instructions import instructions

X, W, B = jnp.ones((4, 16)), jnp.ones((16, 8)), jnp.ones(8)


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile().as_text()


def layer(x, w, b):
    return jnp.tanh(x @ w + b)


def same_layer_elsewhere(x, w, b):
    def linear(x):
        return x @ w

    with jax.named_scope("a"):
        return jnp.tanh(jax.jit(linear)(x) + b)


def test_the_same_computation_written_elsewhere_is_the_same_code():
    one, other = compiled(layer, X, W, B), compiled(same_layer_elsewhere, X, W, B)
    assert one != other
    assert instructions(one) == instructions(other)


def test_another_operation_shape_constant_or_order_of_operands_is_other_code():
    texts = [
        instructions(compiled(f, *args))
        for f, args in (
            (layer, (X, W, B)),
            (layer, (X[:2], W, B)),
            (lambda x, w, b: jnp.sin(x @ w + b), (X, W, B)),
            (lambda x, w, b: jnp.tanh(x @ w + 2 * b), (X, W, B)),
            (lambda x, w, b: jnp.tanh(x @ w + 3 * b), (X, W, B)),
            (lambda x, w, b: jnp.tanh(b + x @ w) - b, (X, W, B)),
            (lambda x, w, b: b - jnp.tanh(b + x @ w), (X, W, B)),
        )
    ]
    assert len(set(texts)) == len(texts)


def test_names_are_given_in_order_of_appearance_and_metadata_is_dropped():
    hlo = (
        'HloModule m\n\nFileNames\n1 "f.py"\n\n%add.7 (p.3: f32[], q.1: f32[]) -> f32[] {\n  %p.3 = f32[] parameter(0)\n'
        '  ROOT %z.9 = f32[] sine(%p.3), metadata={op_name="einsum}{" stack_frame_id=3}\n}\n'
    )
    assert instructions(hlo).splitlines()[1:] == [
        "%0 (f32[], f32[]) -> f32[] {",
        "  %1 = f32[] parameter(0)",
        "  ROOT %2 = f32[] sine(%1)",
        "}",
    ]
