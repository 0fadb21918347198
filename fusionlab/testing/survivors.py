"""Survivors: what remains outside the fused ops of a rewritten program, as activations by value, concepts by name, primitives."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend import core as jex_core

from ..errors import unknown_name
from ..fusers import Candidate, Findings, Rejection
from ..fusers.passes.linear.epilogues import KNOWN
from ..graph.canonical.blocks import views
from ..graph.canonical.view import CanonicalView
from ..graph.certify.activations import NONLINEAR, between, cone, recognise
from ..graph.certify.certify import Certifier
from ..graph.program.graph import Graph
from ..graph.program.ir import Node, Value
from ..graph.program.scopes import Source, in_backward
from ..kernels import CARDS, plain_meaning_of
from ..kernels.ops.gemm_epilogue.activations import ACTIVATIONS
from ..showing import Shown

ACTIVATION_KINDS = frozenset(ACTIVATIONS[name].kind for name in KNOWN)
CONCEPTS = frozenset({"softmax", *(concept for card in CARDS for concept in card.concepts)})


@dataclass(frozen=True, repr=False)
class Survivor(Shown):
    """Something that remains outside the fused ops: its name, the user's line, and the site declined for it, if any."""

    name: str
    source: Source | None
    site: Candidate | Rejection | None = None


def survivors(found: Findings, after: Graph, name: str) -> list[Survivor]:
    """The survivors of a name, in program order.

    Args:
      found: the findings.
      after: the graph with the fusions applied, `found.apply()`.
      name: an activation ("relu", "gelu_tanh", ...) in the forward pass, recognised by value in any spelling; a concept ("linear",
        "attention", "layer_norm", "rms_norm", "lerp", a "softmax" outside attention, or another key of `found.concepts()`), as far as the
        pass that declined the site recognised it; or a primitive ("dot_general") anywhere, including backward passes and loop bodies.
        Activations take precedence over primitives of the same name.

    Raises:
      UnknownNameError: none of these.
    """
    if name in ACTIVATION_KINDS:
        return [Survivor(name, node.source) for kind, node in activations(after) if kind == name]
    if name == "softmax":
        return [Survivor(name, s.source) for s in found.structures if s.kind == "softmax"]
    if name in CONCEPTS or name in found.concepts():
        return [Survivor(name, item.source, item) for item in _left(found) if name in item.concepts]
    present = {n.primitive for graph in (found.graph, after) for n in graph.nodes()}
    if name not in present | primitives():
        raise unknown_name("survivor", name, ACTIVATION_KINDS | CONCEPTS | set(found.concepts()) | present)
    return [Survivor(name, n.source) for n in after.nodes() if n.primitive == name]


def _left(found: Findings) -> Iterator[Candidate | Rejection]:
    """The sites that are left as they are, except those whose nodes another fusion took."""
    fused = {c.id for c in found.select()}
    yield from (c for c in found.candidates if c.id not in fused)
    yield from (r for r in found.rejections if r.code != "overlap")


def activations(graph: Graph) -> list[tuple[str, Node]]:
    """The known activations of a program's forward pass, each with its last node; of nested ones the largest."""
    certifier = Certifier(plain_meaning_of)
    ends: dict[int, tuple[str, Node]] = {}
    for view, _ in views(graph):
        _add_activations(view, certifier, ends)
    return [ends[i] for i in sorted(ends)]


def _add_activations(view: CanonicalView, certifier: Certifier, ends: dict[int, tuple[str, Node]]) -> None:
    """Adds the known activations of a block to `ends`, by the nodes that end them."""
    # The nodes of those found so far, but for their last ones, from whose values others may start.
    inner: set[int] = set()
    block = view.block
    for start in (*block.inputs, *(v for n in block.nodes for v in n.outputs)):
        maker = block.producer.get(start.id)
        if (maker is not None and maker.id in inner) or not _is_float(start):
            continue
        for node in _ends_alike(view, start):
            if node.id in inner or node.id in ends:
                continue
            name = recognise(view, start, node.outputs[0], KNOWN, certifier).name
            if name is not None:
                inner |= {n.id for n in between(view, start, node.outputs[0])} - {node.id}
                ends[node.id] = (ACTIVATIONS[name].kind, node)


def _ends_alike(view: CanonicalView, start: Value) -> Iterator[Node]:
    """The nodes that may end an activation of a value in the forward pass, because their results have its type, last first."""
    nodes = [n for n in cone(view, start) if not in_backward(n)]
    if any(n.primitive in NONLINEAR for n in nodes):
        like = start.shape, start.dtype
        yield from (n for n in reversed(nodes) if (n.outputs[0].shape, n.outputs[0].dtype) == like)


def _is_float(value: Value) -> bool:
    # The dtype of random keys is JAX's own, no np.dtype.
    return jnp.issubdtype(value.dtype, np.floating) if isinstance(value.dtype, np.dtype) else False


@functools.cache
def primitives() -> frozenset[str]:
    """The names of JAX's public primitives, to distinguish a misspelt name from one that a program does not contain."""
    modules: tuple[Any, ...] = (jax.lax, jex_core.primitives)
    found = (value for module in modules for value in vars(module).values())
    return frozenset(value.name for value in found if isinstance(value, jex_core.Primitive))
