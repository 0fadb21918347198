"""A function and its example arguments from text: what the command line is given as `module:function` and `--args`."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArgumentError, did_you_mean


def load_function(spec: str) -> tuple[Callable[..., Any], ModuleType]:
    """The function that `spec` names, and its module.

    `spec` is "package.module:function" (importable, or in the current folder) or "path/to/file.py:function"; the part
    after the colon may have dots ("model:Net.apply").

    Raises:
      ArgumentError: no such module, no such function, it cannot be called, or importing the module raised.
    """
    module_name, colon, path = spec.rpartition(":")
    if not colon or not module_name or not path:
        raise ArgumentError(f"function: got {spec!r}, needed module:function or file.py:function")
    module = _load_file(module_name) if module_name.endswith(".py") else _load_module(module_name)
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise ArgumentError(f"function: {module_name!r} has no {path!r}{_public_names(found, name)}")
        found = getattr(found, name)
    if not callable(found):
        raise ArgumentError(f"function: {spec!r} is a {type(found).__name__}, not a function")
    return found, module


def _public_names(holder: Any, asked: str) -> str:
    """The first names of what can be called of a module or a class, and the nearest to what was asked, as an error goes on."""
    public = [n for n in vars(holder) if not n.startswith("_") and callable(getattr(holder, n))]
    return f"; it has {', '.join(sorted(public)[:12])}.{did_you_mean(asked, public)}" if public else ""


def _load_file(name: str) -> ModuleType:
    file = Path(name)
    if not file.is_file():
        raise ArgumentError(f"function: there is no file {name!r}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"function: {name!r} is not a Python file")
    loader, module = spec.loader, importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.absolute().parent))  # as `python file.py` does, so that its own imports work
    own = sys.modules.setdefault(file.stem, module) is module  # dataclasses look their module up there
    try:
        _run_user_code(f"importing {name!r}", lambda: loader.exec_module(module))
    except ArgumentError:
        if own:
            del sys.modules[file.stem]
        raise
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, "")  # a console script does not look in the current folder by itself
    return _run_user_code(f"importing {name!r}", lambda: importlib.import_module(name))


def _run_user_code(doing: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as e:  # the user's own code may raise anything; it becomes one error that names it
        raise ArgumentError(f"function: {doing} raised {type(e).__name__}: {e}") from e


def example_arguments(function: Callable[..., Any], module: ModuleType, text: str | None) -> tuple[Any, ...]:
    """The positional arguments to trace `function` with.

    In this order: `text`, evaluated in the module's names with `jax`, `jnp`, `np` and the dtypes of `SHAPES` (`f32[8, 4]` is an array
    of which only shape and dtype are known); the function's attribute
    `example_args`; the module's attribute `example_args`. Each is a tuple of arguments (anything else is one argument),
    or a function of no arguments that returns it; the module's may also be a dict from function name to either.

    Raises:
      ArgumentError: none of the three is there, or evaluating it raised.
    """
    if text is not None:
        return _as_tuple(_evaluate("--args", text, module))
    name = getattr(function, "__name__", "")
    found = getattr(function, "example_args", None)
    if found is None:
        found = getattr(module, "example_args", None)
        if isinstance(found, dict):
            found = found.get(name)
    if found is None:
        raise ArgumentError(
            f"args: {name or 'the function'} needs example arguments: give --args '(f32[8, 4], i32[8])', "
            f"or set `{name or 'function'}.example_args` or `example_args` in its module"
        )
    return _as_tuple(_run_user_code("example_args()", found) if callable(found) else found)


def keyword_arguments(module: ModuleType, text: str | None) -> dict[str, Any]:
    """The keyword arguments that `text` gives, evaluated as `example_arguments` evaluates its own; {} for None.

    Raises:
      ArgumentError: evaluating it raised, or it gave no dict of names.
    """
    if text is None:
        return {}
    value = _evaluate("--kwargs", text, module)
    if not (isinstance(value, dict) and all(isinstance(k, str) for k in value)):
        raise ArgumentError(f"kwargs: got {type(value).__name__} from --kwargs {text!r}, needed a dict of names")
    return value


@dataclass(frozen=True)
class _Dtype:
    """The meaning of f32 in `--args`: f32[64, 128] is the shape and dtype of an array, f32[()] of a scalar."""

    dtype: str

    def __getitem__(self, shape: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape if isinstance(shape, tuple) else (shape,), jnp.dtype(self.dtype))


_SHORT = {"bf16": "bfloat16", "pred": "bool"} | {
    f"{letter}{bits}": f"{name}{bits}"
    for letter, name, sizes in (
        ("f", "float", (16, 32, 64)),
        ("i", "int", (8, 16, 32, 64)),
        ("u", "uint", (8, 16, 32, 64)),
    )
    for bits in sizes
}
SHAPES = {short: _Dtype(name) for short, name in _SHORT.items()}  # as jaxprs write dtypes
_SCALAR = re.compile(rf"\b({'|'.join(SHAPES)})\[\s*\]")  # f32[], which is no Python


def _evaluate(option: str, text: str, module: ModuleType) -> Any:
    names = {"jax": jax, "jnp": jnp, "np": np} | SHAPES | vars(module)
    return _run_user_code(f"evaluating {option} {text!r}", lambda: eval(_SCALAR.sub(r"\1[()]", text), names))


def with_data(tree: Any) -> Any:
    """The same arguments with arrays in the place of shapes: normal for floats, zeros and ones for integers and bools.

    Zeros alone would run faster than data do, and larger integers may not be valid indices.
    """
    key = jax.random.key(0)

    def drawn(i: int, x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jax.random.normal(jax.random.fold_in(key, i), x.shape, x.dtype)
        return jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape).astype(x.dtype)

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [drawn(i, x) for i, x in enumerate(leaves)])


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)
