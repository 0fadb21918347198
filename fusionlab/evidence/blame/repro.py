"""The smallest program found: what it shows, and the file for a bug report with its arrays next to it."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fusionlab
from fusionlab.fusers.strategy import Strategy
from fusionlab.graph.jax_compat import types_in
from fusionlab.graph.settings import has_wide_types
from fusionlab.output import write_file
from fusionlab.showing import Shown, plural, save_as

from .program import Small
from .source import source_of_program

_CHECKS = {
    "error": "    print(fusionlab.compare(program, fused, *given, grad=False, timing=False, memory=False))",
    "time": "    print(fusionlab.compare(program, fused, *given, grad=False, numerics=False, memory=False))",
    "raises": (
        "    jax.block_until_ready(jax.jit(program)(*given))\n"
        '    print("the program itself runs; its fused version:")\n'
        "    jax.block_until_ready(jax.jit(fused)(*given))"
    ),
    "shows": (
        "    for plain, other in zip(jax.jit(program)(*given), jax.jit(fused)(*given), strict=True):\n"
        "        plain, other = (np.asarray(x, np.float64) for x in (plain, other))\n"
        '        print("largest difference", np.abs(plain - other).max(), "of", np.abs(plain).max())'
    ),
}

_FILE = '''"""{title}

{observed}

Written by fusionlab.minimise (FusionLab {version}, JAX {jax}, {device}). Run it with `python {name}`; its arrays are in {arrays}.
"""

from pathlib import Path

import jax
import jax.extend.core.primitives
import numpy as np
from jax import lax

import fusionlab
{needs}{x64}

{program}

def arrays():
    """The arrays of the program: plain data."""
    types, keys = {types!r}, {keys!r}
    with np.load(Path(__file__).with_name({arrays!r}), allow_pickle=False) as file:
        given = [file[f"x{{i}}"].view(jax.numpy.dtype(t)) for i, t in enumerate(types)]
    return [jax.random.wrap_key_data(x, impl=k) if k else x for x, k in zip(given, keys, strict=True)]


def main():
    given = arrays()
    fused = {fused}
{check}


if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True, eq=False, repr=False)
class Minimal(Shown):
    """The smallest program found that shows a fault.

    Attributes:
      name: of the function that it was cut out of.
      kind: "error", "raises", "time" or "shows".
      observed: what it shows, in words.
      equations, of: the number of its equations, and of that function's; those inside loops and calls count.
      trials: how many programs were tried.
      stopped: "", or why the search ended early ("cancelled", "budget").
      unwritten: why it cannot be written as source; "" if it can, and the source shows the same.
      program: the program with its arrays; opaque to readers.
      options: keyword arguments of `fuse`.
      needs: lines that the file runs first.
    """

    name: str
    kind: str
    observed: str
    equations: int
    of: int
    trials: int
    stopped: str
    unwritten: str
    program: Small = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    needs: str = ""

    @property
    def fn(self) -> Callable[..., Any]:
        """The program: arrays -> a list of arrays."""
        return self.program.fn

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What it runs on: an array for each of its arguments."""
        return self.program.arrays

    @property
    def jaxpr(self) -> Any:
        """The program as JAX prints it."""
        return self.program.closed

    def __str__(self) -> str:
        head = f"{self.name}: {self.equations} of {self.of:,} {plural('equation', self.of)} show it"
        head += f", {self.trials} {plural('trial', self.trials)}"
        head += f", stopped: {self.stopped}" if self.stopped else ""
        lines = [head, f"  {self.observed}"]
        lines += [f"  not written as source: {self.unwritten}"] if self.unwritten else []
        return "\n".join(lines)

    def source(self, name: str = "repro.py") -> str:
        """The file that `save` writes under this name.

        Raises:
          ArgumentError: an equation has no form as source.
        """
        wide = has_wide_types(types_in(self.program.closed)) or jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        # The text of a Strategy is the call that makes it.
        texts = {k: f"fusionlab.{v!r}" if isinstance(v, Strategy) else repr(v) for k, v in self.options.items()}
        options = "".join(f", {k}={v}" for k, v in texts.items())
        return _FILE.format(
            title=f"{self.name}: {self.equations} equations that show a fault of its fused version.",
            observed=self.observed.replace("\\", "\\\\").replace('"""', "'''"),
            version=fusionlab.__version__,
            jax=jax.__version__,
            device=jax.devices()[0].device_kind,
            name=name,
            arrays=Path(name).with_suffix(".npz").name,
            needs=f"{self.needs}\n" if self.needs else "",
            x64='\njax.config.update("jax_enable_x64", True)\n' if wide else "",
            program=source_of_program(self.program),
            types=[_stored(x)[1] for x in self.arrays],
            keys=[_stored(x)[2] for x in self.arrays],
            fused=f"fusionlab.fuse(program{options})",
            check=_CHECKS[self.kind],
        )

    def save(self, path: Any) -> Path:
        """Writes .py: the program, which runs by itself, and next to it the arrays as .npz, plain data. Other suffixes as any result.

        Raises:
          ArgumentError: another suffix, or an equation that has no form as source. OutputError: the file cannot be written.
        """
        target = Path(path) if isinstance(path, str) else path
        written = save_as(target, self._makers() | {".py": lambda: self.source(target.name)})
        if written.suffix.lower() == ".py":
            file = io.BytesIO()
            stored: dict[str, Any] = {f"x{i}": _stored(x)[0] for i, x in enumerate(self.arrays)}
            np.savez(file, **stored)
            write_file(written.with_suffix(".npz"), file.getvalue())
        return written


def _stored(array: Any) -> tuple[np.ndarray, str, str | None]:
    """(an array that NumPy can store, the dtype to view it in, the generator of keys)."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(array)), "uint32", str(jax.random.key_impl(array))
    x = np.asarray(array)
    if x.dtype.kind in "biufc":
        return x, x.dtype.name, None
    return x.view(f"u{x.dtype.itemsize}"), x.dtype.name, None


def confirmed(found: Minimal, ask: Callable[[Callable[..., Any], tuple[Any, ...]], str]) -> str:
    """ "" if the program written as source shows the fault too, else why it cannot be written.

    Args:
      found: the program.
      ask: what a function shows on some arrays.
    """
    from fusionlab.errors import ArgumentError

    try:
        text = source_of_program(found.program)
    except ArgumentError as error:
        return str(error)
    space: dict[str, Any] = {"jax": jax, "np": np, "lax": jax.lax, "fusionlab": fusionlab}
    exec(compile(text, "<repro>", "exec"), space)  # the text was made here, of a traced program
    return "" if ask(space["program"], found.arrays) else "written as source it does not show the fault any more"
