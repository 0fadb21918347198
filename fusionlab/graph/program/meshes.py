"""Meshes, shardings and collectives of a program as short text, for tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from ..primitives import having
from .ir import Literal, Node

_COLLECTIVES = having("device sum", "device extreme", "exchange")


def mesh_text(mesh: Any) -> str:
    """ "data=2 x tensor=4", of a mesh or an abstract one; "" where it has no axes."""
    return " x ".join(f"{name}={size}" for name, size in mesh.shape.items())


def sharding_of(array: Any) -> NamedSharding | None:
    """The sharding of an array, or of a shape, on a mesh of several devices; None for anything else, including traced values."""
    if isinstance(array, Tracer):
        return None
    sharding = getattr(array, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


def sharding_text(sharding: NamedSharding | None) -> str:
    """ "P('data', None)"; "" for a replicated value, and for None."""
    if sharding is None or sharding.is_fully_replicated:
        return ""
    return f"P({', '.join(map(repr, sharding.spec))})"


def mesh_of_arguments(shardings: Iterable[NamedSharding | None]) -> str:
    """The mesh of the first argument that has one; "" if there is none."""
    return next((mesh_text(s.mesh) for s in shardings if s is not None), "")


def region_mesh_text(node: Node) -> str:
    """For a shard_map: "mesh data=2 x tensor=4", with its manual axes if other axes are not manual; "" for any other node."""
    if node.primitive != "shard_map":
        return ""
    mesh, p = node.params["mesh"], node.params
    manual = p["newly_manual_axes"] if "newly_manual_axes" in p else p["manual_axes"]  # jax 0.10, and later
    own = [str(name) for name in mesh.axis_names if name in manual]
    over = f", manual over {', '.join(own)}" if 0 < len(own) < len(mesh.axis_names) else ""
    return f"mesh {mesh_text(mesh)}{over}"


def collective_axes(node: Node) -> tuple[str, ...]:
    """The mesh axes of a collective; () for other nodes, and for axes of vmap."""
    if node.primitive not in _COLLECTIVES:
        return ()
    over = node.params.get("axes", node.params.get("axis_name", ()))
    return tuple(name for name in (over if isinstance(over, tuple | list) else (over,)) if isinstance(name, str))


def collective_bytes(node: Node) -> int:
    """Bytes of one device in a collective: the larger of its operands and its results."""
    return max(sum(map(_nbytes, node.inputs)), sum(map(_nbytes, node.outputs)))


def _nbytes(atom: Any) -> int:
    return int(np.dtype(atom.dtype).itemsize) if isinstance(atom, Literal) else atom.nbytes
