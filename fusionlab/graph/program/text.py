"""The stable text form of a Graph: numbered values, types, params that matter, source line, scope."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..jax_compat import is_jaxpr
from .ir import Atom, Block, Node, Value, dtype_text, type_text
from .meshes import region_mesh_text, sharding_text

if TYPE_CHECKING:
    from .graph import Graph

# Params that say how, not what, or that hold a jaxpr (shown as a child block) or a Python object.
_HIDDEN = frozenset(
    {
        "sharding",
        "out_sharding",
        "accuracy",
        "jvp_jaxpr_fun",
        "fwd_jaxpr_thunk",
        "bwd",
        "debug",
        "name",
        "in_tree",
        "out_tree",
    }
    | {
        "donated_invars",
        "in_shardings",
        "out_shardings",
        "in_layouts",
        "out_layouts",
        "compiler_options_kvs",
        "ctx_mesh",
    }
    | {
        "linear",
        "_split_transpose",
        "ft_in",
        "ft_out",
        "symbolic_zeros",
        "inline",
        "keep_unused",
        "weak_type",
        "differentiated",
    }
    | {"num_consts", "num_carry", "out_trees", "mesh", "prevent_cse", "policy", "split_transpose"}
)


def graph_text(graph: Graph, *, sources: bool = True, scopes: bool | None = None) -> str:
    """The whole graph as text, one line a node; the same program gives the same text.

    Args:
      graph: the graph.
      sources: append the user's source line to each line.
      scopes: append the scope; None means as `sources`. With scopes and without sources, the text does not change if lines only move.
    """
    names = dict(zip((v.id for v in graph.top.inputs), graph.in_names, strict=True))
    placed = dict(zip((v.id for v in graph.top.inputs), map(sharding_text, graph.in_shardings), strict=False))
    head = ", ".join(" ".join(filter(None, (repr(v), names[v.id], placed.get(v.id)))) for v in graph.top.inputs)
    lines = [f"graph {graph.name}({head})"]
    lines += _block_lines(graph.top, "  ", sources, sources if scopes is None else scopes)
    return "\n".join(lines)


def block_fingerprint(block: Block) -> str:
    """Equal for programs of equal equations, shapes, dtypes and parameters, whatever their names, scopes and source lines."""
    types = [type_text(v.aval) for v in block.inputs]
    return digest([*types, *_block_lines(block, "", sources=False, scopes=False)])


def digest(lines: Iterable[str]) -> str:
    """16 hexadecimal digits that distinguish texts."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _block_lines(block: Block, indent: str, sources: bool, scopes: bool) -> list[str]:
    lines = [f"{indent}{value!r} = const" for value, _ in block.consts]
    for node in block.nodes:
        lines.append(indent + node_text(node, sources=sources, scopes=scopes))
        for child in node.blocks:
            inputs = ", ".join(map(repr, child.inputs))
            lines.append(f"{indent}  {child.label}({inputs})")
            lines += _block_lines(child, indent + "    ", sources, scopes)
    lines.append(f"{indent}return {', '.join(map(atom_text, block.outputs))}")
    return lines


def atom_text(atom: Atom) -> str:
    return atom.name if isinstance(atom, Value) else repr(atom)


def node_text(node: Node, *, sources: bool = True, scopes: bool | None = None) -> str:
    """One node: `%5:f32[8,128] = dot_general %0 %1 [contract 1x0]  # model.py:12 mlp`."""
    outs = ", ".join(map(repr, node.outputs))
    params = params_text(node)
    text = f"{outs} = {node.primitive} {' '.join(map(atom_text, node.inputs))}".rstrip()
    if params:
        text += f" [{params}]"
    parts = (str(node.source or "") if sources else "", node.scope if (sources if scopes is None else scopes) else "")
    where = " ".join(p for p in parts if p)
    return f"{text}  # {where}" if where else text


def params_text(node: Node) -> str:
    """The params that change the meaning, in a stable order."""
    if node.primitive == "dot_general":
        (lc, rc), (lb, rb) = node.params["dimension_numbers"]
        text = f"contract {_axes(lc)}x{_axes(rc)}"
        return text + (f", batch {_axes(lb)}x{_axes(rb)}" if lb else "")
    parts = [mesh] if (mesh := region_mesh_text(node)) else []
    for key in sorted(node.params):
        if _changes_meaning(node, key, node.params[key]):
            parts.append(f"{key}={_plain(node.params[key])}")
    return ", ".join(parts)


def _changes_meaning(node: Node, key: str, val: Any) -> bool:
    """Whether a param of a node is printed: child blocks, and a dtype equal to the result's type, are not."""
    if key in _HIDDEN or val is None or _holds_jaxpr(val) or callable(val):
        return False
    if isinstance(val, tuple | list) and any(map(_holds_jaxpr, val)):
        return False
    return not (key == "preferred_element_type" and node.outputs and val == node.outputs[0].dtype)


def _holds_jaxpr(val: Any) -> bool:
    return is_jaxpr(val) or hasattr(val, "jaxpr")


def _axes(axes: Any) -> str:
    return ",".join(str(int(a)) for a in axes)


def _plain(val: Any) -> str:
    """numpy ints print as ints, dtypes by their short name; nothing prints an address."""
    if isinstance(val, tuple | list):
        return "(" + ",".join(map(_plain, val)) + ")"
    if isinstance(val, frozenset):
        return "{" + ",".join(sorted(map(_plain, val))) + "}"
    if isinstance(val, bool | np.bool_):
        return str(bool(val))
    if isinstance(val, int | np.integer):
        return str(int(val))
    if isinstance(val, float | np.floating):
        return f"{float(val):.9g}"
    if isinstance(val, np.dtype | type):
        return dtype_text(np.dtype(val)) if isinstance(val, np.dtype) else val.__name__
    text = str(val)
    return type(val).__name__ if " at 0x" in text else text
