"""A fused op against the nodes it replaces, on the values that reach them: one site at a time, without the rest of the program.

Where float64 of a whole program does not fit into memory, that of one region does. A site in the body of a loop, a branch or a
`shard_map` gets standard normal values, as the values that reach it there differ from one iteration to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.fusers import Candidate, Findings
from fusionlab.graph.calls.binding import Bound
from fusionlab.graph.matching.region import Region
from fusionlab.graph.program.equations import slice_jaxpr
from fusionlab.graph.program.ir import Block, Node, Value
from fusionlab.graph.settings import as_function
from fusionlab.progress import SILENT, Stages

from .original import Original
from .subsets import SiteErrors


def local_errors(
    found: Findings, site: Candidate, arrays: Sequence[Any], grad: bool, stages: Stages = SILENT
) -> SiteErrors:
    """Errors of one site's outputs and gradients, of the nodes as they are ("before") and of the fused op, both against float64.

    Args:
      found: the findings that contain the site.
      site: a candidate.
      arrays: the leaves of the arguments that the graph was traced with.
      grad: also the gradients by every float that the site reads.
      stages: called as each stage begins.

    Raises:
      TraceError: the region has no float64 form, or (with `grad`) no gradient.
    """
    region = site.region
    assert region is not None, site.id  # every candidate of a search has one
    names = {value.id: name for name, value in reversed(list(region.leaves.items()))}
    inputs = region.inputs
    on_top = not site.block_path
    given = _values(found.graph.top, inputs, arrays) if on_top else tuple(_drawn(i, v) for i, v in enumerate(inputs))
    order = [next(i for i, v in enumerate(inputs) if v.id == leaf.id) for leaf in site.site.leaves]

    def fused(*values: Any) -> Any:
        given = site.site.fn(*(values[i] for i in order))
        return tuple(given) if site.others else given

    positions = tuple(range(len(inputs)))
    call = Bound(_function(region), given, {}, positions, len(inputs), tuple(names[v.id] for v in inputs))
    original = Original(call, (), None, grad, stages)
    version = Bound(fused, given, {}, positions, len(inputs), call.leaf_names)
    forward = original.forward_of(version)
    backward = original.backward_of(version) if grad else None
    return SiteErrors(site.id, tuple(original.errors(forward, backward)), drawn=not on_top)


def _function(region: Region) -> Callable[..., Any]:
    """A region's inputs -> its root, or a tuple of its roots where it has several."""
    nodes = sorted((*region.nodes, *region.support), key=lambda n: n.id)
    run = as_function(slice_jaxpr(region.block, nodes, region.inputs, region.roots, region.known))

    def plain(*values: Any) -> Any:
        outs = run(*values)
        return tuple(outs) if region.others else outs[0]

    return plain


def _values(block: Block, wanted: Sequence[Value], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The values themselves, computed by the nodes they depend on and no others."""
    nodes = sorted(_behind(block, wanted), key=lambda n: n.id)
    closed = slice_jaxpr(block, nodes, block.inputs, wanted)
    return tuple(jax.jit(as_function(closed))(*arrays))


def _behind(block: Block, wanted: Sequence[Value]) -> list[Node]:
    found: dict[int, Node] = {}
    stack = [v.id for v in wanted]
    while stack:
        maker = block.producer.get(stack.pop())
        if maker is not None and maker.id not in found:
            found[maker.id] = maker
            stack.extend(a.id for a in maker.inputs if isinstance(a, Value))
    return list(found.values())


def _drawn(i: int, value: Value) -> Any:
    """Standard normal; zeros and ones for other dtypes than floats."""
    drawn = np.random.default_rng(i).standard_normal(value.shape)
    return jnp.asarray(drawn if jnp.issubdtype(value.dtype, jnp.floating) else drawn > 0, value.dtype)
