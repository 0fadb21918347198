"""Types of results that are told, and not traced, are those that tracing gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.fusers import registry
from fusionlab.kernels import OPS
from fusionlab.kernels.op.primitive import FusedPrimitive

PASSES = registry()
MANUAL = jax.sharding.AxisType.Manual


@pytest.fixture
def told(monkeypatch):
    """(the primitive's name, the types told, the types traced) of each call whose types were told."""
    found = []
    types = FusedPrimitive.types

    def both(self, avals, params):
        known = len(self._types)
        made = types(self, avals, params)
        traced = [v.aval for v in self.traced(avals, params).jaxpr.outvars]
        if made is not traced and len(self._types) == known:
            found.append((self.name, made, traced))
        return made

    monkeypatch.setattr(FusedPrimitive, "types", both)
    return found


def like(name, told):
    """Whether some were told for an op, and all are as traced."""
    mine = [(a, b) for primitive, a, b in told if primitive.startswith(name)]
    return bool(mine) and all(
        [(x.shape, x.dtype, x.weak_type) for x in a] == [(y.shape, y.dtype, y.weak_type) for y in b] for a, b in mine
    )


@pytest.mark.parametrize("name", [n for n, p in PASSES.items() if not p.forward_only and p.sample_for[0] == "cpu"])
def test_they_are_in_a_search_and_a_train_step(name, told):
    fn, args = PASSES[name].sample()

    def loss(*a):
        return sum(
            jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(fn(*a)) if jnp.issubdtype(x.dtype, jnp.floating)
        )

    options = dict(PASSES[name].sample_for[1])
    fused = fl.fuse(loss, passes=fl.Strategy(**{name: options or True}))
    jax.make_jaxpr(jax.grad(fused, allow_int=True))(*args)
    assert like(PASSES[name].op, told)


def test_they_name_the_mesh_that_they_are_asked_on():
    """Inside a shard_map that checks no types those of the operands need name none."""
    x = jnp.ones((6, 16))

    def normed(x):
        return OPS["layer_norm"].call(x, None, None, kind="rms", epsilon=1e-6)

    def mesh_of_result(size, fn):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((size,), ("d",), axis_types=(MANUAL,))):
            (made, *_) = jax.make_jaxpr(fn)(x).out_avals
        return made.sharding.mesh.shape

    assert mesh_of_result(2, lambda x: jax.vjp(normed, x)[0]) == {"d": 2}
    assert mesh_of_result(4, normed) == {"d": 4}
