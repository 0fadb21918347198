"""Memory of a train step whose forward sites are rewritten together with their backward passes, against the original's.

    python -m benchmarks pair_memory [--processes 3] [--quick] [-o FILE]

The train step of fusionlab.models.transformer (AdamW), its layers unrolled and scanned over. Each measurement is a fresh process that
makes the arguments, compiles, resets the high-water mark of its resident set (VmHWM) and runs one step. `growth` is by how much the
resident set grew at most in that step; `peak` is the resident set at that point, what JAX, the search and the compiler left behind
included. `temporary` is what XLA says that the compiled step needs besides arguments and results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "cpu"
SHAPES = {"layers": 6, "embed": 256, "batch": 4, "seq": 512, "heads": 4}
QUICK = {"layers": 2, "embed": 64, "batch": 2, "seq": 128, "heads": 4}
FORMS = ("unrolled", "scan")
VARIANTS = ("original", "fused")
# Two processes that run the same program differ by about as much: pages are handed out by the million bytes.
TOLERANCE = 0.01


def build(form: str, variant: str, shapes: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The train step and its arguments; this is what runs in a process of its own."""
    import jax

    import fusionlab as fl
    from fusionlab.models import transformer

    heads = shapes["heads"]
    params = transformer.init(jax.random.key(0), shapes["layers"], shapes["embed"])
    if form == "scan":
        params = stacked(params)
    x, y = (transformer.inputs(jax.random.key(i), shapes["batch"], shapes["seq"], shapes["embed"]) for i in (1, 2))
    step = partial(transformer.train_step, heads=heads) if form == "unrolled" else partial(scanned_step, heads=heads)
    return (step if variant == "original" else fl.fuse(step)), (params, transformer.init_adam(params), x, y)


def stacked(params: Any) -> Any:
    """The layers' parameters with a leading axis, that of the layers."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)


def scanned_step(params: Any, adam: Any, x: Any, y: Any, *, heads: int) -> Any:
    """The same step with a scan over the layers: its loss in `transformer.loss`'s place, AdamW as there, without clipping."""
    import jax
    import jax.numpy as jnp

    from fusionlab.models import transformer

    def loss(params: Any) -> Any:
        out, _ = jax.lax.scan(lambda h, layer: (transformer.block(layer, h, heads=heads), None), x, params)
        return jnp.mean(jnp.square(out - y))

    value, grads = jax.value_and_grad(loss)(params)
    first, second, step = adam
    step = step + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)

    def update(p: Any, m: Any, v: Any) -> Any:
        delta = (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.999**step)) + 1e-8) + 1e-2 * p
        return p - 1e-3 * delta

    return jax.tree.map(update, params, first, second), (first, second, step), value


def temporary(form: str, variant: str, shapes: dict[str, int]) -> int | None:
    """Bytes that XLA reserves for temporaries of the compiled step; None where the backend does not say."""
    import jax

    fn, args = build(form, variant, shapes)
    analysis = jax.jit(fn).lower(*args).compile().memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


def measure(form: str, shapes: dict[str, int], processes: int) -> dict[str, Any]:
    """One form: both variants by turns, each in `processes` fresh processes."""
    from fusionlab.evidence import resident_growth

    runs: dict[str, list[dict[str, Any]]] = {v: [] for v in VARIANTS}
    for _ in range(processes):
        for variant in VARIANTS:
            grown = resident_growth("benchmarks.programs.pair_memory:build", [form, variant, shapes])
            run = {"before": grown.before, "peak": grown.peak, "growth": grown.growth, "method": grown.method}
            runs[variant].append(run)
    medians = {v: statistics.median(run["growth"] for run in runs[v]) for v in VARIANTS}
    return {
        "form": form,
        "runs": runs,
        "growth_median": medians,
        "growth_ratio": medians["fused"] / medians["original"],
        "peak_median": {v: statistics.median(run["peak"] for run in runs[v]) for v in VARIANTS},
        "temporary": {v: temporary(form, v, shapes) for v in VARIANTS},
        "fused_is_above": medians["fused"] > medians["original"] * (1 + TOLERANCE),
    }


def summary(case: dict[str, Any]) -> str:
    def both(key: str) -> str:
        values = [case[key][v] for v in VARIANTS]
        return " -> ".join("-" if v is None else f"{v / 1e6:.1f}" for v in values)

    return (
        f"{case['form']:9} growth {both('growth_median')} MB ({case['growth_ratio']:.3f}), peak {both('peak_median')} MB, "
        f"temporary {both('temporary')} MB{'; FUSED IS ABOVE' if case['fused_is_above'] else ''}"
    )


def main(argv: list[str]) -> int:
    """Prints and records both forms; 1 if a fused step takes more memory than the original."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks pair_memory", description=__doc__)
    parser.add_argument("--processes", type=int, default=3, help="for each form and variant")
    parser.add_argument("--quick", action="store_true", help="small shapes; no verdict to be had from them")
    parser.add_argument("-o", "--output", type=Path, help="where the JSON record goes")
    options = parser.parse_args(argv)
    if not Path("/proc/self/clear_refs").exists():
        print("pair_memory: needs Linux: the resident set is read from /proc", file=sys.stderr)
        return 1
    import jax

    from fusionlab.evidence.instruments.record import environment, save_json

    jax.config.update("jax_platforms", "cpu")
    shapes = QUICK if options.quick else SHAPES
    print(", ".join(f"{k} {v}" for k, v in shapes.items()) + ", float32, AdamW; original -> fused")
    cases = []
    for form in FORMS:
        cases.append(measure(form, shapes, options.processes))
        print(summary(cases[-1]), flush=True)
    record = {
        "command": f"python -m benchmarks pair_memory --processes {options.processes}{' --quick' * options.quick}",
        "what": __doc__,
        "shapes": shapes,
        "environment": environment().to_dict(),
        "tolerance": TOLERANCE,
        "cases": cases,
    }
    output = options.output or RESULTS / "pair_memory.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    save_json(output, record)
    print(f"record: {output}")
    return int(not options.quick and any(c["fused_is_above"] for c in cases))
