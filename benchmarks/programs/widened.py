"""A Mistral-like layer whose scores are of widened operands, beside the one that asks for a float32 sum, forward and backward.

    python -m benchmarks widened [--json] [-o FILE] [--quick]

`jnp.einsum(..., q.astype(float32), k.astype(float32))` multiplies in float32 what has 16 bits; `preferred_element_type=float32` multiplies
the 16 bits and sums in float32. Both are written by hand for bfloat16 models; the fused op takes either as it was before it was widened.
Times of both, with jax.jit and through fusionlab.fuse, in one run; and the errors of each against float64 on the same numbers, of the
result and of the gradients, at a shorter length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..measuring import compiled_at_once, finish, line, measured, new_record, normal, parser_of, routes


@dataclass(frozen=True)
class Layer:
    """The sizes of Mistral 7B's layer, of one batch."""

    batch: int = 2
    length: int = 4096
    hidden: int = 4096
    heads: int = 32
    key_heads: int = 8
    features: int = 128
    ffn: int = 14336

    @property
    def name(self) -> str:
        return f"B{self.batch} S{self.length} E{self.hidden} H{self.heads}/{self.key_heads} D{self.features} bfloat16"


def layer(size: Layer, widened: bool, p: dict[str, Any], x: Any) -> Any:
    """The layer as it is written by hand: RMSNorm, rotary positions, grouped causal attention, SwiGLU."""
    import jax
    import jax.numpy as jnp

    wide = jnp.promote_types(x.dtype, jnp.float32)

    def norm(x: Any, scale: Any) -> Any:
        h = x.astype(wide)
        return (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale

    def turned(x: Any) -> Any:
        angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(0, size.features, 2) / size.features)
        cos, sin = (jnp.concatenate([f(angles)] * 2, -1)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
        one, two = jnp.split(x, 2, -1)
        return x * cos + jnp.concatenate([-two, one], -1) * sin

    b, t, _ = x.shape
    h = norm(x, p["norm1"])
    q = turned((h @ p["q"]).reshape(b, t, size.heads, size.features))
    k, v = ((h @ p[n]).reshape(b, t, size.key_heads, size.features) for n in "kv")
    k, v = (jnp.repeat(a, size.heads // size.key_heads, axis=2) for a in (turned(k), v))
    if widened:
        s = jnp.einsum("bthd,bshd->bhts", q.astype(wide), k.astype(wide)) * size.features**-0.5
    else:
        s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=wide) * size.features**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((t, t), bool)), s, -1e30), -1).astype(x.dtype)
    y = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(b, t, -1) @ p["o"]
    h = norm(y, p["norm2"])
    return y + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def arguments(size: Layer) -> tuple[Any, ...]:
    """A cotangent, the parameters and x."""
    import jax.numpy as jnp

    e, d, f = size.hidden, size.features, size.ffn
    shapes = {"q": (e, size.heads * d), "k": (e, size.key_heads * d), "v": (e, size.key_heads * d)}
    shapes |= {"o": (size.heads * d, e), "gate": (e, f), "up": (e, f), "down": (f, e)}
    p = {n: normal(i, *s, scale=s[0] ** -0.5) for i, (n, s) in enumerate(shapes.items())}
    p |= {n: jnp.ones(e, jnp.bfloat16) for n in ("norm1", "norm2")}
    return normal(9, size.batch, size.length, e), p, normal(8, size.batch, size.length, e)


def step_of(fn: Callable) -> Callable:
    """(result, gradients) of a cotangent, the parameters and x."""
    import jax

    def step(ct: Any, p: Any, x: Any) -> Any:
        out, pull = jax.vjp(fn, p, x)
        return out, pull(ct)

    return step


def programs_of(size: Layer, forward_alone: bool) -> dict[str, Callable]:
    import fusionlab as fl

    found: dict[str, Callable] = {}
    for name, widened in (("preferred", False), ("widened", True)):
        fn = functools.partial(layer, size, widened)
        whole = (lambda ct, p, x, fn=fn: fn(p, x)) if forward_alone else step_of(fn)
        found |= {f"jax.jit, {name}": whole, f"fusionlab, {name}": fl.fuse(whole)}
    return found


def errors(size: Layer) -> dict[str, Any]:
    """The largest error of each array against float64, by the largest entry, worst of result, gradient of x and of each parameter."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    args = arguments(size)
    with jax.enable_x64(True):
        doubled = jax.tree.map(lambda a: a.astype(jnp.float64), args)
        exact = [
            np.asarray(a) for a in jax.tree.leaves(jax.jit(step_of(functools.partial(layer, size, False)))(*doubled))
        ]
    found = {}
    for name, f in programs_of(size, False).items():
        got = [np.asarray(a, np.float64) for a in jax.tree.leaves(jax.jit(f)(*args))]
        each = [float(np.max(np.abs(g - e)) / np.max(np.abs(e))) for g, e in zip(got, exact, strict=True)]
        found[name] = {"result": each[0], "gradients": each[1:]}
    return found


def main(argv: list[str]) -> int:
    """Prints a line for each measurement and writes the record. Returns the exit status."""
    options = parser_of("widened", __doc__).parse_args(argv)

    from fusionlab.device import Device

    on_cuda = Device.current().platform == "cuda"
    size = Layer() if on_cuda else Layer(1, 32, 64, 4, 2, 16, 96)
    samples = 20 if on_cuda and not options.quick else 3
    record: dict[str, Any] = new_record("widened", options) | {"layer": size.name}
    for name, forward_alone in (("forward", True), ("forward and backward", False)):
        args = arguments(size)
        fused = programs_of(size, forward_alone)
        programs = compiled_at_once({n: (f, args) for n, f in fused.items()})
        record[name] = measured(programs, "fusionlab, preferred", samples)
        record[name]["routes"] = routes(fused["fusionlab, widened"], *args)
        if not options.json:
            print(line(f"{size.name}, {name}", record[name]), flush=True)
    record["errors"] = errors(replace(size, batch=1, length=min(size.length, 512)))
    if not options.json:
        for name, found in record["errors"].items():
            print(
                f"errors against float64, {name}: result {found['result']:.2e}, gradients {max(found['gradients']):.2e}"
            )
    finish(record, options, on_cuda)
    return 0
