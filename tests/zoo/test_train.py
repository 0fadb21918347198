"""The train steps of the zoo trace, return what they were given, updated, and run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from .catalogue import DTYPES, MODELS, DtypeName, Model, Program


@pytest.mark.parametrize("dtype", tuple(DTYPES))
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.id)
def test_train_step_keeps_the_shapes_of_what_it_updates(model: Model, dtype: DtypeName) -> None:
    function, args = Program(model, dtype, "train").make()
    loss, params, state, *averages = jax.make_jaxpr(function, return_shape=True)(*args)[1]
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    for new, old in zip([params, state, *averages], [args[0], args[1], *([args[0]] * len(averages))], strict=True):
        assert jax.tree.structure(new) == jax.tree.structure(old)
        assert [leaf.shape for leaf in jax.tree.leaves(new)] == [leaf.shape for leaf in jax.tree.leaves(old)]


@pytest.mark.parametrize("name", ["handwritten/swiglu", "norms/averaged_traced", "structured/decode_scanned"])
def test_programs_take_arrays(name: str) -> None:
    model = next(model for model in MODELS if model.id == name)
    program = Program(model, "f32", "train")
    results = jax.jit(program.make()[0])(*program.arrays())
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(results))
