"""The encoder over devices, on a mesh of one: it has to equal the encoder of one device. Notebook 07 runs it on more."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.models import parallel, transformer


@pytest.fixture(scope="module")
def model():
    return transformer.init(jax.random.key(0), 2, 32), transformer.inputs(jax.random.key(1), 2, 8, 32)


def mesh_of(*axes):
    return jax.make_mesh((1,) * len(axes), axes, devices=jax.devices()[:1], axis_types=(AxisType.Auto,) * len(axes))


@pytest.mark.parametrize("causal", [False, True])
def test_on_one_device_it_is_the_encoder_of_one(model, causal):
    params, x = model
    fn = parallel.encoder(mesh_of("data", "tensor"), params, heads=4, rows="data", causal=causal)
    want = transformer.encoder(params, x, heads=4, causal=causal)
    np.testing.assert_allclose(jax.jit(fn)(params, x), want, rtol=1e-5, atol=1e-5)


def test_each_layer_is_a_site(model):
    params, x = model
    fn = parallel.encoder(mesh_of("tensor"), params, heads=4, causal=True)
    found = fl.find(fn, params, x, passes=["multi_devices_multi_transformer_encoder"])
    assert [c.scope for c in found.candidates] == ["layer_0", "layer_1"]
    assert sum(n.primitive.startswith("psum") for n in found.apply().nodes()) == 4


def test_columns_and_rows_are_megatrons(model):
    params, _ = model
    one = parallel.specs(params)[0]
    assert one["attention"]["q"] == {"w": P(None, "tensor"), "b": P("tensor")}
    assert one["attention"]["out"] == one["mlp"]["fc2"] == {"w": P("tensor", None), "b": P()}
    assert one["mlp"]["fc1"] == {"w": P(None, "tensor"), "b": P("tensor")}
    assert one["ln1"] == {"scale": P(), "bias": P()}


def test_what_does_not_fit_the_mesh_is_said(model):
    params, _ = model
    with pytest.raises(ArgumentError, match="the mesh has no 'model'; it has tensor"):
        parallel.encoder(mesh_of("tensor"), params, heads=4, axis="model")

    class Three:
        shape = {"tensor": 3}  # noqa: RUF012

    with pytest.raises(ArgumentError, match="heads: got 4 for 3 devices of 'tensor'"):
        parallel.encoder(Three(), params, heads=4)
