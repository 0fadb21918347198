"""The loss and gradients of language models, bfloat16: FusionLab beside jax.jit, attention by hand and torch.compile, in one run.

    python -m benchmarks language_models [--json] [-o FILE] [--quick] [--only TEXT]

A Llama-like model (4 layers of width 2048, 16 heads of 128 in 4 groups, SwiGLU of 5632, vocabulary 32768, 4 texts of 2048 tokens), its
layers in a scan, in a scan with checkpoints and unrolled, and GPT-2 124M (8 texts of 1024 tokens). Parameters are not donated.

`jax.jit` is the plain program; `by hand` has cuDNN's attention through `jax.nn` in it; `grad of fused` is `value_and_grad(fl.fuse(loss))`
and `fused grad` is `fl.fuse(value_and_grad(loss))`; `torch.compile` is the same model with torch's own attention, timed apart from the
others' turns. For each: device time, the compiled program's temporaries, tokens a second, and how far loss and gradients are from
jax.jit's. The floor of the products is their operations at the rate of one large product, measured here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..measuring import (
    compiled_at_once,
    differences,
    finish,
    has_torch,
    line,
    measured,
    new_record,
    parser_of,
    ratio_to,
    save,
    timed,
    torch_samples,
)
from .language_steps import BY_HAND, CASES, GPT2, PLAIN, TINY, Llama, tokens_of

CALLS = 4


def programs(case: Llama | GPT2) -> dict[str, Callable[..., Any]]:
    import jax

    import fusionlab as fl

    plain, by_hand = case.loss(PLAIN), case.loss(BY_HAND)
    return {
        "jax.jit": jax.value_and_grad(plain),
        "by hand": jax.value_and_grad(by_hand),
        "grad of fused": jax.value_and_grad(fl.fuse(plain)),
        "fused grad": fl.fuse(jax.value_and_grad(plain)),
    }


def measure(case: Llama | GPT2, samples: int, with_torch: bool) -> dict[str, Any]:
    """Times, temporaries and differences of each program."""
    args = (case.parameters(), tokens_of(case))
    running = compiled_at_once({name: (fn, args) for name, fn in programs(case).items()})
    reference = running["jax.jit"]()
    apart = {name: differences(reference, run()) for name, run in running.items()}
    del reference
    found = measured(running, "jax.jit", samples, CALLS)
    for name, run in running.items():
        memory = run.func.memory_analysis()
        found[name] |= {"temporaries_bytes": memory.temp_size_in_bytes, "difference": apart[name]}
    if with_torch:
        from .torch_language import step_of

        times = torch_samples(step_of(case, *args), samples, CALLS)
        found["torch.compile"] = timed(times, CALLS) | ratio_to("jax.jit", found["jax.jit"]["samples_s"], times)
    tokens = case.batch * case.length
    for one in found.values():
        one["tokens_per_s"] = tokens / one["median_s"]
    found["fused grad"]["over torch.compile"] = _over(found, "torch.compile")
    found["fused grad"]["over by hand"] = _over(found, "by hand")
    return found | {"product_flop": case.product_flop}


def _over(found: dict[str, Any], rival: str) -> dict[str, Any] | None:
    if rival not in found:
        return None
    return ratio_to(rival, found[rival]["samples_s"], found["fused grad"]["samples_s"])


def product_rate(size: int, samples: int) -> float:
    """FLOP/s of one square bfloat16 product."""
    from ..measuring import normal

    a, b = normal(0, size, size), normal(1, size, size)
    found = measured(compiled_at_once({"product": (lambda a, b: a @ b, (a, b))}), "product", samples)
    return 2 * size**3 / found["product"]["median_s"]


def cases(on_cuda: bool, samples: int, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for case in CASES if on_cuda else TINY:
        if only in case.name:
            yield case.name, measure(case, samples, on_cuda and has_torch())


def main(argv: list[str]) -> int:
    """Prints a line for each case and writes the record. Returns the exit status."""
    parser = parser_of("language_models", __doc__)
    parser.add_argument("--only", default="", help="only the cases whose name has this text")
    options = parser.parse_args(argv)

    from fusionlab.device import Device

    on_cuda = Device.current().platform == "cuda"
    if not on_cuda and not options.quick:
        print("this benchmark needs a CUDA device (JAX sees none here), or --quick for tiny sizes", file=sys.stderr)
        return 2
    samples = 15 if not options.quick else 2
    record: dict[str, Any] = new_record("language_models", options) | {"cases": {}}
    record["product_flop_per_s"] = product_rate(8192 if on_cuda else 64, samples)
    for name, found in cases(on_cuda, samples, options.only):
        found["floor_s"] = found["product_flop"] / record["product_flop_per_s"]
        record["cases"][name] = found
        if not options.json:
            print(line(name, found), f"floor {found['floor_s'] * 1e3:.1f} ms", flush=True)
        save(record, options, on_cuda)  # what is measured is not lost where the run is cut off
    finish(record, options, on_cuda)
    return 0
