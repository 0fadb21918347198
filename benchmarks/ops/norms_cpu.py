"""Norms on a CPU, fused by the pass `layer_norm`, against jax.jit of the same program; and a small DistilBERT's step as fused by default.

    python -m benchmarks norms_cpu [--quick] [--samples N] [-o FILE]

Two residual blocks of float32, h + gelu(norm(h) @ w) @ u (before) or norm(h + gelu(h @ w) @ u) (after), forward, and as a train step that
is differentiated before it is fused. Ratios are jax.jit's time to the fused program's, of interleaved samples
(fusionlab.evidence.instruments.timing).
The DistilBERT of transformers (2 layers of 32 features, 4 heads, 2 x 16 tokens, optax.sgd) is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = ((32, 32), (128, 128), (512, 256), (2048, 256))
NORMS, PLACES, WORK = ("layer", "rms"), ("before", "after"), ("forward", "step")
EPSILON = 1e-6
RESULTS = Path(__file__).parents[1] / "results" / "cpu"


def normalised(kind: str, x: Any, scale: Any, bias: Any) -> Any:
    import jax
    import jax.numpy as jnp

    if kind == "rms":
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON) * scale
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + EPSILON) * scale + bias


def program(kind: str, place: str, work: str) -> Callable[..., Any]:
    """The function of (parameters of each block, x)."""
    import jax
    import jax.numpy as jnp

    def forward(params: Any, x: Any) -> Any:
        for w, u, scale, bias in params:
            if place == "before":
                x = x + jax.nn.gelu(normalised(kind, x, scale, bias) @ w) @ u
            else:
                x = normalised(kind, x + jax.nn.gelu(x @ w) @ u, scale, bias)
        return x

    if work == "forward":
        return forward
    return jax.value_and_grad(lambda params, x: jnp.sum(forward(params, x) ** 2))


def arguments(rows: int, columns: int) -> tuple[Any, Any]:
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    block = lambda: (normal(columns, 2 * columns), normal(2 * columns, columns), jnp.ones(columns), jnp.zeros(columns))  # noqa: E731
    return [block() for _ in range(2)], normal(rows, columns)


def distilbert() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A train step, and its arguments."""
    import jax
    import jax.numpy as jnp
    import optax
    from transformers import DistilBertConfig, FlaxDistilBertModel

    sizes = {"dim": 32, "n_heads": 4, "hidden_dim": 64, "n_layers": 2, "vocab_size": 64, "max_position_embeddings": 16}
    config = DistilBertConfig(**sizes, dropout=0.0, attention_dropout=0.0)
    net = FlaxDistilBertModel(config, input_shape=(2, 16), seed=0)
    optimiser = optax.sgd(1e-2)
    ids = jax.random.randint(jax.random.key(0), (2, 16), 0, 64)

    def step(params: Any, state: Any, ids: Any, mask: Any) -> Any:
        loss = lambda p: jnp.mean(net(ids, mask, params=p, train=False).last_hidden_state ** 2)  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimiser.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    return step, (net.params, optimiser.init(net.params), ids, jnp.ones((2, 16), jnp.int32))


def timed(fn: Callable[..., Any], fused: Callable[..., Any], args: tuple[Any, ...], samples: int) -> dict[str, Any]:
    from fusionlab.evidence.instruments.timing import time_pair

    timing = time_pair(fn, fused, *args, samples=samples, budget_s=600.0)
    return {
        "jax_jit_s": timing.before.samples_s,
        "fused_s": timing.after.samples_s,
        "ratio": timing.ratio,
        "ratio_interval": timing.interval,
        "verdict": str(timing.verdict),
    }


def run(sizes: tuple[tuple[int, int], ...], samples: int) -> dict[str, Any]:
    """All cases by name; one line is printed as each is done."""
    import fusionlab as fl

    found = {}
    for kind, place, work, (rows, columns) in itertools.product(NORMS, PLACES, WORK, sizes):
        fn = program(kind, place, work)
        name = f"{kind} {place} {work} {rows}x{columns}"
        found[name] = timed(fn, fl.fuse(fn, passes="layer_norm"), arguments(rows, columns), samples)
        print(line(name, found[name]), flush=True)
    if importlib.util.find_spec("transformers") is not None:
        step, args = distilbert()
        found["distilbert step"] = timed(step, fl.fuse(step), args, samples)
        print(line("distilbert step", found["distilbert step"]), flush=True)
    return found


def line(name: str, case: dict[str, Any]) -> str:
    low, high = case["ratio_interval"]
    return f"{name:32} {case['ratio']:.3f} [{low:.3f}, {high:.3f}]"


def main(argv: list[str]) -> int:
    """Runs the benchmark and writes its record; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks norms_cpu", description="Norms on a CPU.")
    parser.add_argument("--quick", action="store_true", help="the smallest size, few samples")
    parser.add_argument("--samples", type=int, help="of each program; 20, or 4 with --quick")
    parser.add_argument("-o", "--output", type=Path, help="where the JSON record goes")
    options = parser.parse_args(argv)
    import jax

    from fusionlab.evidence.instruments.record import environment, save_json

    jax.config.update("jax_platforms", "cpu")
    where = environment()
    output = options.output or RESULTS / f"norms_jax{where.versions['jax']}.json"
    record = {
        "benchmark": "norms_cpu",
        "command": " ".join(["python", "-m", "benchmarks", "norms_cpu", *argv]),
        "environment": where.to_dict(),
        "cases": run(SIZES[:1] if options.quick else SIZES, options.samples or (4 if options.quick else 20)),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    save_json(output, record)
    print(f"{where}\nrecord: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
