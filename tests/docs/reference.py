"""What the API reference has to have: the public names, their docstrings, and the names that docs/api shows.

`python -m tests.docs.reference` prints how many public names there are, and those without a docstring or a page.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.manners.objects import OTHERS, public_classes

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api"
MODULES = ("fusionlab", "fusionlab.ops", "fusionlab.testing", "fusionlab.evidence")
DIRECTIVE = re.compile(r"^\.\. auto(?:function|class|module):: ([\w.]+)$", re.MULTILINE)
IMPORT = re.compile(r"^from (fusionlab[\w.]*) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


def public() -> Iterator[tuple[str, Any]]:
    """(name, object): all that a module lists, all that users' documents import, and all that docs/api shows."""
    for module in map(importlib.import_module, MODULES):
        yield from ((f"{module.__name__}.{name}", getattr(module, name)) for name in module.__all__)
    yield from ((name, named(name)) for name in sorted(imported() | set(shown())))


def shown() -> list[str]:
    """The names that the pages of docs/api show."""
    return [name for page in sorted(API.glob("*.md")) for name in DIRECTIVE.findall(page.read_text(encoding="utf-8"))]


def imported() -> set[str]:
    """The names of the package that README and the pages of docs/ import, without those of its models."""
    pages = [
        ROOT / "README.md",
        *(p for p in (ROOT / "docs").rglob("*.md") if not {"generated", "_build"} & set(p.parts)),
    ]
    found = set()
    for page in pages:
        for module, inner, rest in IMPORT.findall(page.read_text(encoding="utf-8")):
            names = re.findall(r"\w+(?: as \w+)?", inner or rest.partition("#")[0])
            found |= {f"{module}.{name.split(' ')[0]}" for name in names}
    return {name for name in found if not name.startswith("fusionlab.models")}


def named(name: str) -> Any:
    """The object of a dotted name."""
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except AttributeError:
        return importlib.import_module(name)


def classes() -> set[type]:
    """Every public class: by its name, or as what a public function returns an object of."""
    return {cls for cls in (*public_classes(), *(value for _, value in public())) if inspect.isclass(cls)}


def without_docstring() -> list[str]:
    """The public names, methods, properties and fields of which no docstring says anything."""
    lacking = [name for name, value in public() if not says_something(value)]
    for cls in classes():
        path = f"{cls.__module__}.{cls.__qualname__}"
        lacking += [f"{path}.{name}" for name, value in members(cls) if not inspect.getdoc(value)]
        lacking += [f"{path}.{name}: not in the class's docstring" for name in fields(cls)]
    return sorted(set(lacking))


def says_something(value: Any) -> bool:
    doc = inspect.getdoc(value) or ""
    # A dataclass without a docstring has its signature in its place.
    is_signature = inspect.isclass(value) and doc.startswith(f"{value.__name__}(")
    return bool(doc) and not is_signature


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class has of the package's, its own or inherited."""
    for name, value in inspect.getmembers_static(cls):
        function = (
            getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None) or value
        )
        if name.startswith("_") or not inspect.isfunction(function) or not function.__module__.startswith("fusionlab"):
            continue
        if not dataclasses.is_dataclass(cls) or name not in {f.name for f in dataclasses.fields(cls)}:
            yield name, getattr(cls, name) if isinstance(value, classmethod | staticmethod) else value


def fields(cls: type) -> list[str]:
    """The public fields of a dataclass that neither its docstring nor that of a class it derives from names."""
    if not dataclasses.is_dataclass(cls):
        return []
    text = " ".join(inspect.getdoc(base) or "" for base in cls.__mro__[:-1])
    names = [f.name for f in dataclasses.fields(cls) if not f.name.startswith("_")]
    return [name for name in names if not re.search(rf"\b{name}\b", text)]


def without_page() -> list[str]:
    """The public names and the classes of results that no page of docs/api shows."""
    pages = {id(named(name)) for name in shown()}
    lacking = {name: value for name, value in public() if callable(value) and id(value) not in pages}
    lacking |= {f"{cls.__module__}.{cls.__qualname__}": cls for cls in public_classes() if id(cls) not in pages}
    inner = {name for name, value in lacking.items() if getattr(value, "__name__", "") in OTHERS}
    bases = {base for name in shown() if inspect.isclass(cls := named(name)) for base in cls.__mro__}
    return sorted(name for name, value in lacking.items() if name not in inner and value not in bases)


if __name__ == "__main__":
    lacking, hidden = without_docstring(), without_page()
    print(
        f"{len({id(value) for _, value in public()})} public names, {len(classes())} classes among them and their results"
    )
    print(f"{sum(len(list(members(cls))) for cls in classes())} methods and properties")
    print(f"{len(lacking)} without a docstring", *lacking, sep="\n  ")
    print(f"{len(hidden)} without a page", *hidden, sep="\n  ")
    sys.exit(bool(lacking or hidden))
