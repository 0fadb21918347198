"""What whole transformer layers gain: norms, decoding steps, an encoder's training step, and text that is generated, in one run.

    python -m benchmarks multi_transformer [--json] [-o FILE] [--quick] [--only TEXT]

Each part is one of its own benchmarks, at the sizes that have a bar: `norms` (its two largest cases), `decoding`, the encoder of
`attention` with every pass on, beside torch.compile, and `generating`. The record holds for each bar what was asked for and what was
reached; the exit status is 1 where one is missed. Without a CUDA device `--quick` runs tiny sizes by the host's clock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..measuring import finish, has_torch, line, new_record, parser_of, ratio_to, save
from ..ops import attention, norms
from . import decoding, generating

ENCODER = "dropout 0.0, softmax in float32, parameters in bfloat16"
EVERY_PASS = "with layer_norm"


@dataclass(frozen=True)
class Bar:
    """What one measurement is held to: `times` as fast as the program `than`, at least."""

    part: str
    program: str
    than: str
    times: float

    def reached(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The bar, the ratio of medians with its interval, and whether it is reached."""
        every = {**found, **found.get("torch", {})}
        slow, fast = (every[name]["samples_s"] for name in (self.than, self.program))
        ratio = ratio_to(self.than, slow, fast)
        return {
            "program": self.program,
            "at_least": self.times,
            **ratio,
            "reached": ratio["ratio"] >= self.times,
        }


def at_most(part: str, program: str, share: float) -> Bar:
    """A bar on the time as a share of jax.jit's."""
    return Bar(part, program, "jax.jit", 1 / share)


BARS = (
    *(
        at_most(f"norms {case.name}, {way}", "fusionlab", share)
        for case in norms.SHOWN
        for way, share in (("forward", 0.70), ("forward and sum", 0.88), ("forward and backward", 0.45))
    ),
    *(at_most(f"decoding {case.name}", "cuda", case.bar) for case in decoding.CASES if case.bar is not None),
    Bar("encoder", EVERY_PASS, "jax.jit", 1.95),
    Bar("encoder", EVERY_PASS, "torch.compile", 1.15),
    Bar("generate", "fusionlab", "jax.jit", 3.0),
)


def parts(on_cuda: bool, samples: int, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, what was measured) of each part that has the text in its name."""
    for case in norms.SHOWN if on_cuda else norms.TINY:
        if only in f"norms {case.name}":
            for way, found in norms.one(case, samples, "cuda" if on_cuda else None):
                yield f"norms {case.name}, {way}", found
    cases = [c for c in (decoding.CASES if on_cuda else decoding.QUICK) if only in f"decoding {c.name}"]
    rate = decoding.reading_rate() if cases else 0.0
    for case in cases:
        yield f"decoding {case.name}", decoding.measure(case, rate, samples)
    if only in "encoder":
        size = attention.Encoder() if on_cuda else attention.Encoder(1, 16, 32, 2, 64)
        yield "encoder", attention.encoder(size, *attention.STEPS[ENCODER], samples, on_cuda and has_torch())
    if only in "generate":
        yield "generate", generating.generate(generating.Size() if on_cuda else generating.TINY, min(samples, 10))


def main(argv: list[str]) -> int:
    """Prints a line for each measurement, then the bars, and writes the record. Returns the exit status: 1 where a bar is missed."""
    parser = parser_of("multi_transformer", __doc__)
    parser.add_argument("--only", default="", help="only the parts whose name has this text")
    options = parser.parse_args(argv)

    from fusionlab.device import Device

    on_cuda = Device.current().platform == "cuda"
    if not on_cuda and not options.quick:
        print("this benchmark needs a CUDA device (JAX sees none here), or --quick for tiny sizes", file=sys.stderr)
        return 2
    samples = 20 if not options.quick else 6 if on_cuda else 3
    record: dict[str, Any] = new_record("multi_transformer", options) | {"parts": {}, "bars": {}}
    for name, found in parts(on_cuda, samples, options.only):
        record["parts"][name] = found
        if not options.json:
            print(line(name, found), flush=True)
        for bar in BARS if on_cuda else ():
            if bar.part == name and (bar.than in found or bar.than in found.get("torch", {})):
                record["bars"][f"{name}: {bar.program} against {bar.than}"] = bar.reached(found)
        save(record, options, on_cuda)  # what is measured is not lost where the run is cut off
    if not options.json:
        for name, bar in record["bars"].items():
            told = "reached" if bar["reached"] else "MISSED"
            print(
                f"{told}: {name}: {bar['ratio']:.3f} [{bar['interval'][0]:.3f}, {bar['interval'][1]:.3f}], {bar['at_least']:.3f} asked for"
            )
    finish(record, options, on_cuda)
    return int(not all(bar["reached"] for bar in record["bars"].values()))
