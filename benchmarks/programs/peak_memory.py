"""The largest buffers at the peak of a train step of language models, with the source lines that compute what they hold.

    python -m benchmarks peak_memory [--json] [-o FILE] [--quick] [--only TEXT]

The models of `language_models` with a step of SGD whose parameters are donated: the step under `jax.jit`, and fused. For each: the ten
largest buffers, the temporaries by source line, and how far their sum is from XLA's own figure of what the executable takes (arguments,
results and temporaries, less what they share) - with the gaps between the temporaries, and without. On a GPU also by how many bytes
the device's memory in use grew in one step, against XLA's figure without the arguments. One line that begins with FAILED where the sum
is more than 5 % off, or XLA shows no buffers; the exit status is then 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..measuring import finish, new_record, parser_of, save
from .language_steps import CASES, GPT2, PLAIN, TINY, Llama, tokens_of

TOLERANCE = 0.05
RATE = 1e-3


def train_step(case: Llama | GPT2) -> Callable[..., Any]:
    """step(parameters, tokens) -> (new parameters, loss)."""
    import jax

    loss = case.loss(PLAIN)

    def step(parameters: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, tokens)
        return jax.tree.map(lambda p, g: p - (RATE * g).astype(p.dtype), parameters, gradients), value

    return step


def measure(case: Llama | GPT2, name: str, fn: Callable[..., Any]) -> dict[str, Any]:
    """The buffers of one program, and XLA's figures."""
    from fusionlab.evidence.errors.outputs import named_outputs
    from fusionlab.evidence.instruments.memory import compiled_memory, device_peak
    from fusionlab.evidence.instruments.program import compile_program

    args = case.parameters(), tokens_of(case)
    program = compile_program(fn, args, {}, name=name, donate_argnums=(0,), assigned=True)
    plan = compiled_memory(program, results=named_outputs(program.outputs))
    assert plan is not None, "this backend reports no memory"
    found: dict[str, Any] = {
        "xla_bytes": plan.peak,
        "argument_bytes": plan.argument,
        "device_peak": device_peak(program),
    }
    if plan.buffers is None:
        return found | {"off": None}
    totals = {"sum_bytes": plan.buffers.total, "live_bytes": plan.buffers.live, "gaps_bytes": plan.buffers.gaps}
    off = plan.buffers.total / plan.peak - 1
    return found | totals | {"off": off, "buffers": plan.buffers.to_dict(), "text": str(plan.buffers)}


def line(found: dict[str, Any]) -> str:
    """The sum against XLA's figure, and against the device's."""
    from fusionlab.evidence.units import binary_bytes

    if found["off"] is None:
        return "FAILED: XLA shows no buffers of this program"
    verdict = "ok" if abs(found["off"]) <= TOLERANCE else "FAILED"
    total, xla, live = (binary_bytes(found[k]) for k in ("sum_bytes", "xla_bytes", "live_bytes"))
    share = found["live_bytes"] / found["xla_bytes"]
    text = f"{verdict}: sum {total}, XLA's figure {xla}, {found['off']:+.2%}; without gaps {live}, {share:.1%} of it"
    if found["device_peak"] is None:
        return text
    beyond = binary_bytes(found["xla_bytes"] - found["argument_bytes"])
    return f"{text}; the device's memory grew by {binary_bytes(found['device_peak'])} in a step, XLA's figure without arguments {beyond}"


def main(argv: list[str]) -> int:
    """Prints the largest buffers of each case and writes the record; 1 if a sum is off."""
    parser = parser_of("peak_memory", __doc__)
    parser.add_argument("--only", default="", help="only the cases whose name has this text")
    options = parser.parse_args(argv)

    import fusionlab as fl
    from fusionlab.device import Device

    on_cuda = Device.current().platform == "cuda"
    if not on_cuda and not options.quick:
        print("this benchmark needs a CUDA device (JAX sees none here), or --quick for tiny sizes", file=sys.stderr)
        return 2
    record: dict[str, Any] = new_record("peak_memory", options) | {"tolerance": TOLERANCE, "cases": {}}
    for case in CASES if on_cuda and not options.quick else TINY:
        if options.only not in case.name:
            continue
        step = train_step(case)
        record["cases"][case.name] = programs = {}
        for name, fn in {"jax.jit": step, "fused": fl.fuse(step)}.items():
            found = programs[name] = measure(case, name, fn)
            if not options.json:
                print(f"{case.name}, {found.pop('text', name)}\n{line(found)}\n", flush=True)
        save(record, options, on_cuda)  # what is measured is not lost where the run is cut off
    finish(record, options, on_cuda)
    return int(any("FAILED" in line(found) for case in record["cases"].values() for found in case.values()))
