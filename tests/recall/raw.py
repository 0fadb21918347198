"""A traced program as its primitives say it: who makes a value and who reads it, through views, casts and calls.

For the detector of `looks_like_sites` alone. It shares no code with the passes: of FusionLab it knows the nodes of the raw graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from fusionlab.graph.jax_compat import scan_counts
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Literal, Node, Value

# What shows a value again: as it is, elsewhere, in another dtype or shape, or under a name.
PLAIN = frozenset(
    "convert_element_type reshape broadcast_in_dim transpose squeeze expand_dims copy copy_p rev reduce_precision name "
    "stop_gradient pvary pcast reshard sharding_constraint mesh_cast optimization_barrier".split()
)
_CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
_CALLS = _CUSTOM | frozenset({"pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_lin"})
ELEMENTWISE = frozenset(
    "add sub mul div neg abs sign max min pow integer_pow square sqrt rsqrt exp exp2 expm1 log log1p tanh logistic erf erfc sin cos "
    "select_n clamp is_finite not and or eq ne lt le gt ge add_any psum psum_invariant pmean psum2 all_gather nextafter".split()
)


class Raw:
    """What the raw graph says of each value, across calls whose inputs and results are those of their body."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.maker: dict[int, Node] = {}
        self.readers: dict[int, list[Node]] = defaultdict(list)
        self.same: dict[int, Any] = {}  # what an input of a call's body is, and what the call's result is
        self.rules: dict[int, Node] = {}  # a node's id -> the call with a rule of its own that it stands in
        for block in graph.blocks():
            for node in block.nodes:
                self.maker.update((v.id, node) for v in node.outputs)
        for block in graph.blocks():
            for node in block.nodes:
                self._enter(node)
        for block in graph.blocks():
            for node in block.nodes:
                for atom in node.inputs:
                    atom = self.resolved(atom)
                    if isinstance(atom, Value):
                        self.readers[atom.id].append(node)

    def _enter(self, node: Node) -> None:
        if node.primitive == "scan":
            self._bind(node.blocks[0].inputs[: scan_counts(node.params)[0]], node.inputs)
        if node.primitive not in _CALLS or not node.blocks:
            return
        body = node.blocks[0]
        if len(body.inputs) == len(node.inputs):
            self._bind(body.inputs, node.inputs)
            self._bind(node.outputs, body.outputs)
        if node.primitive in _CUSTOM:
            self.rules.update((n.id, node) for b in _below(node) for n in b.nodes)

    def _bind(self, here: Iterable[Value], there: Iterable[Any]) -> None:
        self.same.update((v.id, a) for v, a in zip(here, there, strict=False) if v is not a)

    def resolved(self, atom: Any) -> Any:
        while isinstance(atom, Value) and atom.id in self.same:
            atom = self.same[atom.id]
        return atom

    def made_by(self, atom: Any) -> Node | None:
        atom = self.resolved(atom)
        return self.maker.get(atom.id) if isinstance(atom, Value) else None

    def read_by(self, value: Value) -> list[Node]:
        """The nodes that read a value, also inside calls and behind them."""
        value = self.resolved(value)
        return self.readers.get(value.id, []) if isinstance(value, Value) else []

    def bare(self, atom: Any) -> Any:
        """A value without the views and casts in front of it."""
        while (node := self.made_by(atom)) is not None and node.primitive in PLAIN:
            atom = node.inputs[node.outputs.index(self.resolved(atom))] if len(node.outputs) > 1 else node.inputs[0]
        return self.resolved(atom)

    def number(self, atom: Any) -> float | None:
        """The number that an operand is everywhere; None where it is not known to be one."""
        atom = self.bare(atom)
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            # The kind of bfloat16 is that of no number.
            numeric = value.dtype.kind in "biuf" or "float" in value.dtype.name
            return float(value.reshape(-1)[0]) if value.size == 1 and numeric else None
        return None

    def back(self, atom: Any, through: Callable[[Node], bool], steps: int = 60) -> Iterator[tuple[Any, Node | None]]:
        """Every value that one is made of by way of nodes that may be gone through, with its maker: the first it does not go through
        as well."""
        stack, seen = [atom], set()
        while stack and steps:
            atom, steps = self.resolved(stack.pop()), steps - 1
            if not isinstance(atom, Value) or atom.id in seen:
                continue
            seen.add(atom.id)
            node = self.made_by(atom)
            yield atom, node
            if node is not None and through(node):
                stack += node.inputs

    def is_backward(self, node: Node) -> bool:
        """Whether JAX derived a node for a backward pass: what it does over again, or differentiates, stands in the forward as well."""
        return any("transpose(" in str(eqn.source_info.name_stack) for eqn in (*node.calls, node.eqn))


def _below(node: Node) -> Iterator[Any]:
    for block in node.blocks:
        yield block
        for inner in block.nodes:
            yield from _below(inner)


def is_plain(node: Node) -> bool:
    return node.primitive in PLAIN


def is_elementwise(node: Node) -> bool:
    return node.primitive in PLAIN or node.primitive in ELEMENTWISE


def is_float(value: Any) -> bool:
    return "float" in str(value.dtype)
