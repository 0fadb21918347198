"""Several devices: how an implementation that XLA cannot look into is split among them.

XLA splits plain jnp code itself. Code in a custom call is `Implementation.opaque` to it: left alone, every device would gather all
operands and compute everything. Here a primitive lowered to such code is wrapped in `custom_partitioning`, and what each device does
is derived from one definition of an op, `Op.labels`: a label for every axis. A label is split over the same mesh axes wherever it
occurs. One that is summed over is split as well where a sum over devices can be added: after the tangent and the cotangent, which are
linear, and between product and epilogue of a call, by `Op.summed_call`. Returning the shardings XLA proposes without such a sum gives
wrong numbers and no error.

JAX hands the devices to a lowering rule only where it has seen a `custom_partitioning` in the program: `Marker` holds one that never
runs, as a parameter of the fused primitives. (Where JAX has seen one it refuses two things, and so it does here: meshes of different
shapes in one jit, and lowering for an abstract mesh alone.)
"""

from __future__ import annotations

import functools
import itertools
import math
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from ...device import Device
from ...errors import BackendError, ExportWarning
from ...graph.settings import jax_defaults, types_of_operands
from .arrays import explicit_sharding, is_explicitly_sharded
from .labels import Labels, labels_of
from .primitive import FusedPrimitive, Marker, Meaning, given_of

Array = Any
Where = Mapping[str, tuple[str, ...]]  # label -> the mesh axes it is split over
Body = Callable[..., list[Array]]  # (params, *operands) -> results


def marks(op: Any, shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The marker as a parameter, where this call may come to run opaque code on one of several devices."""
    opaque = (impl for impl in op.implementations.values() if impl.opaque)
    runs = any(impl.refuses(shapes, device, **attrs) is None for impl in opaque)
    # The devices are counted last: that starts JAX's backend, which takes longer than a small search.
    several = runs and (jax.device_count() > 1 or any(map(is_explicitly_sharded, shapes.values())))
    return {"partitioned": Marker()} if several else {}


_WITHOUT_A_CARD = (
    "lowered for CUDA on a machine without a GPU: the program contains plain operations in place of FusionLab's kernels; "
    "lower it on a machine with the GPU that will run it"
)


@jax_defaults()
@types_of_operands
def run(primitive: FusedPrimitive, platform: str, *operands: Array, **params: Any) -> list[Array]:
    """The code that a fused primitive is lowered to.

    Raises:
      BackendError: an implementation was named that cannot run on these operands or inside this `shard_map`.
    """
    op, device = primitive.op, Device.lowered_for(platform)
    if platform == "cuda" and Device.current().platform != "cuda":
        warnings.warn(_WITHOUT_A_CARD, ExportWarning, stacklevel=3)

    def body(params: Mapping[str, Any], *operands: Array) -> list[Array]:
        shapes = dict(zip(primitive.operand_names(params), operands, strict=True))
        return primitive.function(params, op.chosen(primitive.role, shapes, device, params), device)(*operands)

    shapes = dict(zip(primitive.operand_names(params), operands, strict=True))
    name = op.chosen(primitive.role, shapes, device, params)
    mesh = next((s.mesh for s in map(explicit_sharding, operands) if s is not None), get_abstract_mesh())
    impl = op.implementations[name]
    plain = primitive.role == "tangent" and impl.tangent is op.implementations["xla"].tangent
    if plain or not impl.opaque or "partitioned" not in params:
        return body(params, *operands)
    if mesh.manual_axes:
        return _on_manual_axes(primitive, params, name, mesh, device)(*operands)
    params, given = _added_up(primitive, params, operands)
    return _split(primitive, params, body, mesh)(*given)


def _added_up(
    primitive: FusedPrimitive, params: dict[str, Any], operands: Sequence[Array]
) -> tuple[dict[str, Any], Sequence[Array]]:
    """A call with one array in place of several whose sum is a cotangent: of products summed over devices, XLA sums the sum once."""
    counts = given_of(params) if primitive.role == "cotangent" else ()
    if max(counts, default=0) < 2:
        return params, operands
    first = len(operands) - sum(counts)
    left = iter(operands[first:])
    sums = [functools.reduce(lax.add, itertools.islice(left, n)) for n in counts if n]
    return {**params, "given": tuple(map(bool, counts))}, [*operands[:first], *sums]


def _on_manual_axes(
    primitive: FusedPrimitive, params: Mapping[str, Any], name: str, mesh: AbstractMesh, device: Device
) -> Meaning:
    """Inside `shard_map` operands are one device's already, unless it leaves mesh axes to XLA: there opaque code cannot run."""
    left = [a for a in mesh.axis_names if a not in mesh.manual_axes and mesh.shape[a] > 1]
    if left and params["implementation"] is not None:
        raise BackendError(
            f"{primitive.op.name}: implementation {name!r} cannot run inside a shard_map that leaves mesh axes "
            f"({', '.join(map(str, left))}) to XLA; needed a shard_map over all axes, or implementation=None"
        )
    return primitive.function(params, "xla" if left else name, device)


def _split(primitive: FusedPrimitive, params: Mapping[str, Any], body: Body, mesh: AbstractMesh) -> Meaning:
    """The primitive, by opaque code, on arrays that may be sharded."""
    inside = dict(params)
    if primitive.role != "call":
        inside["shardings"] = (None,) * len(params["shardings"])

    def whole(*operands: Array) -> list[Array]:
        return body(inside, *operands)

    def split(*operands: Array) -> Any:
        results = jax.eval_shape(primitive.function(inside, "xla"), *operands)
        labels = labels_of(primitive, inside, operands, results)
        parts = _Parts(primitive, inside, body, labels, mesh)
        rule, unsplit, sizes = labels.rule()
        wrapped = custom_partitioning(whole)
        wrapped.def_partition(
            partition=parts.partition,
            infer_sharding_from_operands=parts.infer,
            sharding_rule=rule,
            need_replication_factors=unsplit,
            decode_shardings=False,  # JAX refuses one over a part of a mesh axis; `_placing` reads it as none
            **sizes,  # pyright: ignore[reportArgumentType] - its last parameter takes the sizes of factors by name
        )
        return wrapped(*operands)

    def explicit(*operands: Array) -> Any:
        results = jax.make_jaxpr(primitive.function(params, "xla"))(*operands).jaxpr.outvars
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.sharding.auto_axes(split, out_sharding=[r.aval.sharding for r in results])(*operands)

    return explicit if AxisType.Explicit in mesh.axis_types else split


@dataclass(frozen=True)
class _Parts:
    """The callbacks of `custom_partitioning` for one equation.

    `context` is the mesh around it: where JAX knows no mesh by itself, it gives the axes their names.
    """

    primitive: FusedPrimitive
    params: Mapping[str, Any]
    body: Body
    labels: Labels
    context: AbstractMesh

    def partition(self, mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        mesh = self._mesh(mesh, args)
        where = self._where(mesh, [*args, *results])
        count = len(self.labels.operands)
        placed = [NamedSharding(mesh, _spec(axes, where)) for axes in self.labels.tensors]
        return mesh, self._on_device(where, mesh), placed[count:], tuple(placed[:count])

    def infer(self, mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> list[NamedSharding]:
        mesh = self._mesh(mesh, args)
        where = self._where(mesh, args)
        return [NamedSharding(mesh, _spec(axes, where)) for axes in self.labels.results]

    def _mesh(self, mesh: Mesh, args: Sequence[Any]) -> Mesh:
        if not mesh.empty:
            return mesh
        known = next((a for a in args if a.sharding is not None), None)
        devices = list(_held(known)) if known is not None else jax.devices()
        if self.context.size == len(devices) and not self.context.empty:
            return Mesh(np.array(devices).reshape(self.context.axis_sizes), self.context.axis_names)
        return Mesh(np.array(devices), ("devices",))

    def _where(self, mesh: Mesh, tensors: Sequence[Any]) -> dict[str, tuple[str, ...]]:
        """Which mesh axes each label is split over: as XLA has them, and of those in conflict the ones most bytes already are on."""
        votes = self._votes(mesh, tensors)
        where: dict[str, tuple[str, ...]] = {}
        taken: set[str] = set()
        for (label, names), _ in votes.most_common():
            free = tuple(n for n in names if n not in taken)
            if free and label not in where and self.labels.splits(label, math.prod(mesh.shape[n] for n in free)):
                where[label] = free
                taken.update(free)
        return where

    def _on_device(self, where: Where, mesh: Mesh) -> Meaning:
        """What one device does with its shards."""
        parts = replace(self, params=self._with_parts(where))
        if self.primitive.role == "call":
            inner = parts._call(where)
        else:
            inner = functools.partial(parts._linear, where, mesh)

        def local(*operands: Array) -> list[Array]:
            # A mesh that is set while XLA compiles must not reach in: here arrays are one device's.
            with jax_defaults(), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return inner(*operands)

        return local

    def _with_parts(self, where: Where) -> Mapping[str, Any]:
        """The parameters, with the mesh axes that the labels are split over whose parts an implementation puts together (`Op.across`)."""
        own = {x: names for x, names in where.items() if x.rstrip(string.digits) in self.primitive.op.across}
        return {**self.params, "across": tuple(own.items())} if own else self.params

    def _call(self, where: Where) -> Meaning:
        summed = [names for label, names in where.items() if label in self.labels.contracted]
        parts = self.primitive.op.summed_call(self.params) if summed else None
        if parts is None:
            return functools.partial(self.body, self.params)
        axes = tuple(n for names in summed for n in names)

        def call(*operands: Array) -> list[Array]:
            known = dict(zip(self.params["present"], operands, strict=True))
            if parts.part is not None:
                part = parts.part(known)
            else:
                part = self.body(parts.params, *(known[slot] for slot in parts.params["present"]))[0]
            return parts.finish(lax.psum(part, axes), known)

        return call

    def _votes(self, mesh: Mesh, tensors: Sequence[Any]) -> Counter[tuple[str, tuple[str, ...]]]:
        """(label, the mesh axes it is split over) -> bytes that XLA has so."""
        votes: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for axes, t in zip(self.labels.tensors, tensors, strict=False):
            for axis, names in zip(axes, _placing(t, mesh), strict=True):
                if names and axis is not None:
                    votes[axis.label, names] += math.prod(t.shape) * np.dtype(t.dtype).itemsize
        return votes

    def _shard_shape(self, where: Where, mesh: Mesh) -> tuple[int, ...]:
        """The shape of the part of out that one device has."""
        return tuple(
            size // math.prod(mesh.shape[n] for n in _names(axis, where))
            for axis, size in zip(self.labels.by_name["out"], self.params["shape"], strict=True)
        )

    def _linear(self, where: Where, mesh: Mesh, *operands: Array) -> list[Array]:
        """Tangent or cotangent of one shard, and the sums over devices that each result needs."""
        params = {**self.params, "shape": self._shard_shape(where, mesh)}
        sums = {slot: _axes_of(labels, where) for slot, labels in self.labels.summed.items()}
        if self.primitive.role == "cotangent":
            grads = self.body(params, *operands)
            return [_sum(g, sums[slot]) for g, slot in zip(grads, sums, strict=True)]
        every = tuple(dict.fromkeys(n for names in sums.values() for n in names))
        first = len(operands) - len(sums)
        moving = [
            _once(t, [n for n in every if n not in own]) for t, own in zip(operands[first:], sums.values(), strict=True)
        ]
        return [_sum(t, every) for t in self.body(params, *operands[:first], *moving)]


def _sum(part: Array, axes: Sequence[str]) -> Array:
    return lax.psum(part, tuple(axes)) if axes else part


def _once(tangent: Array, axes: Iterable[str]) -> Array:
    """A tangent that is the same on all devices along these mesh axes and whose term is to be added up once."""
    for axis in axes:
        tangent = jnp.where(lax.axis_index(axis) == 0, tangent, jnp.zeros_like(tangent))
    return tangent


def _names(axis: Any, where: Where) -> tuple[str, ...]:
    return () if axis is None else where.get(axis.label, ())


def _axes_of(labels: Iterable[str], where: Where) -> tuple[str, ...]:
    return tuple(n for label in labels for n in where.get(label, ()))


def _spec(axes: Sequence[Any], where: Where) -> PartitionSpec:
    return PartitionSpec(*(_names(axis, where) or None for axis in axes))


def _axes_of_entry(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a `PartitionSpec`: None, a name or several."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _placing(tensor: Any, mesh: Mesh) -> list[tuple[str, ...]]:
    """For each axis of a tensor the mesh axes it is split over, the one of the longest stride first."""
    rank = len(tensor.shape)
    spec = getattr(tensor.sharding, "spec", None)
    if spec is not None:
        return [_axes_of_entry(e) for e in (*spec, *(None,) * (rank - len(spec)))]
    if tensor.sharding is None:
        return [()] * rank
    held = _held(tensor)
    indices = [held[d] for d in mesh.devices.flat]
    starts = [np.reshape([index[i].start or 0 for index in indices], mesh.devices.shape) for i in range(rank)]
    return [_split_along(s, mesh) for s in starts]


def _held(tensor: Any) -> Mapping[Any, tuple[slice, ...]]:
    """Which part each device holds, as of a tensor whose axes are as long as there are devices: any number of parts divides those."""
    return tensor.sharding.devices_indices_map((len(tensor.sharding.device_set),) * len(tensor.shape))


def _split_along(starts: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes along which the first index that a device holds moves, in order; none if they do not tell it."""
    steps = {name: np.diff(starts, axis=i) for i, name in enumerate(mesh.axis_names) if mesh.shape[name] > 1}
    names = sorted((n for n, s in steps.items() if s.any()), key=lambda n: -int(steps[n].flat[0]))
    rank = np.zeros((), int)
    for name in names:
        at = mesh.axis_names.index(name)
        along = np.arange(mesh.shape[name]).reshape([-1 if i == at else 1 for i in range(starts.ndim)])
        rank = rank * mesh.shape[name] + along
    chunk = int(starts.max()) // max(math.prod(mesh.shape[n] for n in names) - 1, 1)
    return tuple(names) if np.array_equal(starts, np.broadcast_to(rank * chunk, starts.shape)) else ()
