"""Types on meshes with explicit axes: there the sharding of a value is part of its type, as the shape is.

What stands for a site has the types that the site had, so it is traced with them. JAX's rules for these types then hold for it as for the
program: what they do not give it (a sum over an axis that is split, and nobody said where the result lies) it cannot be.
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
    """Tracing on the mesh that some types stand on, whatever its axes are, or on none; on the one that is set where they do not tell.

    Not on that one alone: inside a shard_map and under `auto_axes` a value's mesh is another.
    """
    meshes = [mesh for a in avals if (mesh := _mesh(a)) is not None]
    found = next((m for m in meshes if not m.empty), meshes[0] if meshes else None)
    with same_mesh() if found in (None, get_abstract_mesh()) else on_mesh(found):
        yield


def same_mesh() -> contextlib.AbstractContextManager[Any]:
    """Tracing on the mesh that is set, said once more: where none is, an empty one, under which JAX transposes.

    None and an empty one are two keys of JAX's caches: it would trace each of its own functions for both.
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
    """Tracing on a mesh, whatever mesh is set: through none, since one of another size is not taken while there is one."""
    with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh):
        yield


def as_argument(aval: Any, weak: bool = False) -> Any:
    """A type in the form that JAX traces with: the shape, the dtype, and the sharding where that is part of it; `weak`: weakly typed."""
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
    """`x`, laid out over explicit axes as `aval` is: what the program asked of a value is asked of what stands for it."""
    wanted = sharding_in_type(aval)
    return jax.sharding.reshard(x, wanted) if wanted is not None and jax.typeof(x).sharding != wanted else x


def placeless(params: dict[str, Any]) -> dict[str, Any]:
    """An equation's parameters without the word of where its result lies on a mesh: to compute it on one device."""
    return params | {name: None for name in ("sharding", "out_sharding") if name in params}


def spec_text(sharding: NamedSharding) -> str:
    """ "P('data', None)"."""
    return f"P({', '.join(map(repr, sharding.spec))})"


class Misplaced(Exception):  # noqa: N818 - an answer to the search, not an error of the user's
    """JAX has no type for what would stand for a site on explicit mesh axes; the message says why. It becomes the outcome of a proof."""


@contextlib.contextmanager
def placing(avals: Iterable[Any]) -> Iterator[None]:
    """Around the tracing of what would stand for values of these types.

    Raises:
      Misplaced: JAX refuses it for their explicit shardings. Where they have none, whatever is raised is no answer.
    """
    try:
        yield
    except refusals() as error:
        if not is_typed_by_mesh(avals):
            raise
        raise Misplaced(str(error).partition(". ")[0].partition("\n")[0].rstrip(".")) from error


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """What JAX raises for operands whose types do not go together, or for which an operation has no rule."""
    return sharding_type_error(_ambiguous), ValueError, NotImplementedError


def _ambiguous() -> None:
    """A sum over an axis that is split, and no word of where the result lies."""
    mesh = AbstractMesh((1,), ("a",), axis_types=(AxisType.Explicit,))
    row = jax.ShapeDtypeStruct((2,), "float32", sharding=NamedSharding(mesh, PartitionSpec("a")))
    with on_mesh(mesh):
        jax.eval_shape(jax.numpy.dot, row, row)
