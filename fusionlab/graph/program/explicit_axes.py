"""Types on meshes with explicit axes, where the sharding of a value is part of its type, like its shape.

The replacement of a site is traced with the site's types. JAX's rules for these types apply to it as to the program: a replacement that
they reject (a sum over a sharded axis without a given output sharding) is not possible.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, get_abstract_mesh, use_abstract_mesh

from ..jax_compat import sharding_type_error
from ..settings import unwrapped


def sharding_in_type(aval: Any) -> NamedSharding | None:
    """The sharding of a value that is part of its type; None where its mesh has no explicit axes, or it has no mesh."""
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in (sharding.mesh.axis_types or ()):
        return None
    return sharding


def is_split_in_type(aval: Any) -> bool:
    """Whether a value is typed as split over explicit mesh axes."""
    sharding = sharding_in_type(aval)
    return sharding is not None and any(axis is not None for axis in sharding.spec)


def is_typed_by_mesh(avals: Iterable[Any]) -> bool:
    """Whether a sharding is part of one of some types."""
    return any(sharding_in_type(a) is not None for a in avals)


@contextlib.contextmanager
def mesh_of(avals: Iterable[Any]) -> Iterator[None]:
    """A context for tracing on the mesh of some types, whatever its axes, or on none; on the current mesh if they do not tell.

    The current mesh alone is not enough: inside a shard_map and under `auto_axes`, a value's mesh is a different one.
    """
    meshes = [mesh for a in avals if (mesh := _mesh(a)) is not None]
    found = next((m for m in meshes if not m.empty), meshes[0] if meshes else None)
    with same_mesh() if found in (None, get_abstract_mesh()) else on_mesh(found):
        yield


def same_mesh() -> contextlib.AbstractContextManager[Any]:
    """A context that sets the current mesh explicitly; if there is none, an empty mesh, under which JAX transposes.

    No mesh and an empty mesh are different keys of JAX's caches, so JAX would trace each of its own functions twice.
    """
    return use_abstract_mesh(get_abstract_mesh())


def _mesh(aval: Any) -> AbstractMesh | None:
    """The mesh of a traced value's type, an empty one on no mesh. Of an array it is no part of the type, if its axes are auto."""
    if (sharding := sharding_in_type(aval)) is not None:
        return sharding.mesh.abstract_mesh
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, AbstractMesh) else None


@contextlib.contextmanager
def on_mesh(mesh: AbstractMesh) -> Iterator[None]:
    """A context for tracing on a mesh, whatever the current one: by way of none, because JAX rejects a change to a different size."""
    with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh):
        yield


def as_argument(aval: Any, weak: bool = False) -> Any:
    """A type in the form with which JAX traces: shape, dtype, and the sharding if it is part of the type; `weak`: weakly typed."""
    if sharding_in_type(aval) is None:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
    return aval if isinstance(aval, jax.ShapeDtypeStruct) else aval.update(weak_type=weak)


def make_typed_jaxpr(fn: Callable[..., Any], avals: Sequence[Any], **options: Any) -> Any:
    """`jax.make_jaxpr` at types, explicit shardings included."""
    with mesh_of(avals):
        return jax.make_jaxpr(fn, **options)(*map(as_argument, avals))


def typed_shapes(fn: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """`jax.eval_shape` of FusionLab's own views of operands, at types, explicit shardings included."""
    with mesh_of(avals), unwrapped():
        return jax.eval_shape(fn, *map(as_argument, avals))


def resharded(x: Any, aval: Any) -> Any:
    """`x` with the explicit sharding of `aval`: a replacement gets the sharding that the program requested."""
    wanted = sharding_in_type(aval)
    return jax.sharding.reshard(x, wanted) if wanted is not None and jax.typeof(x).sharding != wanted else x


def placeless(params: dict[str, Any]) -> dict[str, Any]:
    """An equation's parameters without its output sharding, to compute it on one device."""
    return params | {name: None for name in ("sharding", "out_sharding") if name in params}


def spec_text(sharding: NamedSharding) -> str:
    """ "P('data', None)"."""
    return f"P({', '.join(map(repr, sharding.spec))})"


class Misplaced(Exception):  # noqa: N818 - an answer to the search, not an error of the user's
    """JAX cannot type the replacement of a site on explicit mesh axes; the message is the reason. It becomes the outcome of a proof."""


@contextlib.contextmanager
def placing(avals: Iterable[Any]) -> Iterator[None]:
    """A context for tracing the replacement of values of these types.

    Raises:
      Misplaced: JAX rejects it because of their explicit shardings. If they have none, errors propagate.
    """
    try:
        yield
    except refusals() as error:
        if not is_typed_by_mesh(avals):
            raise
        raise Misplaced(str(error).partition(". ")[0].partition("\n")[0].rstrip(".")) from error


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """The errors that JAX raises for operands of incompatible types, or for which an operation has no rule."""
    return sharding_type_error(_ambiguous), ValueError, NotImplementedError


def _ambiguous() -> None:
    """A sum over a sharded axis without an output sharding."""
    mesh = AbstractMesh((1,), ("a",), axis_types=(AxisType.Explicit,))
    row = jax.ShapeDtypeStruct((2,), "float32", sharding=NamedSharding(mesh, PartitionSpec("a")))
    with on_mesh(mesh):
        jax.eval_shape(jax.numpy.dot, row, row)
