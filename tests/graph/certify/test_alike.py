"""What is proved at some sizes is not proved again at others, where neither program can tell how long its axes are; else it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.graph.certify import certify
from fusionlab.graph.certify.certify import Certifier
from fusionlab.graph.program.trace import trace
from fusionlab.kernels import meaning_of

from .test_certify import region_of


@pytest.fixture
def proofs(monkeypatch):
    """The regions that a proof was made for."""
    found = []
    prove = certify._prove
    monkeypatch.setattr(certify, "_prove", lambda region, *rest: found.append(region) or prove(region, *rest))
    return found


def proved(certifier, old, new, shapes, dtype="float32", what="test"):
    """The verdict on `new`, as on an op of this package, in the place of `old`."""
    region = region_of(old, *shapes, dtype=jnp.dtype(dtype))
    return certifier.region(region, new, what, ours=lambda: trace(new, *(v.aval for v in region.inputs)).top)


def both(old, new, first, second, dtypes=("float32", "float32")):
    """The verdicts at two sets of shapes, one after the other."""
    certifier = Certifier(meaning_of)
    return [proved(certifier, old, new, *one) for one in zip((first, second), dtypes, strict=True)]


def layer(x, w, b):
    return jax.nn.gelu(x @ w + b)


def fused(x, w, b):
    return fl.ops.gemm_epilogue(x, w, b, activation="gelu_tanh")


WIDE, WIDER, SQUARE = ((40, 96), (96, 24), (24,)), ((24, 64), (64, 200), (200,)), ((48, 48), (48, 48), (48,))


def test_a_layer_of_other_widths_is_proved_by_the_first(proofs):
    assert all(v.ok for v in both(layer, fused, WIDE, WIDER))
    assert len(proofs) == 1


def test_sizes_that_are_equal_are_a_case_of_those_that_are_not(proofs):
    assert all(v.ok for v in both(layer, fused, WIDE, SQUARE))
    assert len(proofs) == 1


@pytest.mark.parametrize(
    ("first", "second", "dtypes"),
    [
        (SQUARE, WIDE, ("float32",) * 2),
        (WIDE, ((40, 96), (96, 1), (1,)), ("float32",) * 2),
        (WIDE, WIDER, ("float32", "bfloat16")),
    ],
    ids=["sizes that were equal", "a size of one", "another dtype"],
)
def test_what_is_not_the_same_by_another_name_is_proved_anew(first, second, dtypes, proofs):
    assert all(v.ok for v in both(layer, fused, first, second, dtypes))
    assert len(proofs) == 2


def turned(x, w, b):
    return fl.ops.gemm_epilogue(x, w, b, activation="gelu_tanh", w_contract=1)


def to_the_other_side(x, w, b):
    return fl.ops.gemm_epilogue(x, w, x[:, 0], activation="gelu_tanh")


@pytest.mark.parametrize("new", [turned, to_the_other_side])
def test_what_only_equal_sizes_allow_is_not_proved_by_a_case_of_others(new):
    certifier = Certifier(meaning_of)
    assert proved(certifier, layer, fused, WIDE).ok
    assert not proved(certifier, layer, new, SQUARE).ok
    assert proved(certifier, layer, fused, SQUARE, what="another").ok


@jax.custom_jvp
def doubled_where_long(x):
    return 2 * x


@doubled_where_long.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return 2 * x, t * (2 if x.shape[-1] < 50 else 3)


def counted(x):
    return x.sum(-1) / jnp.ones_like(x).sum(-1)


# (what stands in the program, what would replace it): equal at a length of 48, and not at 96.
BY_LENGTH = {
    "a mean's number": (lambda x: x.sum(-1) / 48, lambda x: x.mean(-1)),
    "a count": (lambda x: x.sum(-1) / 48, counted),
    "a count, the other way": (counted, lambda x: x.sum(-1) / 48),
    "positions": (lambda x: jnp.where(jnp.arange(x.shape[-1]) < 48, x, 0).sum(-1), lambda x: x.sum(-1)),
    "positions in a replacement": (
        lambda x: x.sum(-1),
        lambda x: jnp.where(jnp.arange(x.shape[-1]) < 48, x, 0).sum(-1),
    ),
    "a slice": (lambda x: x[..., :48].sum(-1), lambda x: x.sum(-1)),
    "a derivative of one's own": (lambda x: doubled_where_long(x).sum(-1), lambda x: 2 * x.sum(-1)),
    "a square": (lambda x: (x @ x.mT).sum(-1) / 48, lambda x: (x @ x.mT).mean(-1)),
}


@pytest.mark.parametrize("name", BY_LENGTH)
def test_what_can_tell_the_length_of_an_axis_is_proved_at_each(name, proofs):
    old, new = BY_LENGTH[name]
    first, second = both(
        old, new, ((48, 48) if name == "a square" else (5, 48),), ((96, 96) if name == "a square" else (7, 96),)
    )
    assert first.ok
    assert len(proofs) == 2
    # The reduced sizes of positions say nothing of the 48th, so their proofs are never shared.
    if not name.startswith("positions"):
        assert not second.ok
