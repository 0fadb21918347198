"""Every class that a public function returns an object of, found by reading the annotations; and the page that lists them.

`python -m tests.objects` (from the repository's root) writes docs/objects.md anew. The walk begins at what is public by name
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
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fusionlab

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
    "Fused": "a function, called as its original is; prints what is fused in it",
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
    hints = typing.get_type_hints(inspect.unwrap(function), localns=names())
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
        hints = typing.get_type_hints(cls, localns=names())
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


if __name__ == "__main__":
    for cls, way in public_classes().items():
        print(cls.__name__, cls.__module__, way)
