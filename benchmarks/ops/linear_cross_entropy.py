"""The head of a language model with its loss, and both gradients: `fl.ops.linear_cross_entropy`, jax.jit and torch.compile.

    python -m benchmarks linear_cross_entropy [--json] [-o FILE] [--quick] [--only TEXT]

`jax.jit` is `mean(logsumexp(x @ w) - picked)` with logits of the same dtype, `fusionlab` the op as it chooses by itself, `the step fused`
is `fl.fuse` of the loss and gradients of the first, and "N rows" the op with as many rows in a chunk: together they are the curve of time
against temporaries. `forward` is the loss alone, with its operations
over those of the product: of the compiled program, where XLA counts none for a product that it calls of a library, and of the program
before it is compiled; a loop's body counts as often as it runs. `torch.compile` has `cross_entropy` of the product, in float32 where the
logits are; torch rounds the product to bfloat16 first. A case may have a bias, a softcap of the logits, or the accuracy by the
argmax of the same logits beside its loss. Errors are those of loss and gradients against the op in float64, in chunks, on the same
numbers: a norm of the difference to that of the gradient. What fails is a line of the record, under `failures`.

On a CUDA device times are the device's. Elsewhere they are the processor's, over all threads, of programs that take turns, at sizes for a
CPU and in float32. A run with other cases adds to the record that `-o` names, if it is one of the same machine and versions.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..measuring import (
    attempt,
    chosen,
    compared,
    compiled_at_once,
    continued,
    finish,
    has_torch,
    line,
    measured,
    new_record,
    parser_of,
    ratio_to,
    save,
    timed,
    torch_device,
    torch_forgotten,
    torch_samples,
)

CALLS = 4  # in a sample
STEP_FUSED = "the step fused"
LONG = 1e13  # operations of a product from which one call is a sample
CAP = 30.0


@dataclass(frozen=True)
class Case:
    """Sizes, the dtypes of operands and logits, the rows of a chunk that are tried as well as the op's own choice, and what there is beside
    the plain loss: "bias", "softcap" or "accuracy".
    """

    rows: int
    features: int
    size: int
    dtype: str = "bfloat16"
    logits: str = "float32"
    chunks: tuple[int, ...] = ()
    form: str = ""

    @property
    def name(self) -> str:
        more = f", {self.form}" if self.form else ""
        return f"N {self.rows}, E {self.features}, V {self.size}, {self.dtype}, logits {self.logits}{more}"

    @property
    def differentiated(self) -> tuple[int, ...]:
        """The numbers of the arguments that have a gradient."""
        return (0, 1, 4) if self.form == "bias" else (0, 1)

    @property
    def product_flop(self) -> int:
        return 2 * self.rows * self.features * self.size

    @property
    def calls(self) -> int:
        return 1 if self.product_flop > LONG else CALLS


CURVE = (512, 1024, 2048, 4096)
ON_A_GPU = (
    *(
        Case(*sizes, logits=logits, chunks=CURVE)
        for logits in ("float32", "bfloat16")
        for sizes in ((8192, 2048, 32768), (32768, 2560, 128256))
    ),
    *(Case(8192, 2048, size) for size in (50257, 151936)),
    *(Case(rows, 2048, 32768) for rows in (1, 1000, 4097)),
    *(
        Case(8192, 2048, 32768, logits=logits, form=form)
        for form in ("bias", "softcap", "accuracy")
        for logits in ("float32", "bfloat16")
    ),
    Case(8192, 768, 30522, logits="bfloat16", form="bias"),
    Case(8192, 2304, 256000, form="softcap"),
    Case(8192, 768, 50257, logits="bfloat16", form="accuracy"),
)
ON_A_CPU = (
    Case(2048, 256, 32768, "float32", chunks=(128, 256, 512, 1024)),
    *(Case(rows, 256, 32768, "float32") for rows in (1, 1000, 4097)),
    Case(1024, 256, 50257, "float32"),
)
TINY = (
    Case(96, 16, 64, "float32", chunks=(32,)),
    *(Case(64, 16, 64, form=form) for form in ("", "bias", "softcap", "accuracy")),
)


def arguments(case: Case) -> tuple[Any, ...]:
    """x, w, labels, the weights of a mean and a bias."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (case.rows, case.features)).astype(case.dtype)
    w = (jax.random.normal(keys[1], (case.features, case.size)) * case.features**-0.5).astype(case.dtype)
    bias = jax.random.normal(jax.random.key(1), (case.size,)).astype(case.dtype)
    return x, w, jax.random.randint(keys[2], (case.rows,), 0, case.size), jnp.full(case.rows, 1 / case.rows), bias


def plain(x: Any, w: Any, labels: Any, weights: Any, bias: Any, *, logits: str, form: str) -> Any:
    """The loss with the logits of all rows; with the accuracy, if that is asked for."""
    import jax
    import jax.numpy as jnp

    h = jnp.matmul(x, w, preferred_element_type=logits)
    h = (h + bias.astype(logits) if form == "bias" else h).astype(jnp.float32)
    h = CAP * jnp.tanh(h / CAP) if form == "softcap" else h
    picked = jnp.take_along_axis(h, labels[:, None], axis=-1)[:, 0]
    loss = jnp.mean(jax.nn.logsumexp(h, axis=-1) - picked)
    return (loss, jnp.mean(jnp.argmax(h, axis=-1) == labels)) if form == "accuracy" else loss


def fused(x: Any, w: Any, labels: Any, weights: Any, bias: Any, *, logits: str | None, form: str, **how: Any) -> Any:
    """The same by the op."""
    import jax.numpy as jnp

    import fusionlab as fl

    more = {"bias": {"bias": bias}, "softcap": {"softcap": CAP}, "accuracy": {"also": ("argmax",)}}.get(form, {})
    found = fl.ops.linear_cross_entropy(x, w, labels, weights=weights, logits_dtype=logits, **more, **how)
    return (found[0], jnp.mean(found[1] == labels)) if form == "accuracy" else found


def programs(case: Case) -> dict[str, Callable[..., Any]]:
    """The losses, by name."""
    own = functools.partial(fused, logits=case.logits, form=case.form)
    chunks = {f"{n} rows": functools.partial(own, chunk=n, implementation="xla_chunked") for n in case.chunks}
    return {"jax.jit": functools.partial(plain, logits=case.logits, form=case.form), "fusionlab": own, **chunks}


def graded(loss: Callable[..., Any], case: Case) -> Callable[..., Any]:
    """The loss and its gradients."""
    import jax

    return jax.value_and_grad(loss, case.differentiated, has_aux=case.form == "accuracy")


def truth(case: Case, args: tuple[Any, ...]) -> Any:
    """Loss and gradients in float64, on the device."""
    import jax

    with jax.enable_x64(True):
        x, w, labels, weights, bias = args
        wide = x.astype("float64"), w.astype("float64"), labels, weights.astype("float64"), bias.astype("float64")
        loss = functools.partial(fused, logits=None, form=case.form, implementation="xla_chunked", chunk=512)
        return jax.jit(graded(loss, case))(*wide)


def errors(case: Case, found: Any, true: Any) -> list[float]:
    """Of the loss and of the gradients."""
    import jax

    def compared(result: Any) -> list[Any]:
        loss, gradients = result
        return [loss[0] if case.form == "accuracy" else loss, *gradients]

    with jax.enable_x64(True):
        return [float(_error()(a, t)) for a, t in zip(compared(found), compared(true), strict=True)]


@functools.cache
def _error() -> Callable[[Any, Any], Any]:
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda a, t: jnp.linalg.norm((a.astype(t.dtype) - t).ravel()) / jnp.linalg.norm(t.ravel()))


def operations(fn: Callable[..., Any], args: tuple[Any, ...], compiled: Any, case: Case) -> dict[str, float | None]:
    """Over those of the product: of the compiled program and of the one before; None where XLA gives no number. XLA counts a loop's body
    once; all is multiplied by the trips of the longest loop."""
    import jax

    trips = max((int(n) for n in re.findall(r"known_trip_count\D*(\d+)", compiled.as_text())), default=1)
    counts = {"compiled": compiled, "lowered": jax.jit(fn).lower(*args)}
    flop = {name: (p.cost_analysis() or {}).get("flops") for name, p in counts.items()}
    return {name: None if n is None else n * trips / case.product_flop for name, n in flop.items()}


def on_a_cpu(running: Mapping[str, Callable[[], Any]], samples: int) -> dict[str, Any]:
    """Processor time of programs that take turns."""
    import jax

    times: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(samples + 1):
        for name, run in running.items():
            begun = time.process_time()
            jax.block_until_ready(run())
            if turn:  # the first is to warm up
                times[name].append(time.process_time() - begun)
    return compared(times, "jax.jit", 1)


def torch_step(case: Case, args: tuple[Any, ...]) -> Callable[[], Any]:
    """Loss and both gradients by torch.compile, on copies of JAX's arrays."""
    import numpy as np
    import torch
    from torch.nn import functional

    x, w, bias = (
        torch.from_numpy(np.asarray(args[i].astype("float32")))
        .to(torch_device(), getattr(torch, case.dtype))
        .requires_grad_()
        for i in (0, 1, 4)
    )
    labels = torch.from_numpy(np.asarray(args[2])).long().to(torch_device())

    @torch.compile
    def loss(x: Any, w: Any, bias: Any) -> tuple[Any, Any]:
        h = functional.linear(x, w.T, bias) if case.form == "bias" else x @ w
        h = h.float() if case.logits == "float32" else h
        h = CAP * torch.tanh(h / CAP) if case.form == "softcap" else h
        right = (h.argmax(-1) == labels).float().mean() if case.form == "accuracy" else None
        return functional.cross_entropy(h, labels), right

    wanted = (x, w, bias) if case.form == "bias" else (x, w)
    return lambda: torch.autograd.grad(loss(x, w, bias)[0], wanted)


def measure(case: Case, found: dict[str, Any], on_cuda: bool, samples: int) -> None:
    """Adds times, temporaries and errors of each program; of the loss alone the operations, too."""
    import fusionlab as fl

    args, losses, failures = arguments(case), programs(case), found["failures"]
    steps = {name: (graded(f, case), args) for name, f in losses.items()}
    steps[STEP_FUSED] = (fl.fuse(steps["jax.jit"][0]), args)
    running = compiled_at_once(steps, failures)
    alone = compiled_at_once({name: (losses[name], args) for name in ("jax.jit", "fusionlab")})
    clock = functools.partial(measured, base="jax.jit", calls=case.calls) if on_cuda else on_a_cpu
    found |= clock(running, samples=samples)
    forward = clock(alone, samples=samples)
    for timings, compiled in ((found, running), (forward, alone)):
        for name, run in compiled.items():
            timings[name]["temporaries_bytes"] = run.func.memory_analysis().temp_size_in_bytes
    base = found["jax.jit"]["temporaries_bytes"]
    for name in running:
        found[name]["share"] = found[name]["temporaries_bytes"] / base if base else None
    for name, run in alone.items():
        counted = attempt(
            failures, f"operations of {name}", lambda n=name, r=run: operations(losses[n], args, r.func, case)
        )
        forward[name]["flop_over_product"] = counted
    found |= {"forward": forward, "product_flop": case.product_flop}
    true = attempt(failures, "float64", lambda: truth(case, args))
    for name, run in running.items() if true is not None else ():
        found[name]["errors"] = attempt(failures, f"errors of {name}", lambda r=run: errors(case, r(), true))


def measure_torch(case: Case, found: dict[str, Any], samples: int) -> None:
    """Adds torch.compile's step."""

    def of_torch() -> dict[str, Any]:
        times = torch_samples(torch_step(case, arguments(case)), samples, case.calls)
        return timed(times, case.calls) | ratio_to("jax.jit", found["jax.jit"]["samples_s"], times)

    if (one := attempt(found["failures"], "torch.compile", of_torch)) is not None:
        found["torch.compile"] = one
        for name in found.keys() & {"fusionlab", STEP_FUSED, *(f"{n} rows" for n in case.chunks)}:
            over = ratio_to("torch.compile", one["samples_s"], found[name]["samples_s"])
            found[name]["over torch.compile"] = over
    torch_forgotten()


def lines(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Times of a case; then the share of jit's temporaries and the errors of each program, and the operations of the loss alone."""
    yield line(name, found)
    yield line("  the loss alone", found.get("forward", {}))
    there = {name: one for name, one in found.items() if isinstance(one, dict) and "temporaries_bytes" in one}
    for label, one in there.items():
        share = f" ({one['share']:.3f} of jit's)" if one.get("share") else ""
        wrong = (
            f", errors of loss and gradients {'/'.join(f'{e:.1e}' for e in one['errors'])}" if one.get("errors") else ""
        )
        over = one.get("over torch.compile")
        rival = (
            f", {over['ratio']:.3f} [{over['interval'][0]:.3f}, {over['interval'][1]:.3f}] over torch" if over else ""
        )
        yield f"  {label}: {one['temporaries_bytes'] / 2**20:.0f} MiB of temporaries{share}{rival}{wrong}"
    for label, one in found.get("forward", {}).items():
        yield f"  the loss alone, {label}: operations over the product's {one['flop_over_product']}"
    yield from (f"  {label}: {why}" for label, why in found["failures"].items())


def main(argv: list[str]) -> int:
    """Prints lines for each case and writes the record. Returns the exit status."""
    parser = parser_of("linear_cross_entropy", __doc__)
    parser.add_argument("--only", default="", help='only the cases with this text, or one of "A|B"')
    options = parser.parse_args(argv)

    from fusionlab.device import Device

    on_cuda = Device.current().platform == "cuda"
    cases = TINY if options.quick else ON_A_GPU if on_cuda else ON_A_CPU
    samples = 2 if options.quick else 15 if on_cuda else 5
    record = continued(new_record("linear_cross_entropy", options) | {"cases": {}}, options)
    named = {case.name: case for case in cases}
    for name in chosen(named, options.only):
        record["cases"][name] = found = {"failures": {}}
        attempt(found["failures"], name, functools.partial(measure, named[name], found, on_cuda, samples))
        save(record, options, on_cuda)  # what is measured is not lost where the run is cut off
        if has_torch() and "jax.jit" in found:
            measure_torch(named[name], found, samples)
        save(record, options, on_cuda)
        if not options.json:
            print(*lines(name, found), sep="\n", flush=True)
    finish(record, options, on_cuda)
    return 0
