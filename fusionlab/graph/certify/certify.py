"""The proof of a match: the raw region and its replacement agree as real functions, in values and in gradients.

Both are traced together with their vjp at the site's real shapes (custom rules and stop_gradients kept), then evaluated in
float64 numpy at reduced sizes on the same random inputs. Nothing is compiled, and repeated layers are proved once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from ..dtypes import is_float
from ..interpret.evaluate import Inline, ReducedSizes, traced_once
from ..interpret.limits import CannotEvaluate
from ..jax_compat import varies
from ..matching.region import Region, region_signature
from ..program.explicit_axes import Misplaced, placing, sharding_in_type
from ..program.in_shard_map import DeviceSums, as_typed, is_weak, make_jaxpr
from ..program.ir import Block, Node
from ..program.signature import Memo
from ..program.trace import block_of_jaxpr
from ..settings import unwrapped
from .alike import Alike, is_same_equation
from .inputs import STEPS, Reduction, inputs_of, is_number
from .programs import FEW, Programs
from .reduced_sizes import SOON, at_sizes, elements
from .stress import try_out
from .verdict import ProofOutcome, ResultPair, Results, agree, tolerance_of

_DRAWS = 8  # of a site of few elements
_OWN_SIZE_LIMIT = 1 << 22  # elements, where a replacement that is not this package's is compared once as it stands


_REAL = Reduction(real=True)


@dataclass
class Certifier(Memo):
    """Proves matches and caches each proof by all that it depends on; `hits` and `misses` are visible.

    `inline` gives the plain meaning of primitives that JAX does not know (fused ops).
    """

    inline: Inline = lambda eqn: None
    _alike: Alike = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._alike = Alike(self.inline)

    def region(
        self,
        region: Region,
        replacement: Callable[..., Any],
        description: Any,
        derivative: Callable[[Region], Any] | None = None,
        ours: Callable[[], Block] | None = None,
    ) -> ProofOutcome:
        """Values and gradients of `replacement(*region.inputs)` against the region.

        Args:
          region: the raw region.
          replacement: the function to replace it, taking `region.inputs`.
          description: hashable description of the replacement (op and attributes), part of the cache key.
          derivative: returns the region's own derivative as `with_vjp` does, if it is needed elsewhere too; else it is traced here.
          ours: the traced replacement, if it is one of this package's ops, whose values and gradients are the same formulas for all
            sizes: a proof for a similar program (see alike.py) is then reused.
        """
        key = ("region", region_signature(region), description)

        def prove() -> ProofOutcome:
            if ours is not None and is_same_equation(region, ours(), self.inline):
                return ProofOutcome(None)
            return _prove(region, replacement, self.inline, derivative, ours is not None)

        return self.once(key, lambda: prove() if ours is None else self._alike.once(region, ours, description, prove))

    def extremes(self, region: Region, replacement: Callable[..., Any], description: Any) -> ProofOutcome:
        """Whether `replacement(*region.inputs)` agrees with the region on extreme numbers and in the region's dtypes; arguments as for
        `region`. For replacements that are not this package's own.
        """

        def prove() -> ProofOutcome:
            avals, out = [v.aval for v in region.inputs], region.root.aval
            old_fn = jex_core.jaxpr_as_fun(region.jaxpr())
            names = [f"gradient of {n}" for n in _float_names(region)]
            inline = traced_once(without_device_sums(self.inline))
            try:
                with placing((*avals, out)):
                    old = with_vjp(lambda *a: old_fn(*a)[0], avals, out)
                    new = with_vjp(replacement, avals, out)
            except Misplaced as error:
                return misplaced(error)
            found = _tried(old, new, avals, out, inline, ["value", *names], lambda run: at_sizes(run, avals))
            return _at_its_own_size(region, old, new, inline) if found.ok else found

        return self.once(("extremes", region_signature(region), description), prove)


def _at_its_own_size(region: Region, old: Any, new: Any, inline: Inline) -> ProofOutcome:
    """Whether two programs agree at the region's real sizes, if that is quick to evaluate: at reduced sizes, a number compared with
    positions, such as the first 64 of 512 columns, lies beyond all of them.
    """
    avals, out = [v.aval for v in region.inputs], region.root.aval
    if elements((*avals, out)) > _OWN_SIZE_LIMIT:
        return ProofOutcome(None)
    try:
        programs = Programs(old, new, avals, out, inline)
        return _agree(region, programs.results(0, replace(_REAL, most=SOON)))
    except CannotEvaluate:
        return ProofOutcome(None)  # it was told at reduced sizes


def prove_function(
    old: Callable[..., Any],
    new: Callable[..., Any],
    names: Sequence[str],
    avals: Sequence[Any],
    inline: Inline,
    ordinary: bool = False,
) -> ProofOutcome:
    """Whether two functions of float arrays with one result are the same, in values and in gradients, at these sizes.

    Args:
      old, new: the original and the replacement.
      names: of the arguments.
      avals: their types (`jax.ShapeDtypeStruct`), of small sizes.
      inline: the plain meaning of primitives that JAX does not know.
      ordinary: on ordinary numbers only; otherwise also as in `Certifier.extremes`.
    """
    outs = [jax.eval_shape(fn, *avals) for fn in (old, new)]
    if (other := _other_type(*outs)) is not None:
        return other
    given, new_ones = (with_vjp(fn, avals, outs[0]) for fn in (old, new))
    result_names = ["value", *(f"gradient of {n}" for n in names)]
    tolerance = tolerance_of((*avals, outs[0]))
    draws = _draws(avals)

    inline = traced_once(inline)
    try:
        programs = Programs(given, new_ones, avals, outs[0], inline)
        found = [programs.results(seed, _REAL) for seed in range(draws)]
        wrong = _first_wrong(tolerance, result_names, found)
    except CannotEvaluate as error:
        return ProofOutcome("uncertified", f"it could not be certified: {error}")
    if wrong is not None or ordinary:
        return wrong or ProofOutcome(None)
    return _tried(given, new_ones, avals, outs[0], inline, result_names, lambda run: run(_REAL))


def _other_type(old: Any, new: Any) -> ProofOutcome | None:
    """The outcome for results that are not arrays of the same type; None if they are."""
    if not hasattr(old, "shape") or not hasattr(new, "shape"):
        return ProofOutcome("structure", "it does not return a single array")
    if (old.shape, old.dtype) == (new.shape, new.dtype):
        return None
    return ProofOutcome("structure", f"it returns {new.dtype}{list(new.shape)}; needed {old.dtype}{list(old.shape)}")


def _first_wrong(tolerance: float, names: Sequence[str], found: Sequence[Results]) -> ProofOutcome | None:
    verdicts = (agree(tolerance, names, results) for results in found)
    return next((verdict for verdict in verdicts if not verdict.ok), None)


def _tried(
    old: Any, new: Any, avals: Sequence[Any], out: Any, inline: Inline, names: Sequence[str], at: Callable[..., Any]
) -> ProofOutcome:
    """As `try_out`; `at` runs it at some sizes."""
    tolerance = tolerance_of((*avals, out))

    def attempt(reduction: Reduction) -> str | None:
        def given(seed: int) -> tuple[ReducedSizes, list[np.ndarray]]:
            return inputs_of(avals, out, reduction, seed)

        return try_out(old, new, given, avals, inline, names, tolerance)

    try:
        wrong = at(attempt)
    except CannotEvaluate as error:
        return ProofOutcome("uncertified", f"it could not be certified: {error}")
    return ProofOutcome("value", wrong) if wrong else ProofOutcome(None)


def _prove(
    region: Region,
    replacement: Callable[..., Any],
    inline: Inline,
    derivative: Callable[[Region], Any] | None,
    ours: bool,
) -> ProofOutcome:
    avals, out = [v.aval for v in region.inputs], region.root.aval
    old_fn = jex_core.jaxpr_as_fun(region.jaxpr())
    sums = region.sums
    if sums.axes and (more := _summed(replacement, avals, out, sums) - sums.axes):
        return ProofOutcome("region", f"it sums over {', '.join(sorted(more))}, but the site does not")
    try:
        with placing((*avals, out)), unwrapped(ours):
            if derivative is not None and not _on_a_mesh((*avals, out), sums):
                old = derivative(region)
            else:
                old = with_gradients(lambda *a: old_fn(*a)[0], avals, out, sums, any(map(_has_vjp_rule, region.nodes)))
            new = with_gradients(replacement, avals, out, sums)
    except Misplaced as error:
        return misplaced(error)
    return _same(region, _names(region), Programs(old, new, avals, out, inline, sums.axes))


def misplaced(error: Misplaced) -> ProofOutcome:
    """The outcome for a replacement that JAX cannot type on explicit mesh axes."""
    return ProofOutcome("sharding", f"JAX cannot type it on these explicit mesh axes: {error}")


def _summed(fn: Callable[..., Any], avals: Sequence[Any], out: Any, sums: DeviceSums) -> frozenset[str]:
    """The mesh axes over which a program sums; its gradients may sum over more, for values that do not vary along them."""
    return DeviceSums.of(block_of_jaxpr(make_jaxpr(fn, avals, out, sums)).nodes).axes


def prove_gradients(
    region: Region, old: Any, new: Any, groups: Sequence[tuple[str, int]], inline: Inline
) -> ProofOutcome:
    """Compares the gradients that a program computes with those that would replace them.

    Args:
      region: the site: its inputs and its root are the arguments of both programs, the root as a cotangent.
      old: jaxpr of (inputs, cotangent) -> terms of the gradients.
      new: jaxpr of (inputs, cotangent) -> (value, the gradients).
      groups: (name, number of terms) of each gradient, in the order of both.
    """

    def with_terms_added(pair: ResultPair) -> ResultPair:
        terms = iter(pair[0])
        return [sum(next(terms) for _ in range(n)) for _, n in groups], pair[1][1:]

    programs = Programs(old, new, [v.aval for v in region.inputs], region.root.aval, inline)
    return _same(region, [f"gradient of {name}" for name, _ in groups], programs, with_terms_added)


def _same(
    region: Region, names: Sequence[str], programs: Programs, of: Callable[[ResultPair], ResultPair] = lambda pair: pair
) -> ProofOutcome:
    """Whether two programs agree, evaluated at reduced sizes, or at the real ones if that fails.

    `of` converts the programs' outputs to results of these names. Programs that sum over mesh axes are evaluated on several devices.
    """
    inline = traced_once(without_device_sums(programs.inline, programs.axes))
    programs = replace(programs, inline=inline, classes=region.positions)
    avals, tolerance = programs.avals, tolerance_of((*region.inputs, region.root))

    def attempt(reduction: Reduction) -> list[Results]:
        return [programs.results(seed, reduction) for seed in range(_draws(avals))]

    try:
        found = at_sizes(attempt, avals, region.positions)
        for results in found:
            verdict = agree(
                tolerance, names, Results(of(results.pair), lambda n, results=results: of(results.nudged(n)))
            )
            if not verdict.ok:
                return verdict
        return programs.beyond(found[0].given, names, tolerance, of)
    except CannotEvaluate as error:
        return ProofOutcome("uncertified", str(error))


def _draws(avals: Sequence[Any]) -> int:
    return _DRAWS if elements(avals) <= FEW else STEPS if any(map(is_number, avals)) else 1


def without_device_sums(inline: Inline, summed: frozenset[str] = frozenset()) -> Inline:
    """In the gradients of a site without collectives, sums over devices belong to operands that do not vary along an axis: they transpose
    the operand's copy to every device, equally in both programs. Only the computation of one device remains to be proved. A site that is
    `summed` over mesh axes itself is left as it is.
    """
    if summed:
        return inline

    def known(eqn: Any) -> Callable[..., Any] | None:
        return (lambda *xs: list(xs)) if eqn.primitive.name == "psum_invariant" else inline(eqn)

    return known


def _agree(region: Region, found: Results) -> ProofOutcome:
    return agree(tolerance_of((*region.inputs, region.root)), _names(region), found)


def _names(region: Region) -> list[str]:
    gradients = (f"gradient of {n}" for n in _float_names(region))
    return ["value", *(gradients if is_float(region.root.dtype) else ())]


def with_vjp(
    fn: Callable[..., Any],
    avals: Sequence[Any],
    out: Any,
    wanted: Sequence[int] | None = None,
    sums: DeviceSums | None = None,
    weak: bool = False,
    others: bool = False,
) -> Any:
    """A jaxpr of (arguments, cotangent) -> (value, gradients of the arguments `wanted`: by default of every float one).

    `avals` and `out` are the types of the arguments and of the value; `sums` what `fn` sums over; `weak` as of `make_jaxpr`. With `others`
    `fn` gives a tuple of the value and of further results, which are not differentiated and follow the value.
    """
    floats = [i for i, a in enumerate(avals) if is_float(a.dtype)] if wanted is None else list(wanted)

    def joint(*args: Any) -> list[Any]:
        *primals, ct = args

        def of_floats(*xs: Any) -> Any:
            full = list(primals)
            for i, x in zip(floats, xs, strict=True):
                full[i] = x
            value, *more = fn(*full) if others else (fn(*full),)
            return as_typed(value, out), more

        value, pull, more = jax.vjp(of_floats, *(primals[i] for i in floats), has_aux=True)
        return [value, *more, *pull(ct)]

    return make_jaxpr(joint, [*avals, out], sums=sums, weak=weak)


def with_gradients(
    fn: Callable[..., Any], avals: Sequence[Any], out: Any, sums: DeviceSums | None = None, as_jax: bool = False
) -> Any:
    """As `with_vjp`, for a proof, in which only numbers matter: the derivative is transposed as a whole. JAX linearises each
    equation separately, in an order that other callers need, and takes twice as long.

    With `as_jax`, and on a mesh, whose types the transposition as a whole does not know, it is `with_vjp`. A value that is no float has no
    gradients.
    """
    types = (*avals, out)
    if not is_float(out.dtype):
        return make_jaxpr(lambda *args: [fn(*args[:-1])], [*avals, out], sums=sums)
    if as_jax or _on_a_mesh(types, sums):
        return with_vjp(fn, avals, out, sums=sums)
    floats = [i for i, a in enumerate(avals) if is_float(a.dtype)]

    def joint(*args: Any) -> list[Any]:
        *primals, ct = args
        value: list[Any] = []

        def of_floats(*xs: Any) -> Any:
            full = list(primals)
            for i, x in zip(floats, xs, strict=True):
                full[i] = x
            return as_typed(fn(*full), out)

        moving = tuple(primals[i] for i in floats)

        def tangent(*ts: Any) -> Any:
            primal, moved = jax.jvp(of_floats, moving, ts)
            value.append(primal)
            return moved

        gradients = jax.linear_transpose(tangent, *moving)(ct)
        return [value[0], *gradients]

    return make_jaxpr(joint, [*avals, out])


def _on_a_mesh(types: Sequence[Any], sums: DeviceSums | None) -> bool:
    return bool(sums and sums.axes) or any(varies(a) or sharding_in_type(a) is not None for a in types)


def _has_vjp_rule(node: Node) -> bool:
    """Whether a node contains a user's reverse-mode derivative."""
    return node.primitive.startswith("custom_vjp") or any(_has_vjp_rule(n) for b in node.blocks for n in b.nodes)


def weak_gradients(region: Region) -> frozenset[int]:
    """The numbers of the region's inputs that are weakly typed, as Python numbers are, and whose gradients in the program are so, too."""
    avals = [v.aval for v in region.inputs]
    weak = [i for i, a in enumerate(avals) if is_weak(a) and is_float(a.dtype)]
    if not weak:
        return frozenset()
    fn = jex_core.jaxpr_as_fun(region.jaxpr())
    gradients = with_vjp(lambda *a: fn(*a)[0], avals, region.root.aval, weak, region.sums, weak=True).out_avals[1:]
    return frozenset(i for i, aval in zip(weak, gradients, strict=True) if is_weak(aval))


def _float_names(region: Region) -> list[str]:
    by_id: dict[int, list[str]] = {}
    for name, value in region.leaves.items():
        by_id.setdefault(value.id, []).append(name)
    return ["/".join(by_id[v.id]) for v in region.inputs if is_float(v.dtype)]
