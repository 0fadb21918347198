"""Every class that a public function returns an object of, found by reading the annotations; and the page that lists them.

`python -m tests.manners.objects` (from the repository's root) writes docs/objects.md anew. The walk begins at what is public by name
(`fusionlab.__all__`, its `ops`, `testing` and `evidence`) or by use (what README, docs and notebooks import), and goes on through what the
methods, properties and fields of a class give.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import json
import pkgutil
import re
import sys
import tempfile
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fusionlab
from fusionlab.fusers import Pass
from fusionlab.showing import Shown, line

ROOT = Path(fusionlab.__file__).parents[1]
PAGE = ROOT / "docs" / "objects.md"
# Of the evidence's modules, beside what its face names.
MORE = (
    "attribution.parts_of",
    "attribution.sites_of",
    "instruments.peaks.measure_peaks",
    "kernel_times.kernel_times",
    "node_times.node_times",
    "record_diff.diff_records",
    "roofline.roofline",
)
# These are no results: class -> what they are.
OTHERS = {
    "Fused": "a function, called as its original is; prints the passes that search it",
    "Explorer": "the widget: in a notebook it shows itself; elsewhere it prints what it is and how it is seen",
    "FusedPrimitive": "a primitive of JAX's",
    "Op": "an op, whose functions are in `fusionlab.ops`",
    "PatternOp": "an op, made by `pattern_pass`",
    "Session": "what an explorer shows, in plain data",
    "Html": "a text of HTML",
}


def modules() -> dict[str, Any]:
    """Every module of the package, by name."""
    for found in pkgutil.walk_packages(fusionlab.__path__, "fusionlab."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "fusionlab"}


@functools.cache
def names() -> dict[str, Any]:
    """Class name -> class, for annotations whose names are imported for type checkers alone."""
    found: dict[str, Any] = {}
    for module in modules().values():
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__.startswith("fusionlab"):
                found.setdefault(name, value)
    return found


def _beside(own: Mapping[str, Any]) -> dict[str, Any]:
    """What a module's annotations may name beside its own names."""
    return {name: cls for name, cls in names().items() if name not in own}


def starts() -> Iterator[tuple[str, Any]]:
    """(what it is called, function or class): all that is public."""
    for module in (
        fusionlab,
        fusionlab.ops,
        importlib.import_module("fusionlab.testing"),
        importlib.import_module("fusionlab.evidence"),
    ):
        for name in module.__all__:
            yield f"{module.__name__.replace('fusionlab', 'fl')}.{name}", getattr(module, name)
    for name in (*MORE, *sorted(imported())):
        module, _, function = f"fusionlab.evidence.{name}".rpartition(".")
        yield f"evidence.{name}", getattr(importlib.import_module(module), function)


def imported() -> set[str]:
    """What README, docs and notebooks import of the evidence's modules."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts += ["".join(cell["source"]) for cell in cells]
    lines = re.findall(r"^from fusionlab\.evidence\.([\w.]+) import \(?([\w, ]+)", "\n".join(texts), re.MULTILINE)
    found = {f"{module}.{name.split(' as ')[0].strip()}" for module, given in lines for name in given.split(",")}
    return {name for name in found if not name.endswith(".")}


def classes_of(given: Any) -> Iterator[type]:
    """The classes of the package that an annotation names."""
    origin = typing.get_origin(given)
    hint = origin if inspect.isclass(origin) else given
    if inspect.isclass(hint) and hint.__module__.startswith("fusionlab"):
        yield hint
    for inner in typing.get_args(given):
        yield from classes_of(inner)


def returned(function: Any) -> list[type]:
    function = inspect.unwrap(function)
    hints = typing.get_type_hints(function, localns=_beside(function.__globals__))
    return list(classes_of(hints.get("return")))


def given_by(cls: type) -> Iterator[tuple[str, type]]:
    """(how, class): what the public methods, properties and fields of a class give."""
    for name, value in inspect.getmembers_static(cls):
        function = (
            getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None) or value
        )
        if name.startswith("_") or not inspect.isfunction(function) or not function.__module__.startswith("fusionlab"):
            continue
        call = "" if isinstance(value, property | functools.cached_property) else "()"
        yield from ((f".{name}{call}", found) for found in returned(function))
    if dataclasses.is_dataclass(cls):
        hints = typing.get_type_hints(cls, localns=_beside(vars(sys.modules[cls.__module__])))
        for field in dataclasses.fields(cls):
            if field.repr and not field.name.startswith("_"):
                yield from ((f".{field.name}", found) for found in classes_of(hints[field.name]))


@functools.cache
def public_classes() -> dict[type, str]:
    """Class -> the shortest way to one of its objects."""
    found: dict[type, str] = {}
    waiting: list[type] = []

    def add(cls: type, way: str) -> None:
        if (
            cls not in found
            and not issubclass(cls, BaseException | enum.Enum)
            and not getattr(cls, "_is_protocol", False)
        ):
            found[cls] = way
            waiting.append(cls)

    for name, value in starts():
        if inspect.isclass(value):
            add(value, name)
        elif callable(value):
            for cls in returned(value):
                add(cls, f"{name}()")
    while waiting:
        cls = waiting.pop(0)
        if cls.__name__ not in OTHERS or cls.__name__ in ("Explorer", "Fused"):
            for how, inner in given_by(cls):
                add(inner, found[cls] + how)
    return found


def program(x, w, v, b):
    """Two fused sites, a declined one, a product alone."""
    hidden = jax.nn.gelu(x @ w + b)
    return jnp.sum(jax.nn.relu(hidden @ v) * jax.nn.softmax(hidden @ v, axis=-1))


def kept(x, w):
    """A site whose inner value is read outside: declined."""
    hidden = x @ w
    return jax.nn.relu(hidden), hidden


def scanned(w, x):
    """The gradient of layers in a scan, with what it stacks."""
    return jax.grad(lambda w: jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(jnp.tanh(x @ w)), None), x, w)[0]))(w)


def arguments() -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(
        jax.random.normal(k, shape) for k, shape in zip(keys, ((8, 16), (16, 16), (16, 4), (16,)), strict=True)
    )


def roots(folder: Path) -> Iterator[Any]:
    """Real objects, from the verbs and what they give."""
    from fusionlab import evidence
    from fusionlab.evidence import attribution, node_times, record_diff, roofline
    from fusionlab.evidence.advice.tried import Advice, TriedLint

    args = arguments()
    found = fusionlab.find(program, *args)
    yield from (
        found,
        found.counts(),
        found.explain("%5"),
        found.cost(),
        found.cost().total,
        found.routes(),
        found.xla(),
    )
    yield from (found.kernels(), found.structures, found.graph, fusionlab.passes(), fusionlab.Strategy(lerp=True))
    yield fusionlab.find(jax.grad(program), *args)
    yield fusionlab.find(kept, *args[:2]).rejections
    card = dataclasses.replace(fusionlab.Device.of("h100"), copy_bytes_per_s=3e12, gemm_flop_per_s=6e14)
    yield from (card, fusionlab.doctor(), fusionlab.testing.tolerance("float32"))
    fused = fusionlab.fuse(program)
    result = fusionlab.compare(program, fused, *args, samples=3, budget_s=1.0)
    run = evidence.Runs("before", (1e-3, 1.1e-3), 1, 0.1, 0.1, 0.1)
    timing = evidence.Timing(
        "call", run, dataclasses.replace(run, name="after"), 1.2, (1.1, 1.3), evidence.Verdict.FASTER, "a card"
    )
    result = dataclasses.replace(result, timing=timing, same_code=False)
    linted = fusionlab.find(scanned, jnp.ones((4, 16, 16)), jnp.ones((8, 16)))
    tried = TriedLint(linted.lints[0], timing)
    yield from (linted, linted.lints, Advice("scanned", (tried,), "a card"))
    plain = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    yield from (result, evidence.Evidence(**plain), fused, record_diff.diff_records(result, result))
    yield trained()
    yield fusionlab.bisect(program, *args)
    yield fusionlab.errors_by_site(program, *args)
    yield fusionlab.drift(program, *args)
    yield fusionlab.minimise(program, *args, shows=lambda fn, *xs: "tanh" in str(jax.make_jaxpr(fn)(*xs)))
    yield fusionlab.tune(program, *args)
    yield roofline.roofline(found, card, measured=1e-4).with_measured({})
    yield roofline.roofline(found, card, measured=1e-4).reconcile()
    nodes = node_times.node_times(found.graph, *args, runs=1)
    yield from (nodes, nodes.run, fusionlab.time_by_scope(program, *args, runs=1), fusionlab.diff(result, result))
    yield attribution.parts_of(found.graph, *args, samples=3, budget_s=1.0)
    share = attribution.SiteShare(found.candidates[0].id, run, 1e-5, (1.01, 1.05))
    yield attribution.SiteShares((share,), run, run, "a card")
    lab = fusionlab.explore(program, *args)
    lab.toggles["gemm_epilogue"] = False
    yield from (lab, lab.ledger, lab.setting, lab.toggles, lab.sites, lab.select("%5"), lab.code())
    yield fusionlab.load(lab.save(folder / "lab.json"))
    yield from by_hand()


def trained() -> Any:
    """A loss curve of one step, whose differences are made up."""
    from fusionlab.evidence.training.curve import StepRange
    from fusionlab.verbs.training import LossCurve

    here = fusionlab.evidence.environment()
    numbers = {
        "losses": (2.0,),
        "fused_losses": (2.5,),
        "loss_differences": ((1e-7,),),
        "distances": (0.1,),
        "band_distances": ((1e-6,),),
    }
    stretches = (StepRange("loss", 1, 1, 0.5, 1e-7, 1e-6), StepRange("params['w']", 1, 1, 0.1, 1e-6, 4e-6))
    return LossCurve("step", here, 1, "out[1]", ("params['w']",), (), stretches=stretches, **numbers)


def by_hand() -> Iterator[Any]:
    """What a CPU, or a program as small as this, gives none of."""
    from fusionlab.evidence import bisection, over_devices
    from fusionlab.evidence.errors import rounding
    from fusionlab.evidence.instruments import clocks, contention, device_clock, peak_buffers
    from fusionlab.fusers.report.waiting import Waiting
    from fusionlab.graph.xla.collectives import Traffic
    from fusionlab.kernels.choose.choices import Choice, Measured, case_text
    from fusionlab.kernels.choose.tuned import Untried
    from fusionlab.kernels.op.implementation import ChoiceKind, ImplementationChoice
    from fusionlab.kernels.ops.matmul.support import Reason

    yield fusionlab.evidence.ResidentGrowth("model:step", 1 << 30, 3 << 30, "VmHWM")
    yield clocks.Clocks(1980.0, 2619.0, 41.0, 350.0, (), 0.9)
    yield peak_buffers.LineBytes(3 << 20, 2, "model.py:41", "return jax.nn.softmax(scores) @ v")
    yield contention.Contention(1.0, 0.4, 2)
    yield rounding.Noise(8, 1e-5, 2e-6, 3)
    yield device_clock.DeviceTimes("after", (1e-3, 1.1e-3), 10)
    sent = over_devices.Collectives("call", {"all-reduce": Traffic(4, 131072)}, {"all-reduce": Traffic(2, 65536)})
    yield over_devices.OverDevices({"data": 2}, 2, 1, (sent,), {"before": {"0": 1e-3}})
    cause = bisection.Cause(("lerp@#1",), "output out is WORSE")
    trial = bisection.Trial(("lerp@#1",), True, "output out is WORSE")
    yield bisection.Bisection("step", "error", ("lerp@#1",), (cause,), (trial,))
    yield ImplementationChoice("xla", ChoiceKind.SLOWER, "measured: xla 10 µs, cuda 12 µs")
    yield Reason("dtype", "operands are f64")
    yield Untried(case_text("lerp", "call", dtype="float32", axes=["xyw"]), 1e-4)
    yield Waiting(("lerp@#1",), 2e-4, 1e-3)
    yield Measured({"{}": Choice("cuda", {"cuda": 10.0, "xla": 12.0})}, {}, "NVIDIA H100", {})
    yield fusionlab.CudaKernel('extern "C" __global__ void twice(...) {}', "twice")
    square = fusionlab.pattern_pass("square_of_sum", lambda x, y: (x + y) ** 2, axes={"x": "ij", "y": "ij"})
    yield from (square, square.fused_op, *fusionlab.passes())
    w = jnp.ones((16, 16))
    yield fusionlab.ops.TransformerLayer(out=w, up=w, down=w, q=w, k=w, v=w)


def found_in(value: Any, depth: int = 6) -> Iterator[Any]:
    """An object and what stands in its fields, as far as that is the package's."""
    if type(value).__module__.startswith("fusionlab"):
        yield value
    if depth == 0 or isinstance(value, str | fusionlab.Fused):
        return
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner = list(value.values())[:4]
    elif isinstance(value, tuple | list | frozenset):
        inner = list(value)[:8]
    elif dataclasses.is_dataclass(value):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value) if field.repr]
    elif isinstance(value, Pass):
        inner = list(value.declared.values())
    elif isinstance(value, Shown):
        inner = list(getattr(value, value._listed)) if value._listed else []
    for item in inner:
        yield from found_in(item, depth - 1)


def samples(folder: Path) -> dict[type, Any]:
    """Public class -> an object of it, or of a class derived from it."""
    values = [value for root in roots(folder) for value in found_in(root)]
    first = {cls: _first(values, cls) for cls in public_classes()}
    return {cls: value for cls, value in first.items() if value is not None}


def _first(values: Sequence[Any], cls: type) -> Any:
    exact = (value for value in values if type(value) is cls)
    return next(exact, next((value for value in values if isinstance(value, cls)), None))


# The page ----------------------------------------------------------------------------------------------------------
HEAD = """\
# What a call gives back

Every object that a public function returns prints as a sentence (`str` and `repr`), is a table in a notebook, and saves itself by
the suffix of a file: `result.save("x.csv")`. Another suffix is an error that names those it knows. `.json` has all of it, `.csv` the
rows of its table, `.txt` what it prints, `.html` what a notebook shows. `fusionlab/showing.py` does this for all of them. Texts, numbers,
enums and JAX's own objects are returned as they are.

This page is written by `python -m tests.manners.objects`, and tests/manners/test_objects.py holds it against the package:
the test fails if a class that is returned is missing here. The texts come from one small program on a CPU.

| object | where it comes from | prints (its first line) | in a notebook | `.save()` writes |
|---|---|---|---|---|
"""
VIEWS = {
    "Catalogue": "a picture of each pass, before and after",
    "Comparison": "tables of times, memory and the worst errors",
    "Explorer": "the widget; where no kernel runs a still picture",
    "Findings": "the picture of the graph, and what was found",
    "Graph": "the picture of the graph",
    "LossCurve": "its text, the losses and the distances as plots, and a table",
    "Text": "its lines",
}


def view_of(name: str) -> str:
    return VIEWS.get(name, "its text" if name in OTHERS else "a table")


def suffixes_of(value: Any) -> str:
    """The suffixes that `save` takes, as its error names them; "" without one."""
    if not hasattr(value, "save"):
        return ""
    try:
        value.save("x.nothing")
    except fusionlab.errors.ArgumentError as error:
        return str(error).rpartition("needed one of ")[2]
    raise AssertionError(value)


def first_line(value: Any) -> str:
    text = line(value).replace("|", "\\|")
    return f"{text[:117]}..." if len(text) > 120 else text


def page() -> str:
    with tempfile.TemporaryDirectory() as folder:
        values = samples(Path(folder))
    rows = {}
    for cls, way in public_classes().items():
        name, value = cls.__name__, values[cls]
        files = suffixes_of(value) or OTHERS[name]
        rows.setdefault(name, f"| `{name}` | `{way}` | {first_line(value)} | {view_of(name)} | {files} |\n")
    return HEAD + "".join(rows[name] for name in sorted(rows))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
