"""Where the time of a transformer block goes on this machine: parts beside the whole, sites, and the roofline's predictions beside both.

    python -m benchmarks parts [--seq 512] [--embed 256] [--quick] [-o FILE]

Each part is a stretch of one module scope, compiled alone and timed in turns with the whole; what the parts' sum differs by from the whole
is named. Each site's share is what leaving it out costs. The roofline takes the peaks measured in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def main(argv: list[str]) -> int:
    """Prints parts, sites and predictions, and writes the record. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks parts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--embed", type=int, default=256)
    parser.add_argument(
        "--quick", action="store_true", help="6 samples of each: a check that it works, nothing to publish"
    )
    parser.add_argument("-o", "--output", type=Path, help="the record's file; under benchmarks/results unless given")
    options = parser.parse_args(argv)

    import jax
    import jax.numpy as jnp

    import fusionlab as fl
    from fusionlab.evidence.attribution import parts_of, sites_of
    from fusionlab.evidence.instruments.peaks import measure_peaks
    from fusionlab.evidence.instruments.record import environment, save_json
    from fusionlab.evidence.roofline import roofline
    from fusionlab.models import transformer

    samples = 6 if options.quick else 40
    params = transformer.init_block(jax.random.key(0), options.embed)
    x = transformer.inputs(jax.random.key(1), 1, options.seq, options.embed)
    if jax.default_backend() != "cpu":  # where attention in float32 gains nothing
        params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))
    found = fl.find(partial(transformer.block, heads=4), params, x)
    device = measure_peaks()
    parts = parts_of(found.graph, params, x, samples=samples)
    shares = sites_of(found, params, x, samples=samples)
    roof = roofline(found, device, measured=parts.whole.median_s).with_measured(
        {s.site: s.saved_s for s in shares.sites}
    )
    told = parts.reconciliation
    for text in (parts, "", shares, "", roof):
        print(text)
    here = environment().to_dict()
    record: dict[str, Any] = {
        "benchmark": "parts",
        "command": f"python -m benchmarks parts --seq {options.seq} --embed {options.embed}",
        "environment": here,
        "parts": [dataclasses.asdict(p) for p in parts.parts],
        "whole": dataclasses.asdict(parts.whole),
        "dispatch": dataclasses.asdict(parts.dispatch),
        "sum to whole": told.sum_s / told.whole_s,
        "remainder": told.remainder,
        "predictions": [
            {"site": p.site, "saved_s": p.saved_s, "measured_saved_s": p.measured_saved_s} for p in roof.predictions
        ],
    }
    if options.output or not options.quick:
        folder = RESULTS / ("cpu" if jax.default_backend() == "cpu" else "h200")
        path = options.output or folder / f"parts_jax{here['versions']['jax']}.json"
        print(f"written to {save_json(path, record)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
