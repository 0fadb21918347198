"""Programs on four devices that are fused: sharded jit, and shard_map with check_vma and without. Trials for test_rewrite.py, whose cases
have their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusionlab as fl

Array = Any
SHAPES = ((8, 6), (6, 12), (12,))


def rows(x: Array, w: Array, b: Array) -> Array:
    """Data parallel: each device has rows."""
    return jax.nn.gelu(x @ w + b)


def columns(x: Array, w: Array, b: Array) -> Array:
    """Tensor parallel: each device has features, summed afterwards."""
    return jax.lax.psum(jax.nn.relu(x @ w + b) @ w.T, "d")


SPECS = {rows: ((P("d"), P(), P()), P("d")), columns: ((P(), P(None, "d"), P("d")), P())}


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((4,), ("d",), axis_types=(kind,), devices=jax.devices()[:4])


def placed(mesh: Any, specs: tuple[P, ...]) -> list[Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    args = [jax.random.normal(k, s) for k, s in zip(keys, SHAPES, strict=True)]
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]


def same(fn: Callable[..., Array], fused: Callable[..., Array], args: list[Array]) -> None:
    """Asserts that values and gradients are, and how those are sharded."""

    def graded(f: Callable[..., Array]) -> Callable[..., Any]:
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2)))

    want, got = graded(fn)(*args), graded(fused)(*args)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-5, atol=2e-5), got, want)
    assert [g.sharding.spec for g in got[1]] == [e.sharding.spec for e in want[1]]


def sharded(kind: AxisType) -> None:
    args = placed(mesh_of(kind), SPECS[rows][0])
    fused = fl.fuse(rows)
    assert fused.findings(*args).counts()["gemm_epilogue"] == 1
    same(rows, fused, args)


def mapped(kind: AxisType, fn: Callable[..., Array], check: bool) -> None:
    mesh, (in_specs, out_specs) = mesh_of(kind), SPECS[fn]
    args = placed(mesh, in_specs)
    over = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check)
    fused = fl.fuse(over)
    found = fused.findings(*args)
    assert found.counts()["gemm_epilogue"] == 1, found.rejections
    graph = found.apply()
    (owner,) = [n for n in graph.nodes() if n.primitive == "shard_map"]
    assert owner.params["check_vma"] is check
    assert "gemm_epilogue" in [n.primitive for n in owner.blocks[0].nodes]
    psums = [sum("psum" in n.primitive for n in g.nodes()) for g in (found.graph, graph)]
    assert psums[0] == psums[1] == (1 if fn is columns else 0), psums
    same(over, fused, args)


def trials() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every trial by name; checked and unchecked are shard_map's check_vma."""
    for kind in (AxisType.Auto, AxisType.Explicit):
        yield f"jit {kind.name} rows", partial(sharded, kind)
        for fn in SPECS:
            for check in (True, False):
                how = "checked" if check else "unchecked"
                yield f"{how} {kind.name} {fn.__name__}", partial(mapped, kind, fn, check)


TRIALS: dict[str, Callable[[], None]] = dict(trials())
