"""The train step of the Llama-like model with its parameters and its optimizer sharded over GPUs of one host, fused and unfused.

    python -m benchmarks fsdp [--json] [-o FILE] [--quick] [--devices N] [--batch B] [--only TEXT]

The model is that of `python -m benchmarks language_models`, scanned, bfloat16. A step is loss, gradients and AdamW with float32 moments.
One mesh axis: each parameter, and its moments, is sharded along its largest axis, and the texts over the same mesh axis.

"one card" is the step on one device, with the texts that each device has of the others. "auto" has shardings of the arguments alone;
"auto, constrained" also constraints, weights whole where they are used and activations by texts; "explicit" the same by `reshard` on an
Explicit axis. In each, `jax.jit` is the plain program, `grad of fused` takes `value_and_grad(fl.fuse(loss))`, `fused grad` takes
`fl.fuse(value_and_grad(loss))`, and `by hand` has cuDNN's attention through `jax.nn`. What fails is a line under `failures`.

"head" is the loss of x @ w alone, with its gradients, on one device and with rows and with the vocabulary sharded: plain JAX, and
`fl.ops.linear_cross_entropy`.

Of each program: wall time of a call, blocked on all devices, those of a row in turns; the collectives of the compiled program, loops
unrolled; what it allocates on a device; and the relative difference of loss and gradients from the plain program on one device and all
texts (the gradients are read off the first moments). `gain` is the ratio to `jax.jit`, over the ratio of the same program on one card.
With --quick and no GPUs it runs tiny sizes on simulated devices (XLA_FLAGS=--xla_force_host_platform_device_count=2).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..measuring import (
    attempt,
    chosen,
    compiled_at_once,
    differences,
    finish,
    new_record,
    normal,
    parser_of,
    peak_bytes,
    save,
)
from ..programs.language_expert import BY_HAND, PLAIN, Written
from ..programs.language_rows import FUSED, FUSED_GRAD, GRAD_OF_FUSED
from ..programs.language_steps import CASES, TINY, Llama, _cross_entropy, tokens_of
from .tensor_parallel import times

AXIS = "data"
ONE, HEAD = "one card", "head"
PLAIN_HEAD, OP = "jax.jit", "linear_cross_entropy"
LEAST_GAIN = 0.95  # of one card's
RATE, DECAY, BETAS, EPSILON = 1e-4, 0.1, (0.9, 0.95), 1e-8


@dataclass(frozen=True)
class Layout:
    """How arrays lie on a mesh of one axis.

    Attributes:
      mesh: of some devices.
      written: how the loss says so itself.
    """

    mesh: Any
    written: Written = PLAIN

    def sharding(self, *spec: Any) -> Any:
        import jax

        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*spec))

    def along_largest(self, array: Any) -> Any:
        """The sharding of an array along its largest axis; replicated where that cannot be split evenly."""
        axis = max(range(array.ndim), key=lambda i: array.shape[i], default=None)
        if axis is None or array.shape[axis] % self.mesh.size:
            return self.sharding()
        return self.sharding(*(AXIS if i == axis else None for i in range(array.ndim)))

    def by_hand(self) -> Written:
        return replace(self.written, attend=BY_HAND.attend)


def layouts(count: int) -> Iterator[tuple[str, Layout]]:
    """Ways to write the sharded step, by name."""
    import jax

    def mesh_of(kind: Any) -> Any:
        return jax.make_mesh((count,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:count])

    auto, explicit = (Layout(mesh_of(kind)) for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit))
    constrain = jax.lax.with_sharding_constraint
    whole, rows = auto.sharding(), auto.sharding(AXIS)
    yield "auto", auto
    constrained = replace(
        PLAIN, whole=lambda tree: jax.tree.map(lambda a: constrain(a, whole), tree), rows=lambda x: constrain(x, rows)
    )
    yield "auto, constrained", replace(auto, written=constrained)
    everywhere, split = explicit.sharding(), explicit.sharding(AXIS)
    typed = replace(
        PLAIN,
        whole=lambda tree: jax.tree.map(lambda a: jax.sharding.reshard(a, everywhere), tree),
        looked_up=lambda table, tokens: table.at[tokens].get(out_sharding=split),
    )
    yield "explicit", replace(explicit, written=typed)


def adamw(graded: Callable[..., Any]) -> Callable[..., Any]:
    """A first step of AdamW: (parameters, moments, tokens) -> (loss, parameters, moments); moments are pairs, float32."""
    import jax
    import jax.numpy as jnp

    one, two = BETAS

    def updated(p: Any, g: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
        g = g.astype(jnp.float32)
        m, v = one * m + (1 - one) * g, two * v + (1 - two) * jnp.square(g)
        change = m / (1 - one) / (jnp.sqrt(v / (1 - two)) + EPSILON) + DECAY * p.astype(jnp.float32)
        return (p - RATE * change).astype(p.dtype), m, v

    def step(parameters: Any, moments: tuple[Any, Any], tokens: Any) -> Any:
        loss, gradients = graded(parameters, tokens)
        found = jax.tree.map(updated, parameters, gradients, *moments)
        new, m, v = (jax.tree.map(lambda _, three, i=i: three[i], parameters, found) for i in range(3))
        return loss, new, (m, v)

    return step


def steps(case: Llama, layout: Layout) -> dict[str, Callable[..., Any]]:
    """The train step, by name."""
    import jax

    import fusionlab as fl

    loss = case.loss(layout.written)
    return {
        "jax.jit": adamw(jax.value_and_grad(loss)),
        GRAD_OF_FUSED: adamw(jax.value_and_grad(fl.fuse(loss))),
        FUSED_GRAD: adamw(fl.fuse(jax.value_and_grad(loss))),
        "by hand": adamw(jax.value_and_grad(case.loss(layout.by_hand()))),
    }


def arguments(case: Llama, layout: Layout) -> tuple[Any, ...]:
    """Parameters, moments of zero and tokens, where they lie."""
    import jax
    import jax.numpy as jnp

    parameters = case.parameters()
    placed = jax.tree.map(lambda a: jax.device_put(a, layout.along_largest(a)), parameters)
    zeros = jax.tree.map(lambda a: jax.device_put(jnp.zeros(a.shape, jnp.float32), layout.along_largest(a)), parameters)
    split = layout.sharding(*([AXIS] if layout.mesh.size > 1 else []))
    return placed, (zeros, zeros), jax.device_put(tokens_of(case), split)


def measure(
    made: Mapping[str, Callable[..., Any]],
    args: tuple[Any, ...],
    layout: Layout,
    reference: Any,
    part: Callable[[Any], Any],
    samples: int,
) -> dict[str, Any]:
    """A row: each program's times, collectives, memory and differences from a reference; what fails is in its `failures`.

    `part` of a result is compared: (loss, gradients).
    """
    import jax

    from fusionlab.graph.xla.collectives import traffic

    found: dict[str, Any] = {"devices": layout.mesh.size, "failures": {}}
    with jax.set_mesh(layout.mesh) if _is_explicit(layout) else contextlib.nullcontext():
        running = compiled_at_once(
            {name: (with_layout(fn, args), args) for name, fn in made.items()}, found["failures"]
        )
        for name, run in dict(running).items():
            result = attempt(found["failures"], name, functools.partial(_done, run))
            if result is None:
                del running[name]
                continue
            program = run.func
            found[name] = {
                "collectives": {
                    kind: {"count": t.count, "bytes": t.bytes} for kind, t in traffic(program.as_text()).items()
                },
                "peak_bytes": peak_bytes(program),
                "temporaries_bytes": program.memory_analysis().temp_size_in_bytes,
                **_apart(part(result), reference),
            }
        timed = attempt(found["failures"], "timing", lambda: times(running, samples)) if running else {}
    for name, one in (timed or {}).items():
        found[name] |= one
    return found


def with_layout(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """The program, whose parameters and moments come back as they were given; any other is as it is."""
    import jax

    if len(args) != 3 or not isinstance(args[1], tuple):
        return fn
    like = jax.tree.map(lambda a: a.sharding, args[:2])
    return jax.jit(fn, out_shardings=(None, *like))


def _is_explicit(layout: Layout) -> bool:
    import jax

    return jax.sharding.AxisType.Explicit in layout.mesh.axis_types


def _done(run: Callable[[], Any]) -> Any:
    import jax

    return jax.block_until_ready(run())


def _apart(got: Any, want: Any) -> dict[str, float]:
    """How far loss and gradients are from a reference's, which is moved to where they lie."""
    import jax

    if want is None:
        return {}
    want = jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), want, got)
    return {"loss": differences(want[0], got[0]), "gradients": differences(want[1], got[1])}


def of_step(result: Any) -> Any:
    """(loss, gradients times a constant) of a step's results."""
    return result[0], result[2][0]


def reference_of(fn: Callable[..., Any], args: tuple[Any, ...], part: Callable[[Any], Any]) -> Any:
    """What a program on one device gives, on the host."""
    import jax

    return jax.device_get(part(jax.jit(fn)(*args)))


# The head.


def head_programs(case: Llama) -> dict[str, Callable[..., Any]]:
    """The loss of (x, w, labels) with its gradients, by name."""
    import jax
    import jax.numpy as jnp

    import fusionlab as fl

    def fused(x: Any, w: Any, labels: Any) -> Any:
        weights = jnp.full(labels.shape, 1 / labels.size, jnp.float32)
        return fl.ops.linear_cross_entropy(x, w, labels, weights=weights, logits_dtype=x.dtype)

    plain = jax.value_and_grad(lambda x, w, labels: _cross_entropy(x @ w, labels), (0, 1))
    return {PLAIN_HEAD: plain, OP: jax.value_and_grad(fused, (0, 1))}


def head_arguments(case: Llama, layout: Layout, *specs: tuple[Any, ...]) -> tuple[Any, ...]:
    """x [batch, length, E], w [E, V] and labels, with these specs."""
    import jax

    arrays = (
        normal(1, case.batch, case.length, case.width),
        normal(2, case.width, case.vocabulary, scale=0.02),
        tokens_of(case)[:, 1:],
    )
    return tuple(jax.device_put(a, layout.sharding(*spec)) for a, spec in zip(arrays, specs, strict=True))


def heads(case: Llama, one: Layout, several: Layout, samples: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of the head: (name, row); on one card with the rows that each device has of them all."""
    made, none = head_programs(case), ((), (), ())
    part = replace(case, batch=case.batch // several.mesh.size)
    yield f"{HEAD}, {ONE}", measure(made, head_arguments(part, one, *none), one, None, _itself, samples)
    whole = reference_of(made[PLAIN_HEAD], head_arguments(case, one, *none), _itself)
    for name, specs in (("rows", ((AXIS,), (), (AXIS,))), ("vocabulary", ((), (None, AXIS), ()))):
        args = head_arguments(case, several, *specs)
        yield f"{HEAD}, {name}", measure(made, args, several, whole, _itself, samples)


def _itself(result: Any) -> Any:
    return result


# The command.


def main(argv: list[str]) -> int:
    """Prints a table and writes the record. Returns the exit status: 2 where there are too few devices."""
    parser = parser_of("fsdp", __doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch", type=int, help="texts, of all devices; 4 for each unless given")
    parser.add_argument(
        "--only", default="", help='only the rows with this text, or one of "A|B"; one card is always there'
    )
    options = parser.parse_args(argv)
    import jax

    on_cuda = jax.devices()[0].platform == "gpu"
    if jax.device_count() < options.devices or not (on_cuda or options.quick):
        print(
            f"this benchmark needs {options.devices} GPUs (JAX sees {jax.device_count()} devices), or --quick for tiny sizes",
            file=sys.stderr,
        )
        return 2
    case = replace((CASES if on_cuda else TINY)[0], batch=options.batch or 4 * options.devices)
    assert isinstance(case, Llama)
    record = new_record("fsdp", options) | {"shape": _shape(case, options.devices), "cases": {}}
    for name, found in rows(case, options.devices, options.only, 2 if options.quick else 20):
        record["cases"][name] = found
        compare(record["cases"])
        save(record, options, on_cuda)
        print(f"{name}: done", file=sys.stderr, flush=True)
    finish(record, options, on_cuda)
    if not options.json:
        print(*lines(record["cases"]), sep="\n")
    return 0


def _shape(case: Llama, devices: int) -> dict[str, Any]:
    names = ("layers", "width", "heads", "groups", "features", "inner", "vocabulary", "batch", "length")
    return {name: getattr(case, name) for name in names} | {"devices": devices}


def rows(case: Llama, count: int, only: str, samples: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, row), the most important ones first: a run may be cut off."""
    import jax

    one = Layout(jax.make_mesh((1,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]))
    ways = dict(layouts(count))
    order = ["explicit", "auto, constrained", "auto"]
    if wanted := chosen(order, only):
        part = replace(case, batch=case.batch // count)
        yield ONE, measure(steps(part, one), arguments(part, one), one, None, of_step, samples)
        whole = reference_of(steps(case, one)["jax.jit"], arguments(case, one), of_step)
        for name in wanted:
            layout = ways[name]
            yield name, measure(steps(case, layout), arguments(case, layout), layout, whole, of_step, samples)
    if chosen([HEAD], only):
        yield from heads(case, one, ways["auto"], samples)


def compare(cases: dict[str, Any]) -> None:
    """Adds to each program of several devices its gain and its collectives over those of jax.jit."""
    for name, found in cases.items():
        alone = cases.get(f"{HEAD}, {ONE}" if name.startswith(HEAD) else ONE, {})
        for program in (*FUSED, OP):
            ours, base = found.get(program), found.get("jax.jit")
            if not (ours and base and found["devices"] > 1):
                continue
            ours["same_collectives"] = ours["collectives"] == base["collectives"]
            ours["bytes_over_jit"] = _bytes(ours) / max(_bytes(base), 1)
            ours["peak_over_jit"] = ours["peak_bytes"] / base["peak_bytes"]
            if "ratio" in ours and "ratio" in alone.get(program, {}):
                ours["gain_over_one_card"] = ours["ratio"] / alone[program]["ratio"]


def _bytes(one: Mapping[str, Any]) -> int:
    return sum(t["bytes"] for t in one["collectives"].values())


def lines(cases: Mapping[str, Any]) -> Iterator[str]:
    """The table as text."""
    for name, found in cases.items():
        yield f"{name} ({found['devices']} devices)"
        yield from (_line(label, one) for label, one in found.items() if isinstance(one, dict) and "peak_bytes" in one)
        yield from (f"  {label}: {why}" for label, why in found["failures"].items())


def _line(label: str, one: Mapping[str, Any]) -> str:
    parts = []
    if "median_s" in one:
        low, high = one["interval"]
        parts.append(f"{one['median_s'] * 1e3:.2f} ms, {one['ratio']:.3f}x [{low:.3f}, {high:.3f}]")
    if "gain_over_one_card" in one:
        gain = one["gain_over_one_card"]
        parts.append(f"gain {gain:.3f} of one card's ({'within' if gain >= LEAST_GAIN else 'below'} {LEAST_GAIN})")
    parts.append(f"peak {one['peak_bytes'] / 2**30:.2f} GiB")
    if one["collectives"]:
        kinds = ", ".join(f"{t['count']} {kind} {t['bytes'] / 1e6:.1f}" for kind, t in one["collectives"].items())
        parts.append(f"MB: {kinds}")
        if "bytes_over_jit" in one:
            share = "as jax.jit" if one["same_collectives"] else f"{one['bytes_over_jit']:.2f} of jax.jit's bytes"
            parts[-1] += f" ({share})"
    if "loss" in one:
        parts.append(f"loss {one['loss']:.1e}, gradients {one['gradients']:.1e}")
    return f"  {label}: " + "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
