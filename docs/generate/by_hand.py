"""Programs for the rejection codes that no near miss of the tests has: each needs a device, a mesh or symbolic sizes."""

from __future__ import annotations

import functools

from .programs import Program, run

_ATTENTION = """
import jax
import jax.numpy as jnp
import fusionlab as fl

def attention(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * 0.25)
    return jnp.einsum("bhts,bshd->bthd", weights, v)

q = {q}
print(fl.find(attention, q, q, q, passes="dot_product_attention", {asked}))
"""
_SMALL = "jnp.zeros((2, 8, 2, 16))"
_TEXTS = {
    "implementation": _ATTENTION.format(q=_SMALL, asked='implementation="cuda"'),
    "device": _ATTENTION.format(q=_SMALL, asked='device="sm_75"'),
    "unmeasured": _ATTENTION.format(q=_SMALL, asked='device="sm_90"'),
    "slower": _ATTENTION.format(q='jax.ShapeDtypeStruct((8, 1024, 16, 64), "float32")', asked='device="sm_90"'),
    "symbolic": """
import jax
import fusionlab as fl

def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

(b,) = jax.export.symbolic_shape("b")
x = jax.ShapeDtypeStruct((b, 16), "float32")
print(fl.find(norm, x, passes="layer_norm"))
""",
    "sharding": """
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import fusionlab as fl

mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])

def program(x, w, b):
    h = jax.sharding.reshard(x @ w, PartitionSpec(None, None))
    return jax.nn.relu(h + b)

x = jax.device_put(jnp.zeros((8, 16)), NamedSharding(mesh, PartitionSpec("d", None)))
w = jax.device_put(jnp.zeros((16, 16)), NamedSharding(mesh, PartitionSpec(None, None)))
b = jax.device_put(jnp.zeros(16), NamedSharding(mesh, PartitionSpec(None)))
with jax.set_mesh(mesh):
    print(fl.find(program, x, w, b, passes="gemm_epilogue"))
""",
}
# Code -> why no small program gets it.
WITHOUT: dict[str, str] = {
    "order": "It takes a pass whose sites give several results, two of which feed the operands of one another's sites.",
    "region": "It takes a shard_map, and a site whose operands vary along mesh axes in a way that the fused op's type cannot have.",
    "rotary": "It takes a whole transformer layer: for example one that turns only the queries, or that pairs neighbouring features.",
    "uncertified": "It is a safety net: every primitive of the examples can be evaluated. Set FUSIONLAB_RAISE=1 to get the error itself.",
}


@functools.cache
def programs() -> dict[str, Program]:
    """Code -> a program that gets it."""
    return {code: run(text.lstrip()) for code, text in _TEXTS.items()}
