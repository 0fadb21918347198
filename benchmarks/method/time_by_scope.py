"""Whether time by scope adds up, on this device: a train step of a scanned transformer with named scopes, before and after fusing.

    python -m benchmarks time_by_scope                          GPT-2 124M's sizes, on a GPU
    python -m benchmarks time_by_scope --layers 2 --width 64 --tokens 64 --batch 2 --words 256    for a trial on a CPU

It prints the tree and checks: the rows' own seconds are the run; nearly all of the kernels' time has a node; each step of the scan is a
launch; the busy time agrees with the sum of the kernels' medians; and the slices of the written trace add up to the busy time. Exit
status 1 where not.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path
from typing import Any

LEAST_PLACED = 0.95


def step_of(layers: int, width: int, words: int) -> tuple[Any, dict[str, Any]]:
    """(an SGD step of (parameters, tokens), its parameters)."""
    import jax
    import jax.numpy as jnp

    scope, heads = jax.named_scope, max(1, width // 64)

    def norm(p: Any, x: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * p[0] + p[1]

    def attention(p: Any, x: Any) -> Any:
        q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], heads, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype), v)
        return mixed.reshape(x.shape) @ p["out"]

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        with scope("layer"):
            with scope("attention"):
                x = x + attention(p, norm(p["norm1"], x))
            with scope("mlp"):
                return x + jax.nn.gelu(norm(p["norm2"], x) @ p["up"] + p["bias"]) @ p["down"], None

    def loss(p: Any, tokens: Any) -> Any:
        with scope("embed"):
            x = p["embed"][tokens]
        x = jax.lax.scan(layer, x, p["layers"])[0]
        with scope("head"):
            logits = (x @ p["embed"].T).astype(jnp.float32)
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()

    def train_step(p: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, tokens)
        with scope("update"):
            return value, jax.tree.map(lambda a, g: a - (1e-3 * g).astype(a.dtype), p, grads)

    return train_step, parameters(layers, width, words)


def parameters(layers: int, width: int, words: int) -> dict[str, Any]:
    from ..measuring import normal

    def stacked(seed: int, *shape: int) -> Any:
        return normal(seed, layers, *shape, scale=shape[0] ** -0.5)

    sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    found = {name: stacked(i, *shape) for i, (name, shape) in enumerate(sizes.items())}
    norms = {n: (1 + 0 * stacked(5, width), 0 * stacked(6, width)) for n in ("norm1", "norm2")}
    return {"embed": normal(9, words, width, scale=0.02), "layers": found | norms | {"bias": 0 * stacked(7, 4 * width)}}


def checked(times: Any, layers: int, trace: Path) -> dict[str, Any]:
    """Check -> what was seen; a check that failed begins with "FAILED"."""
    seen: dict[str, Any] = {}

    def check(name: str, ok: bool, told: str) -> None:
        seen[name] = told if ok else f"FAILED: {told}"

    for name, version, part in (("before", times.before, "self_s"), ("after", times.after, "fused_self_s")):
        if version is None:
            continue
        rows, placed = sum(getattr(r, part) for r in times.rows), sum(version.seconds.values())
        busy = placed + version.unplaced_s
        check(f"rows, {name}", abs(rows / version.whole_s - 1) < 1e-9, f"{rows:.6f} s of {version.whole_s:.6f} s")
        check(f"placed, {name}", placed >= LEAST_PLACED * busy, f"{placed / busy:.2%} of all kernels' time")
        medians = version.kernels.sum_s
        check(f"medians, {name}", 0.7 < busy / medians < 1.25, f"busy {busy:.6f} s, sum of medians {medians:.6f} s")
    data = json.loads(gzip.decompress(times.save(trace).read_bytes()))
    for pid, name in ((1, "before"), (2, "after"))[: 1 + (times.after is not None)]:
        mine = [e for e in data["traceEvents"] if e["pid"] == pid and e["ph"] == "X"]
        kernels, (run,) = [e for e in mine if e["cat"] == "kernel"], [e for e in mine if e["cat"] == "run"]
        shares = sum(e["args"]["share_us"] for e in kernels)
        busy_us = run["args"]["busy_us"]
        check(
            f"trace, {name}",
            abs(shares / busy_us - 1) < 1e-6,
            f"{len(kernels)} slices, {shares:.1f} of {busy_us:.1f} us",
        )
        inside = all(e["ts"] >= -0.01 and e["ts"] + e["dur"] <= run["dur"] + 0.01 for e in mine)
        steps = max(e["args"]["launch"] for e in kernels)
        check(f"run, {name}", inside and steps >= layers, f"all slices lie in it; most launches of a kernel {steps}")
    return seen


def wall_s(fn: Any, *args: Any) -> float:
    """The median of a call's seconds, without a profiler."""
    import jax

    jax.block_until_ready(fn(*args))
    samples = []
    for _ in range(9):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        samples.append(time.perf_counter() - start)
    return sorted(samples)[4]


def main(argv: list[str]) -> int:
    import jax

    import fusionlab as fl

    parser = argparse.ArgumentParser(prog="python -m benchmarks time_by_scope", description=__doc__)
    for name, size in (("layers", 12), ("width", 768), ("tokens", 1024), ("batch", 8), ("words", 50304), ("runs", 5)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument(
        "--trace", type=Path, default=Path("time_by_scope.perfetto.json.gz"), help="where the run is written"
    )
    options = parser.parse_args(argv)
    train_step, p = step_of(options.layers, options.width, options.words)
    tokens = jax.random.randint(jax.random.key(1), (options.batch, options.tokens), 0, options.words)
    start = time.perf_counter()
    times = fl.time_by_scope(fl.fuse(train_step), p, tokens, runs=options.runs)
    print(times)
    print(
        f"took {time.perf_counter() - start:.1f} s; without a profiler a call takes {wall_s(jax.jit(train_step), p, tokens):.6f} s"
    )
    seen = checked(times, options.layers, options.trace)
    print("\n".join(f"{name}: {told}" for name, told in seen.items()))
    return int(any(told.startswith("FAILED") for told in seen.values()))
