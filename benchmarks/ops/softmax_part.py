"""The softmax between the products of `linear_cross_entropy` alone: XLA's code for it, and the kernel, on logits that exist.

    python -m benchmarks softmax_part [--json] [-o FILE] [--quick] [--only TEXT] [--tiles]

Both make the losses, the statistics and the cotangent of the logits. Times are the device's. GB/s are of the bytes that have to be moved:
the logits read once and the cotangent written once; "of a copy" is over the rate of a large copy in the same run. Errors are norms of the
difference to the same in float64, of the first rows, over the norm: of the cotangent and of the losses. `--tiles` times other ways to lay
the kernel over rows. Without a CUDA device XLA's code alone runs, at tiny sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..measuring import (
    attempt,
    chosen,
    compiled_at_once,
    continued,
    finish,
    measured,
    new_record,
    parser_of,
    save,
)

BASE, KERNEL = "jax.jit", "kernel"
CHECKED = 64  # rows whose errors are taken


@dataclass(frozen=True)
class Case:
    """Rows, their width, the dtypes of logits and cotangent, and how many entries of a row are logits; None: all."""

    rows: int
    size: int
    dtype: str = "float32"
    out: str = "float16"
    classes: int | None = None

    @property
    def name(self) -> str:
        classes = f", {self.classes} classes" if self.classes else ""
        return f"N {self.rows}, V {self.size}{classes}, {self.dtype} to {self.out}"

    @property
    def bytes(self) -> int:
        import jax.numpy as jnp

        return self.rows * self.size * (jnp.dtype(self.dtype).itemsize + jnp.dtype(self.out).itemsize)


ON_A_GPU = (
    Case(8192, 32768),
    Case(8192, 32768, "bfloat16", "bfloat16"),
    Case(2048, 32768),
    Case(2048, 128256),
    Case(2048, 128256, "bfloat16", "bfloat16"),
    Case(8192, 50257, "bfloat16", "bfloat16"),
    Case(8192, 50304, "bfloat16", "bfloat16", 50257),
    Case(4096, 50257),
    Case(2048, 151936, "bfloat16", "bfloat16"),
    Case(8192, 32000, "bfloat16", "bfloat16"),
)
TINY = (Case(16, 100), Case(16, 100, "bfloat16", "bfloat16", 90))
# (threads of a block, blocks of a multiprocessor, vectors of a thread in registers)
TILES = (
    *((256, n, 2) for n in (3, 4)),
    *((512, n, 2) for n in (1, 2, 3)),
    *((512, 1, held) for held in (0, 8, 12)),
    *((512, 2, held) for held in (0, 4)),
    *((1024, 1, held) for held in (0, 2, 4)),
)


def arguments(case: Case) -> tuple[Any, ...]:
    """Logits, labels and cotangents of the losses: of weights over their size."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 2)
    h = jax.jit(lambda: jax.random.normal(keys[0], (case.rows, case.size), case.dtype))()
    return h, jax.random.randint(keys[1], (case.rows,), 0, case.classes or case.size), jnp.ones(case.rows)


def by_xla(h: Any, labels: Any, of_loss: Any, *, form: Any, out: str) -> dict[str, Any]:
    """What the loop over chunks makes of the logits of one."""
    from fusionlab.kernels.ops.linear_cross_entropy import rows

    of = rows.of_product(h, labels, None, form)
    top, mass = rows.statistics(of, form)
    dh = rows.through(of, top, mass, of_loss, None, form).astype(out)
    return {"top": top, "mass": mass, **rows.losses(of, top, mass, form), "dh": dh}


def by_kernel(h: Any, labels: Any, of_loss: Any, *, form: Any, out: str, tile: Any = None) -> dict[str, Any]:
    """The same by the kernel, which leaves the logits as they are: a program that is timed has them as an argument."""
    from fusionlab.kernels.ops.linear_cross_entropy.own.softmax_part import softmax_part

    return softmax_part(h, labels, of_loss, form, out, in_place=False, tile=tile)


def form_of(case: Case) -> Any:
    from fusionlab.device import Device
    from fusionlab.kernels.ops.linear_cross_entropy.settings import Settings

    return Settings(logits_dtype=case.dtype, classes=case.classes, device=Device.current())


def programs(case: Case, on_cuda: bool, tiles: bool) -> dict[str, Callable[..., Any]]:
    """By name; XLA's code first."""
    from fusionlab.kernels.ops.linear_cross_entropy.own.part_plan import limits_of, tile_of

    form = form_of(case)
    found = {BASE: functools.partial(by_xla, form=form, out=case.out)}
    if not on_cuda:
        return found
    kernel = functools.partial(by_kernel, form=form, out=case.out)
    found[KERNEL] = kernel
    limits = limits_of(form.device.arch)
    others = (tile_of(case.size, case.dtype, *laid[:2], limits, laid[2]) for laid in TILES if tiles)
    return found | {repr(tile): functools.partial(kernel, tile=tile) for tile in dict.fromkeys(others)}


def errors(found: Mapping[str, Any], args: tuple[Any, ...], case: Case) -> dict[str, float]:
    """Of the cotangent and the losses of the first rows, over their norms in float64."""
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(True):
        h, labels, of_loss = (a[:CHECKED] for a in args)
        form = replace(form_of(case), logits_dtype="float64")
        wide = h.astype("float64"), labels, of_loss.astype("float64")
        true = jax.jit(functools.partial(by_xla, form=form, out="float64"))(*wide)

        def of(name: str) -> float:
            got = found[name][:CHECKED].astype("float64")
            return float(jnp.linalg.norm(got - true[name]) / jnp.linalg.norm(true[name]))

        return {name: of(name) for name in ("dh", "loss")}


def measure(case: Case, found: dict[str, Any], options: Any, copy_bytes_per_s: float | None) -> None:
    """Adds time, rate and errors of each program."""
    args, failures = arguments(case), found["failures"]
    made = programs(case, bool(copy_bytes_per_s), options.tiles)
    running = compiled_at_once({name: (fn, args) for name, fn in made.items()}, failures)
    found |= measured(running, BASE, 2 if options.quick else 15)
    for name, run in running.items():
        one: dict[str, Any] = found[name]
        one["bytes_per_s"] = rate = case.bytes / one["median_s"]
        one["of_a_copy"] = rate / copy_bytes_per_s if copy_bytes_per_s else None
        one["errors"] = attempt(failures, f"errors of {name}", lambda r=run: errors(r(), args, case))


def lines(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """The programs of a case, the quickest first."""
    yield name
    timed = {label: one for label, one in found.items() if "median_s" in one}
    for label, one in sorted(timed.items(), key=lambda entry: entry[1]["median_s"]):
        share = f", {one['of_a_copy']:.3f} of a copy" if one["of_a_copy"] else ""
        wrong = f", errors of dh, loss {one['errors']['dh']:.2e}/{one['errors']['loss']:.1e}" if one["errors"] else ""
        ratio = f"{one['ratio']:.3f} [{one['interval'][0]:.3f}, {one['interval'][1]:.3f}]"
        yield f"  {one['median_s'] * 1e6:9.1f} us, {one['bytes_per_s'] / 1e9:6.0f} GB/s{share}, {ratio}{wrong}: {label}"
    yield from (f"  {label}: {why}" for label, why in found["failures"].items())


def main(argv: list[str]) -> int:
    """Prints lines for each case and writes the record. Returns the exit status."""
    parser = parser_of("softmax_part", __doc__)
    parser.add_argument("--only", default="", help='only the cases with this text, or one of "A|B"')
    parser.add_argument("--tiles", action="store_true", help="other ways to lay the kernel over rows, too")
    options = parser.parse_args(argv)

    from fusionlab.device import Device
    from fusionlab.evidence.instruments.peaks import measure_peaks

    on_cuda = Device.current().platform == "cuda"
    rate = measure_peaks().copy_bytes_per_s if on_cuda else None
    record: dict[str, Any] = continued(new_record("softmax_part", options) | {"cases": {}}, options)
    record["copy_bytes_per_s"] = rate
    named = {case.name: case for case in (ON_A_GPU if on_cuda else TINY)}
    for name in chosen(named, options.only):
        record["cases"][name] = found = {"failures": {}}
        attempt(found["failures"], name, functools.partial(measure, named[name], found, options, rate))
        save(record, options, on_cuda)  # what is measured is not lost where the run is cut off
        if not options.json:
            print(*lines(name, found), sep="\n", flush=True)
    finish(record, options, on_cuda)
    return 0
