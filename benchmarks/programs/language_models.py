"""The loss and gradients of language models, bfloat16: FusionLab beside jax.jit, an expert's JAX and torch.compile, in one run.

    python -m benchmarks language_models [--json] [-o FILE] [--quick] [--only TEXT] [--compile] [--largest]

A Llama-like model (4 layers of width 2048, 16 heads of 128 in 4 groups, SwiGLU of 5632, vocabulary 32768, 4 texts of 2048 tokens), its
layers in a scan, unrolled and in a scan with checkpoints; GPT-2 124M (8 texts of 1024 tokens); and the Llama-like model with a vocabulary
of 128256. Parameters are not donated.

`jax.jit` is the plain program; `by hand` has cuDNN's attention through `jax.nn` in it; the programs that begin with `expert` have a chunked
loss as well, or a policy that keeps the results of products with weights, or both, or tokamax's attention where it is installed.
`grad of fused` is `value_and_grad(fl.fuse(loss))` and `fused grad` is `fl.fuse(value_and_grad(loss))`. With checkpoints, `products kept`
has `edits="recomputed_products"`, which keeps the results of products; with scanned layers, `edits` has that and `"stacked_scan"`, which
writes them out. Names that end with `options` are the same programs, compiled with two options of XLA that
`fl.advise` tries (`OPTIONS` in language_rows.py), those with `no graphs` without CUDA graphs as well. `torch.compile` is the same model
with torch's own attention (`torch.utils.checkpoint` around each layer where JAX has checkpoints), timed apart from the others' turns.

For each: device time, tokens a second, the share of the card's peak (MFU: operations by the usual counting, which is `model_flop`, over
the rate of dense bfloat16 products in the maker's data sheet), what the compiled program allocates (of torch: what was allocated at most),
and how far loss and gradients are from jax.jit's. The floor of the products is their operations, of attention's half, at the rate of one
large product, measured here. The expert is the fastest of `by hand` and those after it, without options; programs with options
are held to the fastest of all.

`--compile` times compiling instead (language_compile.py), `--largest` finds the largest batch that fits instead (language_largest.py). Both
add to the record that `-o` names, if it is one of the same machine and versions; so does a run with other cases. What fails is a line of
the record, under `failures`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..measuring import (
    attempt,
    chosen,
    compiled_at_once,
    continued,
    differences,
    finish,
    has_torch,
    measured,
    new_record,
    parser_of,
    peak_bytes,
    ratio_to,
    routes,
    save,
    timed,
    torch_device,
    torch_forgotten,
    torch_samples,
)
from . import language_compile, language_largest
from .language_expert import BY_HAND, PLAIN, experts
from .language_rows import (
    EDITED,
    FUSED,
    FUSED_GRAD,
    GRAD_OF_FUSED,
    KEPT,
    NO_GRAPHS,
    OPTIONS,
    TORCH,
    WITH_OPTIONS,
    complete,
    lines,
    peak_of,
)
from .language_steps import CASES, GPT2, TINY, Llama, tokens_of

CALLS = 4
LARGE = 128256
# The most important ones first: a run may be cut off.
ROWS = {case.name: case for i in (0, 2, 1, 3) for case in (CASES[i],)} | {
    f"{case.name}, V {LARGE}": replace(case, vocabulary=LARGE) for case in (CASES[0], CASES[2], CASES[1])
}
TINY_ROWS = {case.name: case for i in (0, 2, 1, 3) for case in (TINY[i],)} | {
    f"{TINY[0].name}, V 128": replace(TINY[0], vocabulary=128)
}
LIMIT = 8 << 20  # bytes, for the largest batch of a tiny case


def programs(case: Llama | GPT2) -> dict[str, Callable[..., Any]]:
    """Loss and gradients of (parameters, tokens), by name."""
    import jax

    import fusionlab as fl

    plain = case.loss(PLAIN)
    by_hand = {"by hand": BY_HAND} | experts(case.vocabulary)
    edits = {
        KEPT: ["recomputed_products"] if getattr(case, "form", "") == "checkpoint" else [],
        EDITED: ["recomputed_products", "stacked_scan"] if is_scanned(case) else [],
    }
    made = {
        FUSED_GRAD: fl.fuse(jax.value_and_grad(plain)),
        **{name: fl.fuse(jax.value_and_grad(plain), edits=each) for name, each in edits.items() if each},
        **{name: jax.value_and_grad(case.loss(written)) for name, written in by_hand.items()},
    }
    first = {"jax.jit": jax.value_and_grad(plain), GRAD_OF_FUSED: jax.value_and_grad(fl.fuse(plain))}
    options = {WITH_OPTIONS: OPTIONS, NO_GRAPHS: OPTIONS | {"xla_gpu_enable_command_buffer": ""}}
    compiled = {
        name + end: jax.jit(fn, compiler_options=given) for end, given in options.items() for name, fn in made.items()
    }
    return first | made | compiled


def is_scanned(case: Llama | GPT2) -> bool:
    """Whether the layers are in a scan."""
    return getattr(case, "form", "unrolled") != "unrolled"


def measure(case: Llama | GPT2, found: dict[str, Any], samples: int) -> None:
    """Adds times, memory and differences of each of JAX's programs to a row; what fails is in its `failures`."""
    args, failures, made = (case.parameters(), tokens_of(case)), found["failures"], programs(case)
    running = compiled_at_once({name: (fn, args) for name, fn in made.items()}, failures)
    reference, apart = None, {}
    for name, run in dict(running).items():
        if (result := attempt(failures, name, functools.partial(_done, run))) is None:
            del running[name]
            continue
        reference = result if reference is None else reference
        apart[name] = differences(reference, result)
    del reference
    for name, one in (attempt(failures, "timing", lambda: _timed(running, samples)) or {}).items():
        program = running[name].func
        memory = {"peak_bytes": peak_bytes(program), "temporaries_bytes": program.memory_analysis().temp_size_in_bytes}
        found[name] = one | memory | {"difference": apart[name]}
    for name in found.keys() & {*FUSED, KEPT, EDITED}:
        found[name]["routes"] = attempt(failures, f"routes of {name}", lambda name=name: routes(made[name], *args))


def _timed(running: Mapping[str, Callable[[], Any]], samples: int) -> dict[str, Any]:
    return measured(running, next(iter(running)), samples, CALLS) if running else {}


def _done(run: Callable[[], Any]) -> Any:
    import jax

    return jax.block_until_ready(run())


def measure_torch(case: Llama | GPT2, found: dict[str, Any], samples: int) -> None:
    """Adds torch.compile's step to a row; `first_call_s` has its compiling in it."""
    found.update(attempt(found["failures"], TORCH, lambda: {TORCH: _of_torch(case, found, samples)}) or {})
    torch_forgotten()


def _of_torch(case: Llama | GPT2, found: Mapping[str, Any], samples: int) -> dict[str, Any]:
    import torch

    from .torch_language import step_of

    step = step_of(case, case.parameters(), tokens_of(case))
    on_cuda = torch_device() == "cuda"
    start = time.perf_counter()
    loss = float(step()[0])
    first_call_s = time.perf_counter() - start
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    one = timed(times := torch_samples(step, samples, CALLS), CALLS if on_cuda else 1)
    peak = torch.cuda.max_memory_allocated() if on_cuda else None
    base = next((ratio_to(b, found[b]["samples_s"], times) for b in ("jax.jit", "by hand") if b in found), {})
    return one | base | {"first_call_s": first_call_s, "loss": loss, "peak_bytes": peak}


def row(case: Llama | GPT2, found: dict[str, Any], record: Mapping[str, Any], samples: int, kept: Callable) -> None:
    """Fills a row in, and calls `kept` after each part of it."""
    rate, peak = record["product_flop_per_s"], record["peak"]
    found["failures"] = {}
    measure(case, found, samples)
    complete(case, found, rate, peak)
    kept()
    if has_torch():
        measure_torch(case, found, samples)
        complete(case, found, rate, peak)


def product_rate(size: int, samples: int) -> float:
    """FLOP/s of one square bfloat16 product."""
    from ..measuring import normal

    a, b = normal(0, size, size), normal(1, size, size)
    found = measured(compiled_at_once({"product": (lambda a, b: a @ b, (a, b))}), "product", samples)
    return 2 * size**3 / found["product"]["median_s"]


def _memory_limit(on_cuda: bool) -> int:
    """Bytes that JAX may use of this device."""
    import jax

    return jax.local_devices()[0].memory_stats()["bytes_limit"] if on_cuda else LIMIT


def _parser() -> Any:
    import argparse

    parser = parser_of("language_models", __doc__)
    parser.add_argument("--only", default="", help='only the rows with this text, or one of "A|B"')
    parser.add_argument("--compile", action="store_true", help="time compiling instead, in processes of its own")
    parser.add_argument("--largest", action="store_true", help="find the largest batch that fits instead")
    parser.add_argument("--sample", help=argparse.SUPPRESS)  # compiling in this process
    return parser


def main(argv: list[str]) -> int:
    """Prints lines for each row and writes the record. Returns the exit status."""
    options = _parser().parse_args(argv)
    if options.sample:
        asked = json.loads(options.sample)
        case = (TINY_ROWS if asked["tiny"] else ROWS)[asked["name"]]
        print(json.dumps(language_compile.sample(case, lambda: programs(case)[asked["program"]])))
        return 0
    if options.compile:  # the memory is for the processes that compile
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if options.largest:  # temporaries are one piece, which a pool that grows in steps may not have
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"

    from fusionlab.device import Device

    on_cuda = Device.current().platform == "cuda"
    if not on_cuda and not options.quick:
        print("this benchmark needs a CUDA device (JAX sees none here), or --quick for tiny sizes", file=sys.stderr)
        return 2
    record = continued(new_record("language_models", options) | {"cases": {}}, options)
    record["command"] += " --compile" * options.compile + " --largest" * options.largest
    record["peak"] = peak_of(record["environment"]["hardware"])
    _run(options, record, on_cuda)
    finish(record, options, on_cuda)
    return 0


def _run(options: Any, record: dict[str, Any], on_cuda: bool) -> None:
    samples = 15 if not options.quick else 2
    if not (options.compile or options.largest):
        record["product_flop_per_s"] = product_rate(8192 if on_cuda else 64, samples)
    rows = ROWS if on_cuda else TINY_ROWS
    for name in chosen(rows, options.only):
        case, found = rows[name], record["cases"].setdefault(name, {})
        if options.compile:
            found["compile"] = language_compile.measure(name, not on_cuda)
        elif options.largest:
            found["largest"] = language_largest.measure(case, programs, _memory_limit(on_cuda))
        else:
            row(case, found, record, samples, lambda: save(record, options, on_cuda))
        save(record, options, on_cuda)  # what is measured is not lost where the run is cut off
        if not options.json:
            print(*lines(name, found), sep="\n", flush=True)
