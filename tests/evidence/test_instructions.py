"""Whether two compiled programs are the same code: names and origins do not count, everything else does."""

from __future__ import annotations

import itertools

import jax
import pytest
from jax import numpy as jnp

from fusionlab.evidence.instruments.instructions import code_of

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
    assert code_of(one) == code_of(other)


def test_another_operation_shape_constant_or_order_of_operands_is_other_code():
    codes = [
        code_of(compiled(f, *args))
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
    assert all(code.instructions for code in codes)
    assert not any(a == b for a, b in itertools.combinations(codes, 2))


MODULE = """HloModule m, is_scheduled=true

FileNames
1 "f.py"

%add.7 (p.3: f32[], q.1: f32[]) -> f32[] {
  %p.3 = f32[] parameter(0)
  %q.1 = f32[] parameter(1)
  ROOT %z.9 = f32[] add(%p.3, %q.1), metadata={op_name="einsum}{" stack_frame_id=3}
}

ENTRY %main.4 (x.1: f32[4]) -> (f32[], f32[4]) {
  %x.1 = f32[4]{0} parameter(0)
  %c.1 = f32[] constant(0)
  %r.1 = f32[] reduce(%x.1, %c.1), dimensions={0}, to_apply=%add.7
  %s.1 = f32[4]{0} sine(%x.1)
  ROOT %t.1 = (f32[], f32[4]{0}) tuple(%r.1, %s.1)
}
"""
SINE = "  %s.1 = f32[4]{0} sine(%x.1)\n"


def test_names_origins_and_the_order_of_independent_instructions_do_not_count():
    code = code_of(MODULE)
    assert (code.instructions.total(), code.kernels.total()) == (5, 2)
    renamed = MODULE.replace("%r.1", "%other.12").replace("%add.7", "%region_0.3").replace("stack_frame_id=3", "")
    assert code_of(renamed) == code
    earlier = MODULE.replace(SINE, "").replace("  %c.1", f"{SINE}  %c.1")
    assert earlier != MODULE
    assert code_of(earlier) == code


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("add(%p.3, %q.1)", "multiply(%p.3, %q.1)"),
        ("tuple(%r.1, %s.1)", "tuple(%s.1, %r.1)"),
        ("constant(0)", "constant(1)"),
        ("dimensions={0}", "dimensions={1}"),
        ("sine(%x.1)", "cosine(%x.1)"),
    ],
)
def test_what_an_instruction_calls_reads_and_is_counts(one, other):
    code, changed = code_of(MODULE), code_of(MODULE.replace(one, other))
    assert changed != code
    assert changed.shared(code) >= 1
    assert code_of("no HLO") == code_of("")
