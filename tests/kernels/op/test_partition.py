"""Opaque implementations on several devices: what they are told apart by, and trials on four devices.

The trials are in partitioned.py. One of them by hand:

    python -m pytest "tests/kernels/op/test_partition.py::test_on_four_devices[explicit_meshes]"
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fusionlab.graph.jax_compat import child_jaxprs
from fusionlab.kernels import OPS
from fusionlab.kernels.op.labels import Axes, labels_of
from fusionlab.kernels.op.op import Op
from fusionlab.kernels.op.primitive import Marker
from fusionlab.kernels.ops.gemm_epilogue import GEMM_EPILOGUE, gemm_epilogue

from .partitioned import TRIALS

F32 = jnp.float32


@pytest.mark.devices
@pytest.mark.parametrize("name", TRIALS)
def test_on_four_devices(on_devices, name):
    on_devices("kernels.op.partitioned", name)


def labels(fn, *shapes):
    """The labels of the last equation of a traced function."""
    eqn = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, F32) for s in shapes)).jaxpr.eqns[-1]
    return labels_of(eqn.primitive, eqn.params, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars])


def relu(x, w, b):
    return gemm_epilogue(x, w, b, activation="relu")


SHAPES = ((2, 3, 4), (4, 8), (8,))


def test_a_call_sums_over_k_and_its_rule_is_an_einsum():
    found = labels(relu, *SHAPES)
    assert found.rule() == ("m0 m1 k, k n, n -> m0 m1 n", (), {})
    assert found.contracted == {"k"}
    assert found.summed == {}
    turned = labels(lambda x, w: gemm_epilogue(x, w, x_contract=1, w_contract=1), (2, 4, 3), (8, 4))
    assert turned.rule()[0] == "m0 k m1, n k -> m0 m1 n"


def test_each_gradient_has_its_own_sum():
    def backward(x, w, b, ct):
        return jax.vjp(relu, x, w, b)[1](ct)

    found = labels(backward, *SHAPES, (2, 3, 8))
    assert found.rule() == ("m0 m1 k, k n, m0 m1 n, m0 m1 n -> m0 m1 k, k n, n", (), {})
    assert {slot: set(summed) for slot, summed in found.summed.items()} == {
        "x": {"n"},
        "w": {"m0", "m1"},
        "bias": {"m0", "m1"},
    }


def test_each_term_of_a_tangent_has_its_own_sum():
    found = labels(lambda *a: jax.jvp(relu, a, a)[1], *SHAPES)
    assert found.summed == {"x": ("k",), "w": ("k",), "bias": ()}


def test_an_op_that_says_nothing_is_not_split(monkeypatch):
    monkeypatch.setattr(type(OPS["dot_product_attention"]), "labels", Op.labels)
    q = (1, 6, 2, 4)
    found = labels(lambda q: OPS["dot_product_attention"].call(q, q, q), q)
    text, unsplit, sizes = found.rule()
    assert set(unsplit) == set(text.replace(",", "").replace("->", "").split())
    assert len(unsplit) == 4 * len(found.tensors)
    assert sizes == {}


@pytest.mark.parametrize(
    ("n", "rule", "unsplit", "parts"),
    [
        (32, "m k, k (n n_8), (n n_8) -> m (n n_8), m n", (), [1, 2, 4]),
        (48, "m k, k (n n_8), (n n_8) -> m (n n_8), m n", (), [1, 2, 3, 6]),
        (8, "m k, k n, n -> m n, m whole0", ("n", "whole0"), []),
        (12, "m k, k n, n -> m n, m whole0", ("n", "whole0"), []),
    ],
)
def test_a_packed_axis_is_split_by_the_byte_or_not_at_all(monkeypatch, n, rule, unsplit, parts):
    said = {"x": ("m", "k"), "w": ("k", "n"), "bias": ("n",), "out": ("m", "n"), "mask": ("m", "n/8")}
    monkeypatch.setattr(type(GEMM_EPILOGUE), "axes", lambda self, shapes, /, **attrs: Axes(said))
    operands = [jax.ShapeDtypeStruct(s, F32) for s in ((2, 4), (4, n), (n,))]
    eqn = jax.make_jaxpr(relu)(*operands).jaxpr.eqns[-1]
    results = [jax.ShapeDtypeStruct((2, n), F32), jax.ShapeDtypeStruct((2, -(-n // 8)), jnp.uint8)]
    found = labels_of(eqn.primitive, eqn.params, operands, results)
    assert found.rule() == (rule, unsplit, {"n_8": 8} if not unsplit else {})
    assert [p for p in range(1, 9) if found.splits("n", p)] == parts


def test_an_axis_along_which_an_operand_broadcasts_is_not_split(monkeypatch):
    said = {"x": ("m", "k"), "w": ("k", "n"), "bias": ("n",), "out": ("m", "n")}
    monkeypatch.setattr(type(GEMM_EPILOGUE), "axes", lambda self, shapes, /, **attrs: Axes(said, frozenset("k")))
    operands = [jax.ShapeDtypeStruct(s, F32) for s in ((2, 4), (4, 8), (1,))]
    eqn = jax.make_jaxpr(relu)(*(jax.ShapeDtypeStruct(s, F32) for s in ((2, 4), (4, 8), (8,)))).jaxpr.eqns[-1]
    found = labels_of(eqn.primitive, eqn.params, operands, [jax.ShapeDtypeStruct((2, 8), F32)])
    assert found.rule() == ("m k, k n, whole0 -> m n", ("k", "whole0"), {})
    assert found.splits("n", 4)
    assert not found.splits("k", 2)


def test_markers_are_equal_and_no_region_of_the_program():
    eqn = jax.make_jaxpr(relu)(*(jax.ShapeDtypeStruct(s, F32) for s in SHAPES)).jaxpr.eqns[-1]
    assert "partitioned" not in eqn.params  # one device, and nothing opaque
    assert Marker() == Marker()
    assert len({Marker(), Marker()}) == 1
    assert not list(child_jaxprs(eqn.replace(params=eqn.params | {"partitioned": Marker()})))
