"""A program for each pass in which it finds a site: the pass's own sample, or for whole layers a layer."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from fusionlab.fusers import Pass

from .programs import Program, arrays, as_function, function_source, helpers, run, whole

_NORM = """
def norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
"""
_WEIGHTS = 'w = {name: jnp.zeros((16, 16)) for name in ("q", "k", "v", "out")} | {"up": jnp.zeros((16, 32)), "down": jnp.zeros((32, 16))}'
_ONE_WEIGHT = 'w = {"qkv": jnp.zeros((16, 48)), "out": jnp.zeros((16, 16)), "up": jnp.zeros((16, 32)), "down": jnp.zeros((32, 16))}'
_SPREAD = """
mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
whole = jax.sharding.PartitionSpec()
layer = jax.shard_map(layer, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
"""


@functools.cache
def example(pass_: Pass) -> Program:
    """A program in which the pass finds one site, with what it prints."""
    return run(_layer(pass_) if pass_.op == "multi_transformer" else _sample(pass_))


def asked(pass_: Pass) -> str:
    """How the pass is asked for in its example."""
    device, options = pass_.sample_for
    given = ", ".join(f"{key}={value!r}" for key, value in options.items()).replace("'", '"')
    passes = f"passes=fl.Strategy({pass_.name}=dict({given}))" if options else f'passes="{pass_.name}"'
    return passes if device == "cpu" else f'{passes}, device="{device}"'


def _sample(pass_: Pass) -> str:
    fn, args = pass_.sample()
    node, module = function_source(fn)
    name = fn.__name__ if fn.__name__ != "<lambda>" else "program"
    names = list(inspect.signature(fn).parameters)
    outside = inspect.getclosurevars(fn).nonlocals
    body = [*map(_constant, outside, outside.values()), *helpers(node, module), "", *as_function(node, name, module)]
    return whole(body, [*arrays(names, args), f"print(fl.find({name}, {', '.join(names)}, {asked(pass_)}))"])


def _constant(name: str, value: Any) -> str:
    """A small array that a function reads from around it."""
    return f"{name} = jnp.array({value.tolist()}, jnp.{value.dtype})"


def _layer(pass_: Any) -> str:
    """One transformer layer, as small as one can be, as the pass is for."""
    total = 'jax.lax.psum({}, "tp")' if pass_.spread else "{}"
    cache = ["    k, v = jnp.concatenate([keys, k], 1), jnp.concatenate([values, v], 1)"] if pass_.decoder else []
    products = 'jnp.split(h @ w["qkv"], 3, -1)' if pass_.fused else 'h @ w["q"], h @ w["k"], h @ w["v"]'
    names = "w, x, keys, values" if pass_.decoder else "w, x"
    body = [
        *_NORM.strip().splitlines(),
        "",
        f"def layer({names}):",
        "    h = norm(x)",
        f"    q, k, v = {products}",
        "    q, k, v = (p.reshape(*p.shape[:2], 2, 8) for p in (q, k, v))",
        *cache,
        '    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 8**0.5, -1)',
        '    attended = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)',
        "    x = x + " + total.format('attended @ w["out"]'),
        "    y = x + " + total.format('jax.nn.relu(norm(x) @ w["up"]) @ w["down"]'),
        f"    return {'y, k, v' if pass_.decoder else 'y'}",
        *(["", *_SPREAD.strip().splitlines()] if pass_.spread else []),
    ]
    given = [
        _ONE_WEIGHT if pass_.fused else _WEIGHTS,
        f"x = jnp.zeros((2, {1 if pass_.decoder else 8}, 16))",
        *(["keys = values = jnp.zeros((2, 8, 2, 8))"] if pass_.decoder else []),
    ]
    return whole(body, [*given, f"print(fl.find(layer, {names}, {asked(pass_)}))"])
