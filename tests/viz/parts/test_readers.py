"""Who reads what: an operation that combines entries reads its operands, and is no region to look into."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fusionlab.graph.program.trace import trace
from fusionlab.viz.parts.readers import flow


def test_the_backward_pass_of_an_embedding_reads_the_whole_gradient():
    graph = trace(jax.grad(lambda table, ids: (table[ids] ** 2).sum()), jnp.ones((100, 16)), jnp.array([1, 2]))
    (scatter,) = (n for n in graph.top.nodes if n.primitive == "scatter-add")
    assert [v.shape for _, reader, v in flow(graph) if reader == scatter.id] == [(100, 16), (2, 1), (2, 16)]
    assert [v.shape for producer, _, v in flow(graph) if producer == scatter.id] == [(100, 16)]
