"""The distance of each version from the float64 reference, leaf by leaf, for outputs and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.showing import Shown
from fusionlab.testing.tolerances import Tolerance, tolerance

from .arrays import Error, compare_arrays, largest
from .reduction_sizes import ReductionSizes, mantissa_bits
from .rounding import GROWTH, Noise, measure_noise

# A gradient smaller than this share of the largest is zero in theory (a key's bias under softmax): its error is judged
# by the largest gradient's scale.
_ZERO_IN_THEORY = 1e-6
_MANY_ELEMENTS = 256  # of fewer, rounding errors do not cancel in a sum
_ACCEPTED_GROWTH = 2.0  # over tolerance is accepted while the error is at most this often the baseline's own


@dataclass(frozen=True, repr=False)
class LeafNumerics(Shown):
    """One output or gradient of both versions against the reference.

    Attributes:
      name: its path in the output or argument tree.
      kind: "output" or "gradient".
      dtype, shape, size: of the user's program.
      rtol, atol: what "over tolerance" means; `atol` is absolute here.
      before, after: errors of the original and of the fused version against float64.
      between: "after" against "before": for information, never a verdict.
      zero_in_theory: in exact arithmetic it would be 0 or nearly 0: its value is rounding noise, and relative errors mean nothing.
        A gradient far below the largest one; an output (an update from such a gradient) of which the original has no correct digit.
      filled, filled_rows: elements, and whole rows along the last axis, that are NaN in the original and its reference and numbers in
        the fused version: attention gives 0 to a query that sees no key. Not a regression, and mentioned in the notes.
      scale_limit: how far from 1 `Error.scale` and the quotient of both may be: one unit in the last place of the dtype that the
        program multiplies in.
      noise: what rounding alone does to it in the original; measured only where the error asks for it, else None.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    rtol: float
    atol: float
    before: Error
    after: Error
    between: Error
    zero_in_theory: bool = False
    filled: int = 0
    filled_rows: int = 0
    scale_limit: float = 0.0
    noise: Noise | None = None

    @property
    def is_rescaled(self) -> bool:
        """Whether the fused version as a whole is larger or smaller by a factor that is no rounding: than the original, and farther from
        the reference than that; or than the reference, and more than twice as far as the original.

        What both round alike, as the cotangent of bfloat16 logits, moves both by one factor, and what the fused version rounds less
        brings it nearer to the reference: a factor may show in one of the two comparisons alone.
        """
        before, after = self.before.scale, self.after.scale
        if not before or after is None or self.zero_in_theory or self.size < _MANY_ELEMENTS:
            return False
        # What rounding leaves of a factor: five standard deviations of the difference of two, if their errors are independent. The
        # original's own factor is no part of its rounding.
        rounding = math.sqrt(max(self.before.rel_l2**2 - (before - 1) ** 2, 0.0))
        own = max(rounding, self.noise.rel_l2 if self.noise is not None else 0.0)
        left = 5 * math.sqrt(2 / self.size) * own
        off, of_original, limit = abs(after - 1), abs(before - 1), self.scale_limit + left
        apart = abs(after / before - 1) > limit and off > of_original + left
        return apart or (off > limit and off > _ACCEPTED_GROWTH * of_original + left)

    @property
    def called(self) -> str:
        """ "gradient b1" of a gradient, the name alone of an output."""
        return f"gradient {self.name}" if self.kind == "gradient" else self.name

    @property
    def ok(self) -> bool:
        """Whether there is no new NaN or infinity, no factor that is no rounding, and the error is in tolerance, at most twice that
        of the original, or explained by `noise`."""
        before, after = self.before, self.after
        # Were all of after's mismatches also before's, the two would differ in exactly the rest of before's.
        rest = before.nonfinite_mismatch - (after.nonfinite_mismatch - self.filled)
        if self.between.nonfinite_mismatch - self.filled > rest:
            return False
        if self.is_rescaled:
            return False
        near = after.max_abs <= _ACCEPTED_GROWTH * before.max_abs and after.rel_l2 <= _ACCEPTED_GROWTH * before.rel_l2
        # What is rounding alone is tolerated by its own size: an error that spreads over the array would pass by that.
        return near or (after.over_tolerance == self.filled and not self.is_rounding) or self.is_explained

    @property
    def is_explained(self) -> bool:
        """Whether `noise` was measured and explains the error of the fused version."""
        return self.noise is not None and self.noise.explains(self.after, self.before)

    @property
    def is_rounding(self) -> bool:
        """An output of which the original has no correct digit: of interest only if it got worse."""
        return self.zero_in_theory and self.kind == "output"

    @property
    def shares(self) -> tuple[float, float]:
        """The errors of the original and of the fused version as shares of the tolerance: 1 is all of it.

        For older records they are relative to `atol` only, the larger part of it.
        """
        before, after = (
            e.share if e.share is not None else _quotient(e.max_abs, self.atol) for e in (self.before, self.after)
        )
        return before, after

    def __str__(self) -> str:
        verdict = "" if self.ok else ": WORSE"
        if self.is_rescaled:
            verdict = f", {self.after.scale:.4g} times the reference as a whole{verdict}"
        relative = f"rel L2 {self.before.rel_l2:.2e} -> {self.after.rel_l2:.2e}"
        return (
            f"{self.kind} {self.name} {self.dtype}{list(self.shape)}: max abs {self.before.max_abs:.2e} -> "
            f"{self.after.max_abs:.2e}, {'zero in theory' if self.zero_in_theory else relative}, "
            f"of tolerance {' -> '.join(map(share_text, self.shares))}, "
            f"over tolerance {self.before.over_tolerance} -> {self.after.over_tolerance - self.filled} of {self.size}{verdict}"
        )

    def _row(self) -> dict[str, Any]:
        what = {"kind": self.kind, "name": self.name, "dtype": self.dtype, "shape": str(list(self.shape))}
        versions = ("before", self.before), ("after", self.after)
        errors = {f"max abs, {name}": e.max_abs for name, e in versions}
        relative = {f"relative L2, {name}": e.rel_l2 for name, e in versions}
        return what | errors | relative | {"tolerated": self.atol, "worse": not self.ok}


@dataclass(frozen=True, repr=False)
class Numerics(Shown):
    """Errors of both versions against the promoted float64 reference.

    Attributes:
      leaves: outputs, then gradients.
      left_out: arguments without a gradient (integers, keys, or not asked for).
      reduction_size: terms of the largest sum in the program; together with the dtype it sets the tolerance.
      tf32: whether float32 products may have run in TF32, which widens the tolerance.
      notes: the parts that the reference could not promote.
    """

    _listed = "leaves"

    leaves: tuple[LeafNumerics, ...]
    left_out: tuple[str, ...]
    reduction_size: int
    notes: tuple[str, ...] = ()
    tf32: bool = False

    @property
    def ok(self) -> bool:
        """Whether every output and gradient passes, as `LeafNumerics.ok` has it."""
        return all(leaf.ok for leaf in self.leaves)

    @property
    def regressions(self) -> tuple[LeafNumerics, ...]:
        """The leaves on which the fused version is worse than the original and over tolerance."""
        return tuple(leaf for leaf in self.leaves if not leaf.ok)

    def worst(self, kind: str | None = None) -> LeafNumerics | None:
        """The leaf (of this kind) with the worst error of the fused version: regressions first, then by share of the tolerance.

        Not by relative error: a gradient that is zero in theory has an arbitrarily large one. An output that is only rounding noise
        comes last, unless it is a regression.
        """
        return next((leaf for leaf in self.ranked if kind is None or leaf.kind == kind), None)

    @property
    def ranked(self) -> tuple[LeafNumerics, ...]:
        """All leaves, the worst first."""
        return tuple(
            sorted(self.leaves, key=lambda leaf: (leaf.ok, leaf.is_rounding, -leaf.shares[1], -leaf.after.max_abs))
        )

    @property
    def sentence(self) -> str:
        """ "worst error 12 % of its tolerance: 4.03e-07 in gradient b1, against float64": the worst of all leaves, as tables show it."""
        leaf = self.worst()
        if leaf is None:
            return "no errors were measured"
        before, after = leaf.shares
        share = share_text(after) + " of" * (after < _MANY)
        no_worse = ", no worse" if leaf.ok else ""
        was = f" ({share_text(before)} before{no_worse})" if after > 1 else ""
        return f"worst error {share} its tolerance{was}: {leaf.after.max_abs:.2e} in {leaf.called}, against float64"

    def __str__(self) -> str:
        worst = [leaf for kind in ("output", "gradient") if (leaf := self.worst(kind)) is not None]
        return "\n".join([self.sentence, *(f"  {leaf}" for leaf in worst), *(f"  note: {note}" for note in self.notes)])


def _quotient(error: float, tolerated: float) -> float:
    return error / tolerated if tolerated else math.inf if error else 0.0


_MANY = 10  # times a tolerance, from where on no share of it is shown


def share_text(share: float) -> str:
    """A share of a tolerance: "12 %", "310 %", "4,200 times"; "beyond" where nothing is tolerated."""
    if not math.isfinite(share):
        return "beyond"
    if share >= _MANY:
        return f"{share:,.0f} times"
    return "under 0.1 %" if 0 < share < 0.001 else f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:,.0f} %"


def leaf_numerics(
    kind: str, names: Sequence[str], before: Sequence, after: Sequence, reference: Sequence, sums: ReductionSizes
) -> list[LeafNumerics]:
    """Compares lists of arrays, name by name; `sums` of the program, with each dtype, sets the tolerance."""
    scales = [_scale(want) for want in reference]
    top = max(scales, default=0.0)
    leaves = []
    for name, b, a, want, scale in zip(names, before, after, reference, scales, strict=True):
        b, a = _readable(b), _readable(a)
        row = _tolerance_of(b.dtype, sums)
        zero = kind == "gradient" and scale < _ZERO_IN_THEORY * top
        own, atol, is_rounding = _judged(kind, b, want, row.rtol, row.atol * (top if zero else scale))
        between = compare_arrays(a, b, b.dtype, row.rtol, atol)
        is_same = between.max_abs == 0 and not between.nonfinite_mismatch
        filled = _filled(b, a, want) if between.nonfinite_mismatch else np.zeros(0, bool)
        leaves.append(
            LeafNumerics(
                name=name,
                kind=kind,
                dtype=str(b.dtype),
                shape=b.shape,
                size=b.size,
                rtol=row.rtol,
                atol=atol,
                before=own,
                after=own if is_same else compare_arrays(a, want, b.dtype, row.rtol, atol),
                between=between,
                zero_in_theory=zero or is_rounding,
                filled=int(filled.sum()),
                filled_rows=int(filled.all(-1).sum()) if filled.ndim and filled.size else 0,
                scale_limit=_scale_limit(b.dtype, row, sums),
            )
        )
    return leaves


def _scale_limit(dtype: Any, row: Tolerance, sums: ReductionSizes) -> float:
    """One unit in the last place of the dtype that the program multiplies in, or the tolerance of the elements where that is less."""
    if not jnp.issubdtype(dtype, np.floating):
        return 0.0
    unit = max(float(jnp.finfo(_judged_as(dtype, sums)).eps), 2.0**-10 if sums.tf32 else 0.0)
    return unit if unit > 2.0**-20 else row.rtol


def _judged(kind: str, before: Any, want: Any, rtol: float, atol: float) -> tuple[Error, float, bool]:
    """The original's error, the tolerance that it shows to apply, and whether it is an output that is rounding alone."""
    own = compare_arrays(before, want, before.dtype, rtol, atol)
    if kind == "gradient" or not (noise := _rounding_alone(own, before.dtype)):
        return own, atol, False
    atol = _ACCEPTED_GROWTH * noise
    return compare_arrays(before, want, before.dtype, rtol, atol), atol, True


def _rounding_alone(error: Error, dtype: Any) -> float:
    """The original's largest error if it is as large as the reference over the whole array, so that no digit is correct; else 0."""
    is_float = jnp.issubdtype(dtype, np.inexact)
    is_all = is_float and error.rel_l2 >= 1 and not error.nonfinite_mismatch and math.isfinite(error.max_abs)
    return error.max_abs if is_all else 0.0


def _filled(before: Any, after: Any, want: Any) -> np.ndarray:
    """Where the original and its reference are NaN and the fused version is a number."""
    if not all(jnp.issubdtype(a.dtype, np.inexact) for a in (before, after, want)):
        return np.zeros(0, bool)
    before, after, want = map(np.asarray, (before, after, want))
    return np.isnan(before) & np.isnan(want) & np.isfinite(after)


def filled_notes(leaves: Iterable[LeafNumerics]) -> tuple[str, ...]:
    """A sentence on each result whose NaN the fused version fills."""
    return tuple(
        f"{leaf.kind} {leaf.name}: {leaf.filled} of {leaf.size} elements ({leaf.filled_rows} whole rows) are NaN in the original and "
        f"numbers in the fused version; the sites' notes say why"
        for leaf in leaves
        if leaf.filled
    )


def explained_by_rounding(
    leaves: Sequence[LeafNumerics], reference: Sequence, run: Callable[[int], Sequence[Any]]
) -> list[LeafNumerics]:
    """The same leaves; those that are worse get their `noise`, which may explain it.

    `run` gives the original's results on arguments moved for the run of that number; it is not called where no leaf is worse.
    """
    judged = {i: (leaf.after, leaf.before) for i, leaf in enumerate(leaves) if not leaf.ok}
    if not judged:
        return list(leaves)

    def error_of(i: int, got: Any) -> Error:
        got, leaf = _readable(got), leaves[i]
        return compare_arrays(got, reference[i], got.dtype, leaf.rtol, leaf.atol)

    noise = measure_noise(run, error_of, judged)
    return [replace(leaf, noise=noise.get(i)) for i, leaf in enumerate(leaves)]


def rounding_notes(leaves: Iterable[LeafNumerics]) -> tuple[str, ...]:
    """Sentences on how many outputs are only rounding noise, and how many results only `LeafNumerics.noise` explains; () for none."""
    leaves = tuple(leaves)
    notes = []
    if n := sum(leaf.is_rounding for leaf in leaves):
        which = "1 output holds" if n == 1 else f"{n} outputs hold"
        notes.append(
            f"{which} rounding alone, in the original too (zero in theory): up to twice the original's own error is tolerated"
        )
    if n := sum(leaf.ok and leaf.is_explained for leaf in leaves):
        which = "1 result is" if n == 1 else f"{n} results are"
        notes.append(
            f"{which} as sensitive to rounding in the original: no further off than {GROWTH:.0f} times what it is itself, once its "
            "arguments move by one rounding"
        )
    return tuple(notes)


def _readable(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _tolerance_of(dtype: Any, sums: ReductionSizes) -> Tolerance:
    if jnp.issubdtype(dtype, np.inexact):
        return tolerance(_judged_as(dtype, sums), sums.reduction_size, tf32=sums.tf32)
    return Tolerance(str(dtype), float("inf"), 0.0, 0.0, "exact")


def _judged_as(dtype: Any, sums: ReductionSizes) -> str:
    """The dtype whose tolerance applies: a float32 result of bfloat16 products is as coarse as those."""
    coarser = sums.coarsest and mantissa_bits(sums.coarsest) < mantissa_bits(dtype)
    return sums.coarsest if coarser else str(dtype)


def tolerance_notes(leaves: Iterable[LeafNumerics], sums: ReductionSizes) -> tuple[str, ...]:
    """A sentence on the results judged by the tolerance of a coarser dtype than their own; () for none."""
    inexact = [leaf.dtype for leaf in leaves if jnp.issubdtype(jnp.dtype(leaf.dtype), np.inexact)]
    wider = sorted({d for d in inexact if _judged_as(d, sums) != d})
    if not wider:
        return ()
    return (
        f"{', '.join(wider)} results are judged with the tolerance of {sums.coarsest}, in which the program multiplies",
    )


def _scale(x: Any) -> float:
    return largest(x) if jnp.issubdtype(x.dtype, np.inexact) else 0.0
