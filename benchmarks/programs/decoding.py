"""A decoding step of transformer layers: one op of eight layers by its own kernels, the same by its pieces, and jax.jit, in one run.

    python -m benchmarks decoding [--json] [-o FILE] [--quick] [--only NAME]

One token a text goes through eight pre-norm layers (bf16, GELU, feed-forward 4E, as many key heads as heads) with caches that are full but
for a few positions; caches are donated and carried from call to call, as in a loop. Times are device times of programs that take turns
(see gemm_epilogue.py), a layer each; every sample is kept. Beside them stands what the bytes of weights and caches would take at the rate
at which the device reads memory, measured in the same run. Without a CUDA device `--quick` runs tiny sizes by the host's clock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..measuring import differences, finish, line, measured, new_record, normal, parser_of

LAYERS = 8
SAMPLES = 20
FREE = 6  # positions that the caches have left


@dataclass(frozen=True)
class Case:
    """Sizes; `bar`: the time over jax.jit's, where one is asked for."""

    name: str
    embed: int
    heads: int
    cache: int
    batch: int
    bar: float | None = None

    @property
    def layer_bytes(self) -> int:
        """Of a layer's weights and the caches' filled positions, each read once."""
        return 2 * (12 * self.embed**2 + 2 * self.batch * (self.cache - FREE + 1) * self.embed)


CASES = (
    Case("E4096 H32 cache 1024 batch 1", 4096, 32, 1024, 1, 0.83),
    Case("E4096 H32 cache 1024 batch 16", 4096, 32, 1024, 16, 0.85),
    Case("E1024 H16 cache 512 batch 1", 1024, 16, 512, 1, 0.30),
    Case("E4096 H32 cache 1024 batch 4", 4096, 32, 1024, 4),
    Case("E1024 H16 cache 512 batch 16", 1024, 16, 512, 16),
)
QUICK = (Case("E64 H2 cache 32 batch 2", 64, 2, 32, 2),)


def layers_of(case: Case) -> list[Any]:
    """Random layers."""
    from fusionlab.ops import TransformerLayer

    e, h = case.embed, case.heads
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys("qkv", (e, h, e // h))
    shapes |= {"out": (h, e // h, e), "up": (e, 4 * e), "down": (4 * e, e)}
    vectors = {f"{slot}_bias": (h, e // h) for slot in "qkv"}
    vectors |= {"out_bias": (e,), "up_bias": (4 * e,), "down_bias": (e,), "norm1_bias": (e,), "norm2_bias": (e,)}
    made = []
    for i in range(LAYERS):
        seed = 100 * i
        arrays = {
            slot: normal(seed + n, *s, scale=(4 * e if slot == "down" else e) ** -0.5)
            for n, (slot, s) in enumerate(shapes.items())
        }
        arrays |= {slot: normal(seed + 20 + n, *s, scale=0.1) for n, (slot, s) in enumerate(vectors.items())}
        arrays |= {
            slot: 1 + normal(seed + 40 + n, e, scale=0.1) for n, slot in enumerate(("norm1_scale", "norm2_scale"))
        }
        made.append(TransformerLayer(**arrays))
    return made


def caches_of(case: Case) -> list[tuple[Any, Any]]:
    shape = (case.batch, case.cache, case.heads, case.embed // case.heads)
    return [(normal(7 + 2 * i, *shape), normal(8 + 2 * i, *shape)) for i in range(LAYERS)]


def plain(layers: Sequence[Any], x: Any, caches: Sequence[tuple[Any, Any]], step: Any) -> tuple[Any, list[Any]]:
    """The layers as they are written without the op."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from fusionlab.models.layers import layer_norm

    made = []
    for layer, cache in zip(layers, caches, strict=True):
        h = layer_norm({"scale": layer.norm1_scale, "bias": layer.norm1_bias}, x)
        q, k, v = (
            jnp.einsum("bse,ehd->bshd", h, getattr(layer, slot)) + getattr(layer, f"{slot}_bias") for slot in "qkv"
        )
        keys, values = (
            lax.dynamic_update_slice(old, new, (0, step, 0, 0)) for old, new in zip(cache, (k, v), strict=True)
        )
        scores = jnp.einsum("bshd,bthd->bhst", q, keys).astype(jnp.float32) / q.shape[-1] ** 0.5
        seen = jnp.arange(keys.shape[1]) <= step
        weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=-1).astype(values.dtype)
        mixed = jnp.einsum("bhst,bthd->bshd", weights, values)
        x = x + jnp.einsum("bshd,hde->bse", mixed, layer.out) + layer.out_bias
        h = layer_norm({"scale": layer.norm2_scale, "bias": layer.norm2_bias}, x)
        x = x + jax.nn.gelu(h @ layer.up + layer.up_bias) @ layer.down + layer.down_bias
        made.append((keys, values))
    return x, made


def by_op(layers: Sequence[Any], x: Any, caches: Any, step: Any, implementation: str) -> Any:
    from fusionlab.ops import multi_transformer

    y, made = multi_transformer(x, layers, cache=caches, step=step, implementation=implementation)
    return y, [tuple(pair) for pair in made]


def stepping(fn: Callable, case: Case, layers: Sequence[Any], x: Any, step: Any) -> Callable[[], Any]:
    """A program of one decoding step, compiled; each call takes the caches of the one before."""
    import jax

    state = [caches_of(case)]
    program = jax.jit(fn, donate_argnums=2).lower(layers, x, state[0], step).compile()

    def run() -> Any:
        y, state[0] = program(layers, x, state[0], step)
        return y

    return run


def reading_rate() -> float:
    """Bytes a second at which the device reads 2 GiB (64 MiB without a GPU) to add them up."""
    import jax
    import jax.numpy as jnp

    from fusionlab.device import Device

    size = 1 << (30 if Device.current().platform == "cuda" else 25)
    data = normal(0, size)
    total = jax.jit(lambda a: jnp.sum(a, dtype=jnp.float32)).lower(data).compile()
    found = measured({"read": functools.partial(total, data)}, "read", 8)
    return 2 * size / found["read"]["median_s"]


def measure(case: Case, rate: float, samples: int) -> dict[str, Any]:
    """Times of a layer, of one case."""
    import jax.numpy as jnp

    layers, x, step = layers_of(case), normal(1, case.batch, 1, case.embed), jnp.int32(case.cache - FREE)
    fns: dict[str, Callable] = {"jax.jit": plain}
    fns |= {
        name: functools.partial(by_op, implementation=name) for name in ("composed", "cuda") if not _refused(name, case)
    }
    programs = {name: stepping(fn, case, layers, x, step) for name, fn in fns.items()}
    outs = {name: run() for name, run in programs.items()}
    found = measured(programs, "jax.jit", samples, repeats=LAYERS)
    off = {name: differences(outs["jax.jit"], y) for name, y in outs.items() if name != "jax.jit"}
    return {"case": vars(case), "floor_s": case.layer_bytes / rate, "difference": off, **found}


def _refused(name: str, case: Case) -> bool:
    """Whether an implementation does not run here: the kernels need a GPU."""
    from fusionlab.device import Device

    return name == "cuda" and Device.current().platform != "cuda"


def main(argv: list[str]) -> int:
    """Measures and records. Returns the exit status: 1 where a bar is missed."""
    parser = parser_of("decoding", __doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="the cases whose name has this in it")
    options = parser.parse_args(argv)
    from fusionlab.device import Device

    on_cuda = Device.current().platform == "cuda"
    cases = [case for case in (QUICK if options.quick else CASES) if options.only in case.name]
    record, rate, missed = new_record("decoding", options), reading_rate(), False
    record |= {"read_bytes_per_s": rate, "layers": LAYERS, "cases": {}}
    for case in cases:
        found = measure(case, rate, 4 if options.quick else SAMPLES)
        record["cases"][case.name] = found
        print(line(case.name, found))
        print(
            f"  a layer's bytes alone: {found['floor_s'] * 1e6:.1f} us; difference from jax.jit {found['difference']}"
        )
        if case.bar is not None and "cuda" in found:
            ratio = found["cuda"]["median_s"] / found["jax.jit"]["median_s"]
            missed |= ratio > case.bar
            print(f"  {ratio:.3f} of jax.jit's time, asked for {case.bar:.2f}")
    finish(record, options, on_cuda)
    return int(missed and on_cuda)
