"""Values of the program's own types: what stands for a value has its weakness and its sharding, too.

A Python number is weakly typed, and so is what a program makes of Python numbers alone: beside an array of bfloat16 it gives way. A
fused op's result is never weak. Over explicit mesh axes the layout is part of the type as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from .compat import has_explicit_axes, with_weakness
from .emit import inlined
from .ir import Value
from .manual import is_weak, make_jaxpr


def strong(atoms: Sequence[Any], numbers: Collection[int], info: Any) -> tuple[list, list]:
    """(equations, atoms) of what an op is given, some of it cast to be strong: the transpose of that cast makes a gradient weak again."""
    return _mapped(
        atoms, [(lambda x: with_weakness(x, False)) if i in numbers else None for i in range(len(atoms))], info
    )


def as_typed(
    atoms: Sequence[Any], values: Sequence[Value], info: Any, laid_out: Sequence[Any] = ()
) -> tuple[list, list]:
    """(equations, atoms) of results that are as weak, and laid out, as the values they stand for.

    `laid_out` are the shardings that the results have, where types tell.
    """
    shardings = laid_out or [None] * len(atoms)
    wanted = [_change(a.aval, v.aval, s) for a, v, s in zip(atoms, values, shardings, strict=True)]
    return _mapped(atoms, wanted, info)


def shardings_of(fn: Callable[..., Any], leaves: Sequence[Value], values: Sequence[Value]) -> list[Any]:
    """The shardings of what `fn` makes of the leaves; none where no value is laid out over explicit mesh axes, or inside a shard_map."""
    typed = [v.aval for v in (*leaves, *values) if has_explicit_axes(v.aval)]
    if not typed or any(a.sharding.mesh.manual_axes for a in typed):
        return []
    given = [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.aval.sharding) for v in leaves]
    return [made.sharding for made in jax.tree.leaves(jax.eval_shape(fn, *given))]


def _change(made: Any, wanted: Any, sharding: Any) -> Callable[[Any], Any] | None:
    weak = is_weak(wanted) and not is_weak(made)
    moved = sharding is not None and has_explicit_axes(wanted) and sharding.spec != wanted.sharding.spec
    if not (weak or moved):
        return None

    def change(x: Any) -> Any:
        x = jax.sharding.reshard(x, wanted.sharding) if moved else x
        return with_weakness(x, True) if weak else x

    return change


def _mapped(atoms: Sequence[Any], changes: Sequence[Callable[[Any], Any] | None], info: Any) -> tuple[list, list]:
    eqns: list[Any] = []
    made = list(atoms)
    for i, (atom, change) in enumerate(zip(atoms, changes, strict=True)):
        if change is not None:
            more, (made[i],) = inlined(make_jaxpr(change, [atom.aval], weak=True), [atom], info, None)
            eqns += more
    return eqns, made
