"""Where an equation came from: the user's source line, and the module scope it was traced in.

Only attributes of the objects JAX hands out are read here (`eqn.source_info`), never private modules.
"""

from __future__ import annotations

import functools
import linecache
import os
import re
import sysconfig
from dataclasses import dataclass
from typing import Any

import jax

_JAX_DIR = os.path.dirname(os.path.dirname(os.path.abspath(jax.__file__)))
_JAX_PARTS = tuple(os.path.join(_JAX_DIR, p) + os.sep for p in ("jax", "jaxlib"))
_LIB_DIRS = tuple({sysconfig.get_paths()[k] + os.sep for k in ("purelib", "platlib", "stdlib")})
_OWN_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The models that ship with the package are user code: their lines are what a reader of the demo wants to see.
_ROOMS = ("graph", "kernels", "fusers", "evidence", "viz")
_OWN_CODE = (*(os.path.join(_OWN_DIR, room) + os.sep for room in _ROOMS), os.path.join(_OWN_DIR, "lab.py"))
# jvp(...), transpose(...), vmap(...) and the like wrap a scope's name when a transformation traced it.
_NOT_MODULES = frozenset({"rematted_computation", "checkpoint", "while", "body", "cond", "closed_call", "core_call"})
_WRAPPER = re.compile(r"^(?:jvp|transpose|vmap|rematted_computation|checkpoint|jit|pjit)\((.*)\)$")


@dataclass(frozen=True)
class Source:
    """A line of the user's code: absolute `file`, 1-based `line`, enclosing `function`."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The line itself, stripped; "" when the file is not readable here."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def short(self) -> str:
        """ "model.py:41"."""
        return f"{os.path.basename(self.file)}:{self.line}"

    def __str__(self) -> str:
        return self.short


def source_of(eqn: Any, calls: tuple[Any, ...] = ()) -> Source | None:
    """The innermost frame outside JAX, FusionLab and installed libraries; else the innermost outside JAX; else None.

    Args:
      eqn: the equation.
      calls: the call equations around it, outermost first. The body of a function jitted by JAX itself (jnp.where, jnp.tril)
        is traced once and shared, so its frames name the first caller; the call's own frames are the right ones.
    """
    traceback = traceback_of(eqn, calls)
    return _source_of_traceback(traceback) if traceback is not None else None


def traceback_of(eqn: Any, calls: tuple[Any, ...] = ()) -> Any:
    """JAX's traceback for an equation: that of the outermost call into JAX's own jitted code around it, else its own."""
    for call in calls:
        if call.primitive.name in ("jit", "pjit") and defined_in_jax(call.params.get("jaxpr")):
            eqn = call
            break
    return getattr(eqn.source_info, "traceback", None)


def defined_in_jax(jaxpr: Any) -> bool:
    """True when the function a jaxpr was traced from is defined inside the installed JAX."""
    debug = getattr(jaxpr, "debug_info", None) or getattr(getattr(jaxpr, "jaxpr", None), "debug_info", None)
    where = str(getattr(debug, "func_src_info", "") or "")
    return is_jax_file(where.partition(" at ")[2])


@functools.lru_cache(maxsize=65536)
def _source_of_traceback(traceback: Any) -> Source | None:
    fallback = None
    for frame in traceback.frames:
        file = frame.file_name
        if file.startswith(_OWN_CODE):
            if fallback is not None or file.endswith(os.path.join("graph", "trace.py")):
                break  # below this frame stands the call to FusionLab itself, not the model
            continue
        if file.startswith(_JAX_PARTS) or file.startswith("<"):
            continue
        found = Source(file, frame.line_num, frame.function_name)
        if not file.startswith(_LIB_DIRS):
            return found
        fallback = fallback or found
    return fallback


def scope_of(eqn: Any, calls: tuple[Any, ...] = ()) -> str:
    """The module path of an equation: name scopes of the calls around it, then its own, without transformation names."""
    parts = [str(e.source_info.name_stack) for e in (*calls, eqn)]
    return clean_scope("/".join(p for p in parts if p))


@functools.lru_cache(maxsize=65536)
def clean_scope(raw: str) -> str:
    names, backward = [], None
    for part in _split(raw):
        if "transpose(" in part:
            backward = len(names)
        elif backward is not None and "jvp(" in part:
            del names[backward:]  # the backward of a remat names its scope twice: transpose(jvp(a))/b/jvp(a)/b
        while match := _WRAPPER.match(part):
            part = match.group(1)
        names.extend(
            p for p in _split(part) if p and "->" not in p and p not in _NOT_MODULES
        )  # jnp.einsum names a scope after its formula
    return "/".join(names)


def _split(raw: str) -> list[str]:
    """Splits at slashes that are not inside parentheses: "jvp(a/b)/c" -> ["jvp(a/b)", "c"]."""
    parts, depth, start = [], 0, 0
    for i, ch in enumerate(raw):
        depth += (ch == "(") - (ch == ")")
        if ch == "/" and depth == 0:
            parts.append(raw[start:i])
            start = i + 1
    return [*parts, raw[start:]]


def is_jax_file(path: str) -> bool:
    """True for a file (or "file:line") inside the installed JAX."""
    return path.startswith(_JAX_PARTS)
