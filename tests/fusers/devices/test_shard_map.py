"""Sites in `shard_map`, with and without check_vma: found, and fused with the values and gradients of the original.

The programs, and what is asserted of each, are in sharded.py. One of them by hand:

    python -m pytest "tests/fusers/devices/test_shard_map.py::test_every_site_is_found_and_the_fused_program_has_the_values_and_gradients\
_of_the_original[mlp]"
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from fusionlab.fusers.engine.unfit import check_fit
from fusionlab.graph.declined import Declined
from fusionlab.graph.jax_compat import has_pending_sums
from fusionlab.graph.matching.region import Region
from fusionlab.graph.program.trace import trace

from ..sharded import TRIALS


@pytest.mark.devices
@pytest.mark.parametrize("name", TRIALS)
def test_every_site_is_found_and_the_fused_program_has_the_values_and_gradients_of_the_original(on_devices, name):
    on_devices("fusers.sharded", name)


def body_of(fn, *shapes):
    """The block of a shard_map over every argument's first axis, on a mesh of no devices."""
    mesh = AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    (owner,) = trace(split, *(jnp.ones(s) for s in shapes)).top.nodes
    return owner.blocks[0]


def test_a_site_with_a_sum_over_devices_inside_is_declined():
    block = body_of(lambda x, y: jnp.tanh(lax.psum(x * y, "d")) + y, (4, 3), (4, 3))
    x, y = block.inputs
    region = Region(block, block.nodes[-1].outputs[0], {"x": x, "y": y}, block.nodes, ())
    with pytest.raises(Declined, match="sums over devices inside the site") as declined:
        check_fit(region)
    assert declined.value.code == "region"
    before = Region(block, block.nodes[0].outputs[0], {"x": x, "y": y}, block.nodes[:1], ())
    check_fit(before)


def test_a_site_whose_operand_is_owed_a_sum_is_declined():
    block = body_of(lambda x: x * lax.pcast(lax.psum(x, "d"), "d", to="reduced").sum(), (4, 3))
    reduced = next(v for n in block.nodes for v in n.outputs if has_pending_sums(v.aval))
    (reader, *_) = block.users[reduced.id]
    region = Region(block, reader.outputs[0], {"x": reduced}, (reader,), ())
    with pytest.raises(Declined, match="has yet to be summed") as declined:
        check_fit(region)
    assert declined.value.code == "region"
