"""A function prepared for many runs: compiled once, arguments on the device, side effects ruled out."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.errors import ArgumentError, FusionLabError, SideEffectError, TraceError
from fusionlab.graph.calls.binding import Bound
from fusionlab.graph.jax_compat import child_jaxprs, split_closed
from fusionlab.graph.program.scopes import source_of
from fusionlab.graph.program.trace import error_text
from fusionlab.graph.settings import jax_defaults, no_full_collections
from fusionlab.graph.xla.assignment_text import OPTIONS
from fusionlab.graph.xla.hlo_text import Module, calls_in_fusions, parse_hlo

from .out_of_memory import out_of_memory

_JIT_ADVICE = "a function jax.jit accepts; name Python-valued arguments in static_argnums or static_argnames."


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled function with its arguments.

    Attributes:
      name: what tables call it ("before", "after").
      compiled: `jax.stages.Compiled`.
      args, kwargs: its dynamic arguments, NumPy arrays moved to the device.
      donated: positions in `args` whose buffers each run consumes.
      jaxpr, outputs: the compiled program, and the tree of its outputs' shapes and dtypes.
      trace_s, lower_s, compile_s: seconds of each step.
      assignment: XLA's texts on what lies where in memory, and what lives from when to when; None where they were not asked for, on a
        CPU, whose executables carry it themselves, and with JAX's persistent cache, of which each folder of texts would be another entry.
    """

    name: str
    compiled: Any
    args: tuple
    kwargs: dict
    donated: tuple[int, ...]
    jaxpr: Any
    outputs: Any
    trace_s: float
    lower_s: float
    compile_s: float
    assignment: tuple[str, str] | None = None

    def fresh_args(self) -> tuple:
        """The arguments of one run: donated ones copied, the copies finished."""
        copies = [jax.tree.map(jnp.copy, a) if i in self.donated else a for i, a in enumerate(self.args)]
        if self.donated:
            jax.block_until_ready(copies)
        return tuple(copies)

    def ready(self, n: int) -> list[Callable[[], Any]]:
        """`n` runs made ready, each a function that dispatches one and returns its outputs without waiting for them."""
        return [functools.partial(self.compiled, *self.fresh_args(), **self.kwargs) for _ in range(n)]

    @property
    def devices(self) -> frozenset[Any]:
        """The JAX devices it runs on."""
        shardings = jax.tree.leaves((self.compiled.input_shardings, self.compiled.output_shardings))
        return frozenset(device for s in shardings for device in s.device_set)

    @functools.cached_property
    def hlo(self) -> str:
        """Its optimised HLO; "" from a backend that shows none."""
        return self.compiled.as_text() or ""

    @functools.cached_property
    def memory(self) -> Any:
        """XLA's `CompiledMemoryStats`; None from a backend that has none."""
        return self.compiled.memory_analysis()

    @functools.cached_property
    def module(self) -> Module:
        """Its optimised HLO, read."""
        return parse_hlo(self.hlo)

    @functools.cached_property
    def started(self) -> dict[str, str]:
        """Names by which a profiler knows a kernel -> the instruction that runs in its computation.

        Of what is started aside: "loop_dynamic_slice_fusion.25" -> "fusion-start.3"; none of these from a backend that shows no
        instructions. Of the call in a fusion that hands it slices: "custom-call.7" -> "dynamic_slice_fusion.2".
        """
        executable = self.compiled.runtime_executable()
        modules = executable.hlo_modules() if hasattr(executable, "hlo_modules") else []
        instructions = (i for m in modules for c in m.computations() for i in c.instructions())
        aside = {root.name: i.name for i in instructions if (root := _started(i)) is not None}
        return calls_in_fusions(self.module) | aside

    def run(self) -> Any:
        """One run, blocked on.

        Raises:
          OutOfMemoryError: the device has too little memory for it.
        """
        with out_of_memory(f"{self.name}: running it"):
            return jax.block_until_ready(self.compiled(*self.fresh_args(), **self.kwargs))


def compile_program(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    *,
    name: str = "function",
    donate_argnums: Sequence[int] = (),
    advice: str = _JIT_ADVICE,
    compiling: Mapping[str, Any] | None = None,
    said: Callable[[str, Any], Any] = lambda verb, jaxpr: None,
    assigned: bool = False,
) -> Program:
    """Compiles `fn` under `jax.jit` for these (dynamic) arguments; `advice` ends the message when that fails.

    `compiling` are further options of `jax.jit`: `compiler_options`, `keep_unused`. `said` is called as each step begins: with "tracing"
    and None, "compiling" and the jaxpr; what it raises ends it. With `assigned`, `Program.assignment` is wanted.

    Raises:
      ArgumentError: an argument is a shape instead of an array.
      SideEffectError: the function prints, calls back into Python or mutates; repeating it would repeat that.
      TraceError: JAX cannot trace or compile it.
      OutOfMemoryError: the device has too little memory for its arguments, or to compile it.
    """
    with out_of_memory(f"{name}: compiling it"), no_full_collections():
        return _compiled(fn, args, kwargs, name, tuple(donate_argnums), advice, compiling, said, assigned)


def _compiled(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    name: str,
    donated: tuple[int, ...],
    advice: str,
    compiling: Mapping[str, Any] | None,
    said: Callable[[str, Any], Any],
    assigned: bool,
) -> Program:
    said("tracing", None)
    args, kwargs = on_device(args), on_device(kwargs)

    @functools.wraps(fn, assigned=("__name__", "__doc__"), updated=())
    def uncached(*a: Any, **k: Any) -> Any:
        # JAX keeps what it compiled by function object; a new one makes the compile time a compile time.
        return fn(*a, **k)

    jitted = jax.jit(uncached, donate_argnums=donated, **(compiling or {}))
    start = time.perf_counter()
    try:
        with out_of_memory(f"{name}: tracing it"):
            traced = jitted.trace(*args, **kwargs)
    except FusionLabError:  # a fused function's own, say a misspelt pass: it says more than we could
        raise
    except Exception as error:  # the user's own code runs here, so anything may come
        raise trace_error(name, error, advice) from error
    refuse_side_effects(name, traced.jaxpr)
    traced_at = time.perf_counter()
    said("compiling", traced.jaxpr)
    lowered = traced.lower()
    lowered_at = time.perf_counter()
    compiled, assignment = _with_assignment(lowered) if assigned and _can_dump() else (lowered.compile(), None)
    times = (traced_at - start, lowered_at - traced_at, time.perf_counter() - lowered_at)
    return Program(name, compiled, args, kwargs, donated, traced.jaxpr, traced.out_info, *times, assignment)


def uses_cache() -> bool:
    """Whether JAX's persistent cache is on, from which a program may come with the source lines that it had when it was compiled."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    return folder is not None and getattr(jax.config, "jax_enable_compilation_cache", True)


def _can_dump() -> bool:
    return jax.default_backend() != "cpu" and not uses_cache()


def _with_assignment(lowered: Any) -> tuple[Any, tuple[str, str] | None]:
    """The program compiled, and what XLA wrote about its memory."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, **OPTIONS})
        texts = [sorted(Path(folder).glob(f"*{kind}.txt")) for kind in ("buffer-assignment", "live-range")]
        found = [files[0].read_text(encoding="utf-8") for files in texts if len(files) == 1]
    return compiled, (found[0], found[1]) if len(found) == 2 else None


def trace_error(name: str, error: Exception, advice: str = _JIT_ADVICE) -> TraceError:
    """The error for a user's function that raised under `jax.jit`; `advice` ends it."""
    return TraceError(f"{name} does not run under jax.jit with these arguments: {error_text(error)} Needed: {advice}")


@jax_defaults()  # what is moved here the user asked to be compared, and moved nothing
def on_device(tree: Any) -> Any:
    """NumPy leaves become JAX arrays, so that no run pays for the transfer; shapes are refused."""
    return jax.tree.map(_leaf_on_device, tree)


def _leaf_on_device(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        raise ArgumentError(
            f"arguments: got a shape ({x.dtype}{list(x.shape)}), needed arrays: a measurement has to run the function. "
            "Make some, for instance with jax.random.normal(jax.random.key(0), shape)."
        )
    return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x


def refuse_side_effects(name: str, jaxpr: Any) -> None:
    """Raises SideEffectError naming the first primitive with a side effect and the user's line; pure callbacks pass."""
    if not jaxpr.effects:
        return
    eqn = _first_with_effects(jaxpr)
    effect = f"{eqn.primitive.name}" if eqn is not None else f"effect {next(iter(jaxpr.effects))}"
    source = source_of(eqn) if eqn is not None else None
    where = f" at {source} ({source.text})" if source else ""
    raise SideEffectError(
        f"{name}: got a function with a side effect, {effect}{where}; a measurement runs it hundreds of times. "
        "Needed: a function without prints, callbacks or mutation; take that line out, or use jax.pure_callback."
    )


def _first_with_effects(jaxpr: Any) -> Any:
    for eqn in split_closed(jaxpr)[0].eqns:
        if eqn.effects:
            inner = [found for _, _, child in child_jaxprs(eqn) if (found := _first_with_effects(child)) is not None]
            return inner[0] if inner else eqn
    return None


def compiling(call: Bound) -> Mapping[str, Any]:
    """The options that the jit around a function gives the compiler, for `compile_program`."""
    return call.jit.compiling if call.jit is not None else {}


def _started(instruction: Any) -> Any:
    """What an asynchronous instruction starts, an instruction; None of any other, and where jaxlib does not tell."""
    asked = getattr(instruction, "async_wrapped_root", None)
    return asked() if asked is not None and instruction.name.partition(".")[0].endswith("-start") else None
