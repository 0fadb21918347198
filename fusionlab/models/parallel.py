"""The encoder of `transformer.py` with heads and hidden features sharded over the devices of a mesh axis, as in Megatron.

Each device holds the columns of `q`, `k`, `v` and `fc1` for its heads and features, and the corresponding rows of `out` and `fc2`. The
results of those two are partial sums: they are summed over the axis, and the bias is added once, after the sum. Norms and residuals are
the same on all devices. If the mesh has another axis, the batch may be sharded over it.

Letters: B batch, T positions, H heads, D features per head, E = H * D, F feed-forward width.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fusionlab.errors import ArgumentError

from .layers import Params, dense, layer_norm
from .transformer import attend_einsum

_COLUMNS = frozenset({"q", "k", "v", "fc1"})
_ROWS = frozenset({"out", "fc2"})


def specs(params: list[Params], axis: str = "tensor") -> Any:
    """The sharding of the parameters of `transformer.init` on a mesh: a tree of `PartitionSpec` like them."""

    def of(path: Any, _: Any) -> PartitionSpec:
        *_, layer, name = (key.key for key in path if hasattr(key, "key"))
        if layer in _COLUMNS:
            return PartitionSpec(None, axis) if name == "w" else PartitionSpec(axis)
        return PartitionSpec(axis, None) if layer in _ROWS and name == "w" else PartitionSpec()

    return jax.tree.map_with_path(of, params)


def place(tree: Any, mesh: Any, spec: Any) -> Any:
    """Arrays laid out on a mesh; `spec` is one `PartitionSpec` for all, or a tree of them like `tree`."""
    if isinstance(spec, PartitionSpec):
        return jax.device_put(tree, NamedSharding(mesh, spec))
    return jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, spec)


def block(params: Params, x: jax.Array, *, head_size: int, axis: str, causal: bool = False) -> jax.Array:
    """One device's part of a block, inside `shard_map`: `[B, T, E]` -> `[B, T, E]`, the same on all devices of the axis."""
    with jax.named_scope("ln1"):
        h = layer_norm(params["ln1"], x)
    with jax.named_scope("attention"):
        p = params["attention"]
        q, k, v = (dense(p[n], h).reshape(*h.shape[:2], -1, head_size) for n in ("q", "k", "v"))
        x = x + _summed(p["out"], attend_einsum(q, k, v, causal).reshape(*h.shape[:2], -1), axis)
    with jax.named_scope("ln2"):
        h = layer_norm(params["ln2"], x)
    with jax.named_scope("mlp"):
        return x + _summed(params["mlp"]["fc2"], jax.nn.gelu(dense(params["mlp"]["fc1"], h)), axis)


def _summed(params: Params, part: jax.Array, axis: str) -> jax.Array:
    """`x @ w + b`, of one device's columns of x and rows of w."""
    return jax.lax.psum(part @ params["w"], axis) + params["b"]


def encoder(
    mesh: Any, params: list[Params], *, heads: int, axis: str = "tensor", rows: str | None = None, causal: bool = False
) -> Callable[[list[Params], jax.Array], jax.Array]:
    """The function of (params, x `[B, T, E]`) that runs the stack on all devices of a mesh; params as `place(params, mesh, specs(params))`.

    Args:
      mesh: a `jax.sharding.Mesh` with the axis.
      params: from `transformer.init`; only the structure and the shapes are used.
      heads: H, over all devices.
      axis: the mesh axis over which heads and features are sharded.
      rows: the mesh axis over which the batch is sharded; None for none.
      causal: a query sees no later key.

    Raises:
      ArgumentError: the mesh has no such axis, or H or F is not a multiple of its size.
    """
    if missing := [a for a in (axis, rows) if a is not None and a not in mesh.shape]:
        raise ArgumentError(f"axis: the mesh has no {missing[0]!r}; it has {', '.join(map(str, mesh.shape))}")
    embed, ffn = params[0]["mlp"]["fc1"]["w"].shape
    for name, size in (("heads", heads), ("F", ffn)):
        if size % mesh.shape[axis]:
            raise ArgumentError(f"{name}: got {size} for {mesh.shape[axis]} devices of {axis!r}; needed a multiple")

    def run(params: list[Params], x: jax.Array) -> jax.Array:
        for i, layer in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = block(layer, x, head_size=embed // heads, axis=axis, causal=causal)
        return x

    batch = PartitionSpec(rows)
    return jax.shard_map(run, mesh=mesh, in_specs=(specs(params, axis), batch), out_specs=batch)
