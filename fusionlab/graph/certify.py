"""The proof of a match: the raw region and its replacement agree as real functions, in values and in gradients.

Both are traced together with their vjp at the site's real shapes (custom rules and stop_gradients kept), then evaluated in
float64 numpy at reduced sizes on the same random inputs. Nothing is compiled, and repeated layers are proved once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from .agreement import Pair, Results, Verdict, agree, tolerance_of
from .compat import varies, varying_axes
from .devices import COUNT, evaluate_together
from .draws import STEPS, Reduction, inputs_of, is_number, summed_with
from .evaluate import CannotEvaluate, Inline, Sizes, evaluate, is_float, traced_once
from .explicit import Misplaced, placing
from .manual import Sums, as_typed, make_jaxpr
from .reducing import SOON, at_sizes, elements
from .region import Region
from .signature import Memo, region_signature
from .trace import block_of_jaxpr
from .trials import try_out

_FEW, _DRAWS = 256, 8  # a site of few elements is looked at with several draws: one may miss a whole branch
_NUDGE = 1e-9  # relative: by how much inputs are moved to see what is noise
_REDRAWS, _SEEDS = 30, 1000
_TRUE = (
    0.5,
    0.7,
    0.85,
    0.3,
    0.15,
)  # the share of booleans that are True, draw by draw: a mask may hide where they are, or where not
_OWN_SIZE_LIMIT = 1 << 22  # elements, where a replacement that is not this package's is compared once as it stands


_REAL = Reduction(real=True)


@dataclass
class Certifier(Memo):
    """Proves matches, remembering each proof by everything that matters; `hits` and `misses` are visible.

    `inline` gives the plain meaning of primitives that JAX does not know (fused ops).
    """

    inline: Inline = lambda eqn: None

    def region(self, region: Region, replacement: Callable[..., Any], what: Any) -> Verdict:
        """Values and gradients of `replacement(*region.inputs)` against the region.

        Args:
          region: the raw region.
          replacement: what would stand in its place, taking `region.inputs`.
          what: hashable description of the replacement (op and attributes), part of the cache key.
        """
        key = ("region", region_signature(region), what)
        return self.once(key, lambda: _prove(region, replacement, self.inline))

    def extremes(self, region: Region, replacement: Callable[..., Any], what: Any) -> Verdict:
        """Whether `replacement(*region.inputs)` does as the region on other than ordinary numbers, and in the region's dtypes; else as
        `region`. For a replacement that is not this package's own.
        """

        def prove() -> Verdict:
            avals, out = [v.aval for v in region.inputs], region.root.aval
            old_fn = jex_core.jaxpr_as_fun(region.jaxpr())
            names = [f"gradient of {n}" for n in _float_names(region)]
            inline = traced_once(_on_one_device(self.inline))
            try:
                with placing((*avals, out)):
                    old = with_vjp(lambda *a: old_fn(*a)[0], avals, out)
                    new = with_vjp(replacement, avals, out)
            except Misplaced as error:
                return misplaced(error)
            found = _tried(old, new, avals, out, inline, ["value", *names], lambda run: at_sizes(run, avals))
            return _at_its_own_size(region, old, new, inline) if found.ok else found

        return self.once(("extremes", region_signature(region), what), prove)


def _at_its_own_size(region: Region, old: Any, new: Any, inline: Inline) -> Verdict:
    """Whether two programs agree at the region's real sizes, as far as that is soon told: at reduced ones a number that is compared with
    positions, say the first 64 of 512 columns, lies beyond all of them.
    """
    avals, out = [v.aval for v in region.inputs], region.root.aval
    if elements((*avals, out)) > _OWN_SIZE_LIMIT:
        return Verdict(None)
    try:
        return _agree(region, _evaluated(old, new, avals, out, inline, 0, replace(_REAL, most=SOON)))
    except CannotEvaluate:
        return Verdict(None)  # it was told at reduced sizes


def prove_function(
    old: Callable[..., Any],
    new: Callable[..., Any],
    names: Sequence[str],
    avals: Sequence[Any],
    inline: Inline,
    ordinary: bool = False,
) -> Verdict:
    """Whether two functions of float arrays with one result are the same, in values and in gradients, at these sizes.

    Args:
      old, new: what is to be replaced, and what would be.
      names: of the arguments.
      avals: their types (`jax.ShapeDtypeStruct`), of small sizes.
      inline: the plain meaning of primitives that JAX does not know.
      ordinary: on ordinary numbers only; else as `Certifier.extremes` too.
    """
    outs = [jax.eval_shape(fn, *avals) for fn in (old, new)]
    if any(not hasattr(o, "shape") for o in outs):
        return Verdict("structure", "it does not give one array")
    if (outs[0].shape, outs[0].dtype) != (outs[1].shape, outs[1].dtype):
        return Verdict(
            "structure", f"it gives {outs[1].dtype}{list(outs[1].shape)}, needed {outs[0].dtype}{list(outs[0].shape)}"
        )
    given, new_ones = (with_vjp(fn, avals, outs[0]) for fn in (old, new))
    told = ["value", *(f"gradient of {n}" for n in names)]
    tolerance = tolerance_of((*avals, outs[0]))
    draws = _draws(avals)

    inline = traced_once(inline)
    try:
        found = [_evaluated(given, new_ones, avals, outs[0], inline, seed, _REAL) for seed in range(draws)]
        wrong = next((v for one in found if not (v := agree(tolerance, told, one)).ok), None)
    except CannotEvaluate as error:
        return Verdict("uncertified", f"it cannot be told: {error}")
    if wrong is not None or ordinary:
        return wrong or Verdict(None)
    return _tried(given, new_ones, avals, outs[0], inline, told, lambda run: run(_REAL))


def _tried(
    old: Any, new: Any, avals: Sequence[Any], out: Any, inline: Inline, names: Sequence[str], at: Callable[..., Any]
) -> Verdict:
    """As `try_out`; `at` runs it at some sizes."""
    tolerance = tolerance_of((*avals, out))

    def attempt(reduction: Reduction) -> str | None:
        def given(seed: int) -> tuple[Sizes, list[np.ndarray]]:
            return inputs_of(avals, out, reduction, seed)

        return try_out(old, new, given, avals, inline, names, tolerance)

    try:
        wrong = at(attempt)
    except CannotEvaluate as error:
        return Verdict("uncertified", f"it cannot be told: {error}")
    return Verdict("value", wrong) if wrong else Verdict(None)


def _prove(region: Region, replacement: Callable[..., Any], inline: Inline) -> Verdict:
    avals, out = [v.aval for v in region.inputs], region.root.aval
    old_fn = jex_core.jaxpr_as_fun(region.jaxpr())
    sums = region.sums
    if sums.axes and (more := _summed(replacement, avals, out, sums) - sums.axes):
        return Verdict("region", f"it sums over {', '.join(sorted(more))}, and the site does not")
    try:
        with placing((*avals, out)):
            old = with_vjp(lambda *a: old_fn(*a)[0], avals, out, sums=sums)
            new = with_vjp(replacement, avals, out, sums=sums)
    except Misplaced as error:
        return misplaced(error)
    return _same(old, new, avals, out, inline, lambda found: _agree(region, found), sums.axes)


def misplaced(error: Misplaced) -> Verdict:
    """What is said of a replacement that JAX has no type for on explicit mesh axes."""
    return Verdict("sharding", f"on these explicit mesh axes JAX does not type it: {error}")


def _summed(fn: Callable[..., Any], avals: Sequence[Any], out: Any, sums: Sums) -> frozenset[str]:
    """The mesh axes a program sums over; its gradients may over more, those of what does not vary along them."""
    return Sums.of(block_of_jaxpr(make_jaxpr(fn, avals, out, sums)).nodes).axes


def prove_gradients(region: Region, old: Any, new: Any, groups: Sequence[tuple[str, int]], inline: Inline) -> Verdict:
    """The gradients that a program computes, against those that would stand in their place.

    Args:
      region: the site: its inputs and its root are the arguments of both programs, the root as a cotangent.
      old: jaxpr of (inputs, cotangent) -> terms of the gradients.
      new: jaxpr of (inputs, cotangent) -> (value, the gradients).
      groups: (name, number of terms) of each gradient, in the order of both.
    """

    def summed(pair: Pair) -> Pair:
        terms = iter(pair[0])
        return [sum(next(terms) for _ in range(n)) for _, n in groups], pair[1][1:]

    def close(found: Results) -> Verdict:
        sums = Results(summed(found.pair), lambda number: summed(found.nudged(number)))
        return _close(region, [f"gradient of {name}" for name, _ in groups], sums)

    return _same(old, new, [v.aval for v in region.inputs], region.root.aval, inline, close)


def _same(
    old: Any,
    new: Any,
    avals: Sequence[Any],
    out: Any,
    inline: Inline,
    close: Callable[[Results], Verdict],
    axes: frozenset[str] = frozenset(),
) -> Verdict:
    """Whether two programs of (arguments, cotangent) agree, evaluated at reduced sizes; at the real ones where those will not do.

    Those that sum over mesh axes are evaluated on several devices.
    """
    inline = traced_once(inline if axes else _on_one_device(inline))
    draws = _draws(avals)

    def attempt(reduction: Reduction) -> list[Results]:
        return [_evaluated(old, new, avals, out, inline, seed, reduction, axes) for seed in range(draws)]

    try:
        return next((v for one in at_sizes(attempt, avals) if not (v := close(one)).ok), Verdict(None))
    except CannotEvaluate as error:
        return Verdict("uncertified", str(error))


def _draws(avals: Sequence[Any]) -> int:
    return _DRAWS if elements(avals) <= _FEW else STEPS if any(map(is_number, avals)) else 1


def _on_one_device(inline: Inline) -> Inline:
    """In the gradients of a site without collectives sums over devices are those of what its operands do not vary along: the
    transpose of an operand's copy to every device, in both programs alike. What is left to prove is what one device does.
    """

    def known(eqn: Any) -> Callable[..., Any] | None:
        return (lambda *xs: list(xs)) if eqn.primitive.name == "psum_invariant" else inline(eqn)

    return known


def _evaluated(
    old: Any,
    new: Any,
    avals: Sequence[Any],
    out: Any,
    inline: Inline,
    seed: int,
    reduction: Reduction,
    axes: frozenset[str] = frozenset(),
) -> Results:
    """Both programs on the same random inputs: the first drawn on which the old one makes no NaN or infinity, if any is. Those prove
    little (one row of NaN is a gradient full of them), and what a fused op does with them is told by its own tests.
    """
    weights = summed_with(old)

    def run(program: Any, sizes: Sizes, args: list[list[np.ndarray]]) -> list[np.ndarray]:
        if axes:
            return evaluate_together(program, args, axes, sizes, inline)
        return evaluate(program, args[0], sizes, inline)

    def drawn(number: int) -> tuple[Sizes, list[list[np.ndarray]], list[np.ndarray]]:
        first = seed + _SEEDS * number
        true = _TRUE[number % len(_TRUE)]
        sizes, args = inputs_of(avals, out, reduction, first, true, weights)
        every = [args]
        if axes:
            others = (
                inputs_of(avals, out, reduction, first + _SEEDS // 2 + n, true, weights)[1] for n in range(1, COUNT)
            )
            own = _differing([*avals, out], axes)
            every += [[b if differs else a for differs, a, b in zip(own, args, other, strict=True)] for other in others]
        return sizes, every, run(old, sizes, every)

    first = drawn(0)
    again = (drawn(n) for n in range(1, _REDRAWS)) if not all(map(_finite, first[2])) else ()
    sizes, args, want = next((d for d in again if all(map(_finite, d[2]))), first)

    def nudged(number: int) -> Pair:
        rng = np.random.default_rng(number)
        moved = [[a * (1 + _NUDGE * rng.normal(size=a.shape)) if _is_float64(a) else a for a in own] for own in args]
        return run(old, sizes, moved), run(new, sizes, moved)

    return Results((want, run(new, sizes, args)), nudged)


def _differing(avals: Sequence[Any], axes: frozenset[str]) -> list[bool]:
    """Which values may be others on each device along some mesh axes: where types do not tell, every float."""
    typed = any(map(varies, avals))
    return [bool(varying_axes(a) & axes) if typed else is_float(a.dtype) for a in avals]


def _is_float64(a: Any) -> bool:
    return isinstance(a, np.ndarray) and a.dtype == np.float64


def _finite(a: np.ndarray) -> bool:
    return not is_float(a.dtype) or bool(np.isfinite(a).all())


def _agree(region: Region, found: Results) -> Verdict:
    return _close(region, ["value", *(f"gradient of {n}" for n in _float_names(region))], found)


def _close(region: Region, names: Sequence[str], found: Results) -> Verdict:
    return agree(tolerance_of((*region.inputs, region.root)), names, found)


def with_vjp(
    fn: Callable[..., Any],
    avals: Sequence[Any],
    out: Any,
    wanted: Sequence[int] | None = None,
    sums: Sums | None = None,
) -> Any:
    """A jaxpr of (arguments, cotangent) -> (value, gradients of the arguments `wanted`: by default of every float one).

    `avals` and `out` are the types of the arguments and of the value; `sums` what `fn` sums over.
    """
    floats = [i for i, a in enumerate(avals) if is_float(a.dtype)] if wanted is None else list(wanted)

    def joint(*args: Any) -> list[Any]:
        *primals, ct = args

        def of_floats(*xs: Any) -> Any:
            full = list(primals)
            for i, x in zip(floats, xs, strict=True):
                full[i] = x
            return as_typed(fn(*full), out)

        value, pull = jax.vjp(of_floats, *(primals[i] for i in floats))
        return [value, *pull(ct)]

    return make_jaxpr(joint, [*avals, out], sums=sums)


def _float_names(region: Region) -> list[str]:
    by_id: dict[int, list[str]] = {}
    for name, value in region.leaves.items():
        by_id.setdefault(value.id, []).append(name)
    return ["/".join(by_id[v.id]) for v in region.inputs if is_float(v.dtype)]
