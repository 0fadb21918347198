"""Experts, and blocks that are split over devices: mixtures, and Megatron's tensor parallelism in shard_map."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..config import Moe, Parallel
from ..model import Built, Model, activations, assemble, structs
from .structured import attention, layer_shapes, norm

Array = jax.Array
Params = dict[str, Array]
AXIS = "devices"
COLUMNS, ROWS, VECTOR, WHOLE = (
    PartitionSpec(None, AXIS),
    PartitionSpec(AXIS, None),
    PartitionSpec(AXIS),
    PartitionSpec(),
)
# How a layer's parameters are split: by columns, with their bias, or by rows, with a bias that every device has.
SPLITS = {
    **dict.fromkeys(("query", "key", "value", "up"), COLUMNS),
    **{f"{name}_bias": VECTOR for name in ("query", "key", "value", "up")},
    "output": ROWS,
    "down": ROWS,
}


def mesh(devices: int) -> Any:
    """A mesh of that many devices if this machine shows them (see XLA's `--xla_force_host_platform_device_count`).

    Otherwise an abstract mesh, with which a program can be traced but not run.
    """
    kinds = (jax.sharding.AxisType.Auto,)
    if len(jax.devices()) >= devices:
        return jax.make_mesh((devices,), (AXIS,), axis_types=kinds, devices=jax.devices()[:devices])
    return jax.sharding.AbstractMesh((devices,), (AXIS,), axis_types=kinds)


def column(p: Params, name: str, x: Array) -> Array:
    return x @ p[name] + p[f"{name}_bias"]


def row(p: Params, name: str, x: Array) -> Array:
    """The product of a slice of the rows, summed over the devices, and then the bias."""
    return jax.lax.psum(x @ p[name], AXIS) + p[f"{name}_bias"]


def feed_forward(p: Params, x: Array) -> Array:
    return row(p, "down", jax.nn.gelu(column(p, "up", x)))


def block(config: Parallel, p: Params, x: Array) -> Array:
    """What one device does: its share of the heads and of the hidden units."""
    if not config.attention:
        return feed_forward(p, x)
    h = norm(p, "first", x)
    q, k, v = (column(p, name, h).reshape(*h.shape[:2], -1, config.sizes.head) for name in ("query", "key", "value"))
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    x = x + row(p, "output", attention(q, k, v, mask).reshape(*x.shape[:2], -1))
    return x + feed_forward(p, norm(p, "second", x))


def build_parallel(config: Parallel, dtype: Any) -> Built:
    shapes = layer_shapes(config.sizes)
    if not config.attention:
        shapes = {name: shape for name, shape in shapes.items() if name.startswith(("up", "down"))}
    specs = {name: SPLITS.get(name, WHOLE) for name in shapes}
    split = jax.shard_map(
        partial(block, config),
        mesh=mesh(config.devices),
        in_specs=(specs, WHOLE),
        out_specs=WHOLE,
        check_vma=config.checked,
    )
    return assemble(split, structs(shapes, dtype), [activations(config, dtype)], config)


def soft_mixture(p: Params, x: Array) -> Array:
    """Every expert sees every token; the results are weighted by the router."""
    gates = jax.nn.softmax(x @ p["router"])
    h = jax.nn.relu(jnp.einsum("btd,edf->btef", x, p["up"]) + p["up_bias"])
    y = jnp.einsum("btef,efd->bted", h, p["down"]) + p["down_bias"]
    return jnp.einsum("bte,bted->btd", gates, y)


def dispatched(p: Params, x: Array, capacity: int = 6) -> Array:
    """Each token travels to its best expert, into one of `capacity` places there, and back."""
    gates = jax.nn.softmax(x @ p["router"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), gates.shape[-1], dtype=x.dtype)
    place = (jnp.cumsum(chosen, axis=1) * chosen).max(-1) - 1
    slots = jax.nn.one_hot(place.astype(jnp.int32), capacity, dtype=x.dtype)
    routes = chosen[..., None] * slots[:, :, None]
    sent = jnp.einsum("btec,btd->ebcd", routes, x)
    h = jax.nn.relu(jnp.einsum("ebcd,edf->ebcf", sent, p["up"]) + p["up_bias"][:, None, None])
    y = jnp.einsum("ebcf,efd->ebcd", h, p["down"]) + p["down_bias"][:, None, None]
    return jnp.einsum("btec,ebcd->btd", routes * gates.max(-1)[..., None, None], y)


def build_mixture(config: Moe, dtype: Any) -> Built:
    sizes = config.sizes
    shapes = {
        "router": (sizes.model, sizes.experts),
        "up": (sizes.experts, sizes.model, sizes.hidden),
        "up_bias": (sizes.experts, sizes.hidden),
        "down": (sizes.experts, sizes.hidden, sizes.model),
        "down_bias": (sizes.experts, sizes.model),
    }
    forward = dispatched if config.dispatch else soft_mixture
    return assemble(forward, structs(shapes, dtype), [activations(config, dtype)], config)


def _parallel(name: str, **fields: Any) -> Model:
    config = Parallel(**fields)
    return Model(name, "structured", config, partial(build_parallel, config))


def _mixture(name: str, **fields: Any) -> Model:
    config = Moe(**fields)
    return Model(name, "structured", config, partial(build_mixture, config))


MODELS: tuple[Model, ...] = (
    _parallel("parallel_mlp"),
    _parallel("parallel_mlp_unchecked", checked=False),
    _parallel("parallel_mlp_of_4", devices=4, optimizer="sgd"),
    _parallel("parallel_layer", attention=True),
    _parallel("parallel_layer_unchecked", attention=True, checked=False),
    _mixture("mixture"),
    _mixture("mixture_dispatched", dispatch=True),
)
