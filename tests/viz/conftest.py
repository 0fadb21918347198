"""Small programs with hand-made findings, so that pictures are tested apart from matching."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from fusionlab.fusers.engine.outcomes import Backend, Candidate, Rejection, Residual
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Node
from fusionlab.graph.program.trace import trace


def candidate(graph: Graph, site_id: str, nodes: list[Node], formula: str = "x @ w + b") -> Candidate:
    name = site_id.partition("@")[0]
    return Candidate(
        id=site_id,
        pass_name=name,
        op=name,
        attrs={"activation": "none"},
        node_ids=frozenset(n.id for n in nodes),
        root=nodes[-1].outputs[0],
        leaves={},
        block_path=graph.block_of[nodes[0].id].path,
        nodes_before=len(nodes),
        nodes_after=1,
        source=nodes[0].source,
        formula=formula,
        residuals=(Residual("pre_activation", (4, 16), "f32", 256, ("dx", "dw")),),
        backends=(Backend("xla", "chosen", "runs everywhere"), Backend("cublaslt", "unavailable", "no CUDA device")),
        notes=("a note worth reading",),
    )


def rejection(site_id: str, nodes: list[Node], **changes) -> Rejection:
    fields = {
        "id": site_id,
        "pass_name": site_id.partition("@")[0],
        "code": "escapes",
        "sentence": "%7 = add is also returned",
        "node_ids": (nodes[-1].id,),
        "site_ids": frozenset(n.id for n in nodes),
        "matched": 17,
        "total": 19,
        "source": nodes[0].source,
        "edit": "return it only when asked",
    }
    return Rejection(**(fields | changes))


def mlp(params, x):
    for i, (w, b) in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w + b)
    return x


def mlp_args(layers: int = 1, width: int = 16):
    return [(jnp.ones((width, width)), jnp.ones(width))] * layers, jnp.ones((4, width))


def linear_nodes(graph: Graph) -> list[list[Node]]:
    """For each dot_general: itself, the bias's broadcast, the add, the tanh."""
    nodes = list(graph.top.nodes)
    starts = [i for i, n in enumerate(nodes) if n.primitive == "dot_general"]
    return [nodes[i : i + 4] for i in starts]


@dataclass(frozen=True)
class Case:
    graph: Graph
    findings: Findings


def findings_of(graph: Graph, candidates=(), rejections=()) -> Findings:
    passes = ("gemm_epilogue", "dot_product_attention", "lerp")
    return Findings(graph, passes, tuple(candidates), tuple(rejections), {"match": 0.25}, "cpu")


@pytest.fixture(scope="session")
def case() -> Case:
    """Three different layers: the first two are candidates, the third is declined after 17 of 19."""
    params = [(jnp.ones((16, 8)), jnp.ones(8)), (jnp.ones((8, 12)), jnp.ones(12)), (jnp.ones((12, 4)), jnp.ones(4))]
    graph = trace(mlp, params, jnp.ones((4, 16)))
    sites = linear_nodes(graph)
    assert [[n.primitive for n in s] for s in sites] == [["dot_general", "broadcast_in_dim", "add", "tanh"]] * 3
    found = findings_of(
        graph,
        [candidate(graph, f"gemm_epilogue@layer_{i}#1", sites[i], "tanh(x @ w + b)") for i in (0, 1)],
        [rejection("gemm_epilogue@layer_2#1", sites[2])],
    )
    return Case(graph, found)


@pytest.fixture(scope="session")
def stack() -> Case:
    """24 identical layers, every one a candidate."""
    graph = trace(mlp, *mlp_args(24))
    sites = linear_nodes(graph)
    found = findings_of(graph, [candidate(graph, f"gemm_epilogue@layer_{i}#1", s) for i, s in enumerate(sites)])
    return Case(graph, found)
