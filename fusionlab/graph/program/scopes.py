"""The origin of an equation: the user's source line, and the module scope in which it was traced.

Only attributes of the objects JAX hands out are read here (`eqn.source_info`), never private modules.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ...showing import Shown
from ..jax_compat import child_jaxprs, split_closed

_JAX_DIR = os.path.dirname(os.path.dirname(os.path.abspath(jax.__file__)))
_JAX_PARTS = tuple(os.path.join(_JAX_DIR, p) + os.sep for p in ("jax", "jaxlib"))
_LIB_DIRS = tuple({sysconfig.get_paths()[k] + os.sep for k in ("purelib", "platlib", "stdlib")})
_OWN_DIR = str(Path(os.path.abspath(__file__)).parents[2])
# The models that ship with the package are user code: their lines are what a reader of the demo wants to see.
_ROOMS = ("graph", "kernels", "fusers", "evidence", "viz", "verbs")
_OWN_CODE = (
    *(os.path.join(_OWN_DIR, room) + os.sep for room in _ROOMS),
    os.path.join(_OWN_DIR, "tracebacks.py"),  # which wraps every verb
)
# jvp(...), transpose(...), vmap(...) and the like wrap a scope's name when a transformation traced it.
# Code typed at a prompt has no file; the other names in angle brackets are of generated code.
_TYPED = ("<ipython-input-", "<python-input-", "<stdin>")
_NOT_MODULES = frozenset({"rematted_computation", "checkpoint", "while", "body", "cond", "closed_call", "core_call"})
# Names under which libraries call a user's code; a reader wants the class or the caller instead.
_NOBODY = frozenset({"__call__", "apply", "call", "forward", "wrapped", "wrapper", "inner", "f", "fn", "fun"})
_WRAPPER = re.compile(r"^(?:jvp|transpose|vmap|rematted_computation|checkpoint|jit|pjit)\((.*)\)$")


@dataclass(frozen=True, repr=False)
class Source(Shown):
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
        """ "model.py:41"; for a cell of a notebook "In[3]:41", or "<cell>:41" where its number is not known."""
        return f"{_cell(self.file) or os.path.basename(self.file)}:{self.line}"

    def __str__(self) -> str:
        return self.short


def _cell(file: str) -> str:
    """The name of a notebook cell whose code was compiled under this file name; "" for any other file."""
    typed = file.startswith("<ipython-input-")
    if not typed and not os.path.basename(os.path.dirname(file)).startswith("ipykernel_"):
        return ""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
    if named is not None:
        return named[1]  # ("Cell", "In[3]")
    number = re.match(r"<ipython-input-(\d+)-", file)
    return f"In[{number.group(1)}]" if number else "<cell>"


def source_of(eqn: Any, calls: tuple[Any, ...] = ()) -> Source | None:
    """The innermost frame outside JAX, FusionLab and installed libraries, of the equation or else of the call or region
    around it that has one; else the equation's innermost frame outside JAX; else None.

    Args:
      eqn: the equation.
      calls: the call equations around it, outermost first. The body of a function jitted by JAX itself (jnp.where, jnp.tril)
        is traced once and shared, so its frames name the first caller; the call's own frames are the right ones.
    """
    user, library = _sources_of_traceback(traceback_of(eqn, calls))
    for call in reversed(calls):
        user = user or _sources_of_traceback(getattr(call.source_info, "traceback", None))[0]
    return user or library


def source_of_error(error: BaseException) -> Source | None:
    """The innermost line of the user's code that an error passed through; None if there is none."""
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append(Source(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return next((f for f in reversed(frames) if kind_of_file(f.file) == "user"), None)


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
def _sources_of_traceback(traceback: Any) -> tuple[Source | None, Source | None]:
    """The innermost frame of the user's, and the innermost one of an installed library above it."""
    frames = traceback.frames if traceback is not None else ()
    return _among((frame.file_name, frame.line_num, frame.function_name) for frame in frames)


def source_among(frames: Iterable[Source]) -> Source | None:
    """The line that `source_of` would choose among these, innermost first."""
    user, library = _among((f.file, f.line, f.function) for f in frames)
    return user or library


def _among(frames: Iterable[tuple[str, int, str]]) -> tuple[Source | None, Source | None]:
    library = None
    for file, line, function in frames:
        kind = kind_of_file(file)
        if kind == "own":
            if library is not None or file.endswith(os.path.join("graph", "trace.py")):
                break  # below this frame stands the call to FusionLab itself, not the model
            continue
        if kind == "jax":
            continue
        found = Source(file, line, function)
        if kind == "user":
            return found, library
        library = library or found
    return None, library


def kind_of_file(file: str) -> str:
    """The origin of a file's code: "own" (FusionLab's), "jax" (or generated code), "library" or "user"."""
    if file.startswith(_OWN_CODE):
        return "own"
    if file.startswith(_JAX_PARTS) or (file.startswith("<") and not file.startswith(_TYPED)):
        return "jax"
    return "library" if file.startswith(_LIB_DIRS) else "user"


def frames_of(node: Any) -> tuple[Source, ...]:
    """The user's calls that led to a node, outermost first; () where JAX kept none."""
    found = _frames(traceback_of(node.eqn, node.calls))
    for call in reversed(node.calls):
        found = found or _frames(getattr(call.source_info, "traceback", None))
    return found


@functools.lru_cache(maxsize=65536)
def _frames(traceback: Any) -> tuple[Source, ...]:
    frames = traceback.frames if traceback is not None else ()
    found = []
    for frame in frames:
        kind = kind_of_file(frame.file_name)
        if kind == "own" and found:
            break  # below stands the call to FusionLab itself
        if kind == "user" and frame.function_name != "<module>":
            found.append(Source(frame.file_name, frame.line_num, frame.function_name))
    return tuple(reversed(found))


def place_of(node: Any) -> str:
    """The scope of a node; where the program has none, the calls that led to it: "train_step()/loss()/Net/Block/Linear".

    Calls are the user's functions and, inside these, the modules of libraries; "" where JAX kept none either.
    """
    if node.scope:
        return node.scope
    frames = _calls(traceback_of(node.eqn, node.calls))
    for call in reversed(node.calls):
        frames = frames or _calls(getattr(call.source_info, "traceback", None))
    return "/".join(frames)


@functools.lru_cache(maxsize=65536)
def _calls(traceback: Any) -> tuple[str, ...]:
    """Names of the calls, outermost first: "Net" for `Net.__call__`, "loss()" for a function."""
    found: list[str] = []
    modules = True  # as long as no frame of the user's was met: what is inside of his innermost one
    for frame in traceback.frames if traceback is not None else ():
        kind, function = kind_of_file(frame.file_name), frame.function_name
        if kind == "own" and found:
            break
        is_module = function.endswith(".__call__")
        modules = modules and kind != "user"
        if (kind == "user" and function != "<module>") or (kind == "library" and is_module and modules):
            name = "" if function.endswith("<lambda>") else spoken(function)
            found += [name if is_module else f"{name}()"] if name else []
    return tuple(name for name, _ in itertools.groupby(reversed(found)))


def spoken(function: str) -> str:
    """A function's name as people write it: "Block" for `Block.__call__`, "" for a function without a name of its own."""
    parts = [p for p in function.split(".") if not p.startswith("<")]
    while parts and parts[-1] in _NOBODY:
        parts.pop()
    return parts[-1] if parts else ""


def scope_of(eqn: Any, calls: tuple[Any, ...] = ()) -> str:
    """The module path of an equation: name scopes of the calls around it, then its own, without transformation names."""
    parts = [str(e.source_info.name_stack) for e in (*calls, eqn)]
    return clean_scope("/".join(p for p in parts if p))


def is_backward(eqn: Any) -> bool:
    """Whether an equation belongs to a backward pass derived by JAX: its name stack contains a transposition."""
    return "transpose(" in str(eqn.source_info.name_stack)


def is_in_derivative(eqn: Any) -> bool:
    """Whether an equation belongs to a program that JAX has differentiated, forward or backward."""
    return "jvp(" in str(eqn.source_info.name_stack)


def in_differentiated(node: Any) -> bool:
    """The same for a node, also inside calls and regions that JAX has differentiated, whose own equations do not show it."""
    return any(is_in_derivative(eqn) for eqn in (*node.calls, node.eqn))


def in_backward(node: Any) -> bool:
    """Whether a node, or a call or region around it, belongs to a backward pass. `add_any` occurs nowhere else."""
    return node.primitive == "add_any" or any(is_backward(eqn) for eqn in (*node.calls, node.eqn))


def jaxpr_in_backward(jaxpr: Any) -> bool:
    """Whether a jaxpr contains a backward pass: as `in_backward`, for equations without a graph."""
    return any(
        eqn.primitive.name == "add_any"
        or is_backward(eqn)
        or any(jaxpr_in_backward(c) for _, _, c in child_jaxprs(eqn))
        for eqn in split_closed(jaxpr)[0].eqns
    )


@functools.lru_cache(maxsize=65536)
def clean_scope(raw: str) -> str:
    names, backward = [], None
    for part in split_scope(raw):
        if "transpose(" in part:
            backward = len(names)
        elif backward is not None and "jvp(" in part:
            del names[backward:]  # the backward of a remat names its scope twice: transpose(jvp(a))/b/jvp(a)/b
        while match := _WRAPPER.match(part):
            part = match.group(1)
        # jnp.einsum names a scope after its formula.
        names.extend(p for p in split_scope(part) if p and "->" not in p and p not in _NOT_MODULES)
    return "/".join(names)


def split_scope(raw: str) -> list[str]:
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
