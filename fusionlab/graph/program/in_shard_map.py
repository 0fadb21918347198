"""Tracing as if inside a `shard_map` that checks which mesh axes its values vary along (check_vma).

There the mesh axes along which a value varies are part of its type, and JAX makes such types only inside a shard_map. A value of
a traced program still names its mesh, which is enough to trace in a body of the same kind, whatever the original shard_map was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh

from ...showing import Shown
from ..jax_compat import has_pending_sums, varies, varying_axes, with_weakness
from ..primitives import SUMS_OVER_DEVICES
from .explicit_axes import as_argument, mesh_of, on_mesh, resharded, sharding_in_type
from .ir import Node

_ANY = 2  # the size of a mesh axis that is summed over: no equation tells


def summed_mesh_axes(node: Node) -> set[str]:
    """The mesh axes that a node, or one in its blocks, sums over."""
    found = {str(axis) for axis in node.params.get("axes", ())} if node.primitive in SUMS_OVER_DEVICES else set()
    return found.union(*(summed_mesh_axes(inner) for block in node.blocks for inner in block.nodes))


@dataclass(frozen=True, repr=False)
class DeviceSums(Shown):
    """A program's sums over devices: the mesh axes, and the mesh if types record what varies along it."""

    axes: frozenset[str] = frozenset()
    mesh: Any = None

    @property
    def axis_env(self) -> list[tuple[str, int]]:
        """The axes as `jax.make_jaxpr` takes them outside a mesh."""
        return [(axis, _ANY) for axis in sorted(self.axes)]

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> DeviceSums:
        """The sums of some nodes."""
        all_of = list(nodes)
        axes = frozenset(axis for node in all_of for axis in summed_mesh_axes(node))
        values = (v.aval for node in all_of for v in node.outputs) if axes else ()
        return cls(axes, _mesh_in(values))


def _mesh_in(avals: Iterable[Any]) -> Any:
    """The mesh of the first type that varies along its axes; None if no type does."""
    return next((a.sharding.mesh for a in avals if varies(a)), None)


def make_jaxpr(
    fn: Callable[..., Any], avals: Sequence[Any], result: Any = None, sums: DeviceSums | None = None, weak: bool = False
) -> Any:
    """`jax.make_jaxpr` at the shapes, dtypes, explicit shardings and varying mesh axes of avals; outside any shard_map if none varies.

    Args:
      fn: arrays -> arrays.
      avals: types of the arguments, as of traced values (`jax.ShapeDtypeStruct`s suffice if none varies).
      result: the type of `fn`'s result, or a list of types for several. Results are made to vary along all of its mesh axes, are
        resharded over its explicit axes, and become weakly typed if it is.
      sums: the sums of `fn` over devices, if any, which the types of its arguments may not show.
      weak: weakly typed arguments stay weak; else all are strong.
    """
    results = result if isinstance(result, list) else [] if result is None else [result]

    def call(*args: Any) -> Any:
        given = fn(*args)
        if result is None:
            return given
        if not isinstance(result, list):
            return as_typed(given, result)
        return [as_typed(x, aval) for x, aval in zip(given, result, strict=True)]

    types = (*avals, *results)
    over = sums or DeviceSums()
    mesh = _mesh_in(types) or over.mesh
    if mesh is None:
        with mesh_of(types):
            return jax.make_jaxpr(call, axis_env=over.axis_env)(*(as_argument(a, weak and is_weak(a)) for a in avals))
    # `jax.make_jaxpr` takes no ShapeDtypeStruct that varies.
    plain = [a.update(weak_type=weak and is_weak(a), sharding=_sharding_on(mesh, a)) for a in avals]
    return _inside(mesh, lambda: jax.make_jaxpr(call)(*plain))


def is_weak(aval: Any) -> bool:
    """Whether a value is weakly typed, like a Python number, so that another dtype takes precedence."""
    return bool(getattr(aval, "weak_type", False))


def as_typed(x: Any, aval: Any) -> Any:
    """`x` with the type of a value of the program: its varying axes, its explicit sharding, its weakness.

    Python numbers, and values computed only from them, are weakly typed; a fused op's result is never weak.
    """
    x = resharded(as_varying(x, aval), aval)
    return with_weakness(x, True) if is_weak(aval) and not is_weak(jax.typeof(x)) else x


def as_varying(x: Any, aval: Any) -> Any:
    """`x`, made to vary along the mesh axes that `aval` varies along and it does not."""
    missing = varying_axes(aval) - varying_axes(jax.typeof(x)) if varies(aval) else None
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def has_mesh(aval: Any) -> bool:
    """Whether `make_jaxpr` takes an aval: it varies only along axes of its mesh, and has no pending sums."""
    if has_pending_sums(aval):
        return False
    return not varies(aval) or varying_axes(aval) <= set(aval.sharding.mesh.manual_axes)


def _sharding_on(mesh: Any, aval: Any) -> Any:
    """The explicit sharding of a type; for a type without one, that of a replicated value."""
    return sharding_in_type(aval) or NamedSharding(mesh, PartitionSpec(*(None for _ in aval.shape)))


def _inside(mesh: Any, call: Callable[[], Any]) -> Any:
    """The result of `call` inside a shard_map over the manual axes of an abstract mesh.

    No value enters or leaves that shard_map: the code traced inside is a program of its own.
    """
    here = get_abstract_mesh()
    entered = set(here.manual_axes) if here.axis_names == mesh.axis_names else set()
    new = set(mesh.manual_axes) - entered
    if not new:  # the search itself runs inside the shard_map
        return call()
    results: list[Any] = []

    def body() -> tuple[()]:
        results.append(call())
        return ()

    around = mesh.update_axis_types(dict.fromkeys(new, AxisType.Auto))
    with on_mesh(around):
        jax.eval_shape(jax.shard_map(body, in_specs=(), out_specs=(), axis_names=new))
    return results[0]


def same_varying_axes(operands: Sequence[Any]) -> list[Any]:
    """Inside `shard_map` operands may vary over different mesh axes; made alike, their gradients are summed outside."""
    axes = [jax.typeof(a).manual_axis_type.varying for a in operands]
    union = frozenset().union(*axes)
    if all(own == union for own in axes):
        return list(operands)
    return [
        jax.lax.pcast(a, tuple(sorted(union - own)), to="varying") if own != union else a
        for a, own in zip(operands, axes, strict=True)
    ]
