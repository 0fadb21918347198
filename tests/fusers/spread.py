"""Whole layers whose heads and inner features are spread over devices, Megatron's way. Trials for test_layers_over_devices.py, whose cases
have their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fusionlab as fl

from .transformer import layer_parts as parts
from .transformer.layer_parts import SMAX, STEP, B, E, Params, Parts, T

Array = jax.Array
HEADS = 16  # so that there is one for each of 8 devices, and two queries to a key
PASSES = tuple(
    f"multi_devices_multi_transformer_{kind}{fused}" for kind in ("encoder", "decoder") for fused in ("", "_fuse_qkv")
)
ENCODER, _, DECODER, _ = PASSES
COLUMNS = {"q", "k", "v", "up", "gate", "qkv", "qkv_by_head"}
ROWS = {"out", "down"}


def total(x: Array, on_devices: bool) -> Array:
    return lax.psum(x, "tp") if on_devices else x


def spread(how: Parts, on_devices: bool) -> Parts:
    """A layer whose last products are summed over the devices, and their biases added then."""
    inner = how.mlp

    def out(p: Params, mixed: Array) -> Array:
        return total(mixed.reshape(*mixed.shape[:-2], -1) @ p["out"], on_devices) + p["out_bias"]

    def mlp(p: Params, h: Array) -> Array:
        bare = {**p, "down_bias": jnp.zeros(())} if inner is not parts.swiglu else p
        made = total(inner(bare, h), on_devices)
        return made if inner is parts.swiglu else made + p["down_bias"]

    return replace(how, out=out, mlp=mlp)


def gelu(p: Params, h: Array) -> Array:
    return jax.nn.gelu(parts.linear(p, "up", h)) @ p["down"]


def relu(p: Params, h: Array) -> Array:
    return jax.nn.relu(parts.linear(p, "up", h)) @ p["down"]


def spec(name: str) -> P:
    slot = name.removesuffix("_bias")
    if slot in COLUMNS:
        return P("tp") if name.endswith("_bias") else P(None, "tp")
    return P("tp", None) if name in ROWS else P()


PRE = Parts(mlp=gelu)
LLAMA = Parts(norm=parts.rms_norm, attend=parts.attend_grouped, mlp=parts.swiglu)
BY_HEAD = Parts(project=parts.interleaved, mlp=gelu)
POST = Parts(mlp=relu, pre=False)


@dataclass(frozen=True)
class Trial:
    """A program on `devices` devices, and what is found in it: `site`, so many times. `by_rows`: half of them have other rows."""

    name: str
    build: Callable[[bool], tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], Any]]
    devices: int
    site: str
    count: int = 2
    check_vma: bool = True
    by_rows: bool = False


def weights(layers: int = 2, kv_heads: int = HEADS) -> list[Params]:
    made = [dict(parts.params(i, heads=HEADS, kv_heads=kv_heads)) for i in range(layers)]
    for p in made:
        p.pop("qkv", None), p.pop("qkv_bias", None)
    return made


def specs(made: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: spec(path[-1].key), made)


def encoder(how: Parts, kv_heads: int, on_devices: bool) -> Any:
    def fn(made: list[Params], x: Array) -> Array:
        for p in made:
            x = parts.encode(spread(how, on_devices), p, x, parts.causal())
        return x

    made = weights(kv_heads=kv_heads)
    return fn, (made, parts.inputs()), (specs(made), P()), P()


def turned(axes: str) -> Parts:
    """A layer whose products have their axes (b, s, e) in another order when they are summed."""

    def put(product: Array, w: Array) -> Array:
        return jnp.einsum(f"{axes}->bse", lax.psum(jnp.einsum(f"bsn,ne->{axes}", product, w), "tp"))

    return Parts(
        out=lambda p, mixed: put(mixed.reshape(*mixed.shape[:-2], -1), p["out"]) + p["out_bias"],
        mlp=lambda p, h: put(jax.nn.gelu(parts.linear(p, "up", h)), p["down"]) + p["down_bias"],
    )


def in_order(axes: str, on_devices: bool) -> Any:
    """One layer of `turned`."""
    how, made = turned(axes) if on_devices else PRE, weights(1)

    def fn(made: list[Params], x: Array) -> Array:
        return parts.encode(how if on_devices else spread(how, False), made[0], x)

    return fn, (made, parts.inputs()), (specs(made), P()), P()


def scanned(on_devices: bool) -> Any:
    def fn(made: Params, x: Array) -> Array:
        def body(x: Array, p: Params) -> tuple[Array, None]:
            return parts.encode(spread(PRE, on_devices), p, x, parts.causal()), None

        return lax.scan(body, x, made)[0]

    stacked = jax.tree.map(lambda *a: jnp.stack(a), *weights())
    own = {n: P(None, *spec(n)) for n in stacked}
    return fn, (stacked, parts.inputs()), (own, P()), P()


def decoder(how: Parts, kv_heads: int, writes: bool, on_devices: bool) -> Any:
    def fn(made: list[Params], x: Array, cache: list[parts.Pair], step: Array) -> Any:
        pairs = []
        for p, pair in zip(made, cache, strict=True):
            one = spread(how, on_devices)
            x, pair = parts.write(one, p, x, pair, step) if writes else parts.append(one, p, x, pair)
            pairs.append(pair)
        return x, pairs

    made = weights(kv_heads=kv_heads)
    cache = parts.caches(SMAX if writes else T, heads=kv_heads)
    by_head = jax.tree.map(lambda _: P(None, None, "tp"), cache)
    return fn, (made, parts.inputs(B, 1, E), cache, jnp.int32(STEP)), (specs(made), P(), by_head, P()), (P(), by_head)


def trials() -> Iterator[Trial]:
    separate = {n: Trial(f"separate/{n}", partial(encoder, PRE, HEADS), n, ENCODER) for n in (2, 4, 8)}
    yield separate[2]
    yield Trial("append/llama/4/unchecked", partial(decoder, LLAMA, HEADS // 2, False), 4, DECODER, check_vma=False)
    yield from (separate[4], separate[8])
    yield Trial("separate/4/unchecked", partial(encoder, PRE, HEADS), 4, ENCODER, check_vma=False)
    yield Trial("by_head/2", partial(encoder, BY_HEAD, HEADS), 2, ENCODER + "_fuse_qkv")
    yield Trial("by_head/8/unchecked", partial(encoder, BY_HEAD, HEADS), 8, ENCODER + "_fuse_qkv", check_vma=False)
    yield Trial("post/4", partial(encoder, POST, HEADS), 4, ENCODER)
    yield Trial("llama/8", partial(encoder, LLAMA, HEADS // 2), 8, ENCODER)
    yield Trial("scanned/4", scanned, 4, ENCODER, 1)
    for axes in ("esb", "seb", "ebs"):
        yield Trial(f"summed as {axes}", partial(in_order, axes), 2, ENCODER, 1)
    for check in (True, False):
        end = "rows/4" if check else "rows/4/unchecked"
        yield Trial(f"separate/{end}", partial(encoder, PRE, HEADS), 4, ENCODER, 2, check, by_rows=True)
        yield Trial(f"write/{end}", partial(decoder, PRE, HEADS, True), 4, DECODER, 2, check, by_rows=True)
    yield Trial("post/rows/4", partial(encoder, POST, HEADS), 4, ENCODER, by_rows=True)
    yield Trial("by_head/rows/4", partial(encoder, BY_HEAD, HEADS), 4, ENCODER + "_fuse_qkv", by_rows=True)
    yield Trial("llama/rows/8", partial(encoder, LLAMA, HEADS // 2), 8, ENCODER, by_rows=True)
    for writes in (False, True):
        name = "write" if writes else "append"
        for n in (2, 8):
            yield Trial(f"{name}/{n}", partial(decoder, PRE, HEADS, writes), n, DECODER)
        yield Trial(f"{name}/by_head/4", partial(decoder, BY_HEAD, HEADS, writes), 4, DECODER + "_fuse_qkv")
    yield Trial("write/llama/4/unchecked", partial(decoder, LLAMA, HEADS // 2, True), 4, DECODER, check_vma=False)


TRAINED = {f"separate/{n}" for n in (2, 4, 8)}  # names of trials whose train steps are tried as well


def split_rows(specs: Any) -> Any:
    """The same, and the first axis over "data"."""
    return jax.tree.map(lambda spec: P("data", *spec[1:]), specs, is_leaf=lambda s: isinstance(s, P))


def collectives(compiled: Any) -> dict[str, int]:
    """How many of each stand in the compiled program."""
    kinds = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    names = re.findall(kinds, compiled.as_text())
    return {name: names.count(name) for name in sorted(set(names))}


def far(want: Any, got: Any, allowed: float) -> str | None:
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        error = float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) / max(1.0, float(np.max(np.abs(a))))
        if not error <= allowed:
            return f"{error:.2g} off, allowed {allowed:g}"
    return None


def loss(fn: Callable[..., Any], made: Any, *rest: Any) -> Array:
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fn(made, *rest)))


def programs(trial: Trial) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """A trial's program on one device, the same on several, and their arguments."""
    alone, args, _, _ = trial.build(False)
    body, _, given, made = trial.build(True)
    sizes = (2, trial.devices // 2) if trial.by_rows else (1, trial.devices)
    mesh = jax.make_mesh(sizes, ("data", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: trial.devices])
    if trial.by_rows:
        x, *rest = given[1:]
        given = (given[0], *split_rows([x, *rest[:1]]), *rest[1:])  # rows and caches, not the step
        made = split_rows(made)
    return alone, jax.shard_map(body, mesh=mesh, in_specs=given, out_specs=made, check_vma=trial.check_vma), args


def problem(trial: Trial) -> str | None:
    """What is wrong with a trial: what is found, values and gradients against one device, collectives before and after."""
    alone, fn, args = programs(trial)
    found = fl.find(fn, *args, passes=PASSES)
    counts = {name: n for name, n in found.counts().items() if n}
    if counts != {trial.site: trial.count}:
        return f"found {counts}: {[str(r) for r in found.rejections]}"
    fused = fl.fuse(fn, passes=PASSES)
    want = jax.jit(alone)(*args)
    old, new = (jax.jit(f).lower(*args).compile() for f in (fn, fused))
    if why := far(want, fused(*args), 1e-5) or far(want, new(*args), 1e-5):
        return why
    before, after = collectives(old), collectives(new)
    if before != after or set(before) != {"all-reduce"}:
        return f"{before} before, {after} after"
    one, several = (jax.jit(jax.grad(partial(loss, f)))(*args) for f in (alone, fused))
    why = far(one, several, 1e-4)
    return f"gradient {why}" if why else None


def step(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Two steps of gradient descent with momentum on the mean square of the result."""

    def descend(made: Any, x: Array) -> Any:
        speed, values = jax.tree.map(jnp.zeros_like, made), []
        for _ in range(2):
            value, grads = jax.value_and_grad(lambda made: jnp.mean(jnp.square(fn(made, x))))(made)
            speed = jax.tree.map(lambda v, g: 0.9 * v + g, speed, grads)
            made = jax.tree.map(lambda p, v: p - 0.05 * v, made, speed)
            values.append(value)
        return made, values

    return descend


def untrained(trial: Trial) -> str | None:
    """What is wrong with a train step of the fused layers, or with one that is fused once it is differentiated (default passes)."""
    alone, fn, args = programs(trial)
    want = jax.jit(step(alone))(*args)
    if why := far(want, jax.jit(step(fl.fuse(fn, passes=PASSES)))(*args), 1e-5):
        return f"train step: {why}"
    whole = fl.fuse(step(fn))
    counts = whole.findings(*args).counts()
    if counts["gemm_epilogue_grad"] < 8 or counts["dot_product_attention_grad"] < 2:
        return f"train step, fused as a whole: {counts}"
    why = far(want, whole(*args), 1e-5)
    return f"train step, fused as a whole: {why}" if why else None


TRIALS: dict[str, Callable[[], str | None]] = {trial.name: partial(problem, trial) for trial in trials()}
TRIALS |= {f"{trial.name}/train step": partial(untrained, trial) for trial in trials() if trial.name in TRAINED}
