"""Whether the fused form of a program is the program: outputs and gradients, judged against float64.

Both are traced with their gradients and evaluated in numpy, without compiling: in float64, where two programs agree only if
they are the same function, and once more with every result rounded to its own dtype, where the fused one may not be further
from float64 than the original. A share is compiled and run in its own dtypes as well.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

import fusionlab as fl
from fusionlab.device import Device
from fusionlab.fusers import find_in, registry
from fusionlab.graph.certify.certify import Certifier
from fusionlab.graph.dtypes import is_float
from fusionlab.graph.interpret.evaluate import evaluate, traced_once
from fusionlab.graph.interpret.limits import CannotEvaluate
from fusionlab.kernels import meaning_of
from fusionlab.testing.tolerances import tolerance
from tests.asked import by_default

from .generator import DRAWS, Program, transformed

# In float64 all that may differ is how literals were rounded: to 2 units in the last place of the program's dtype. Of a program of
# float64 there is no reference that is more exact: what it computes in float32 is off by more than this.
EXACT = {"float64": 2.0**-24, "float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}
# By how much an input may be off, being rounded; relative.
_STEP = {"float64": 2.0**-50, "float32": 2.0**-21, "float16": 2.0**-11, "bfloat16": 2.0**-9}
# Far enough for inputs to round otherwise.
_NEARBY = {"float64": 2.0**-50, "float32": 2.0**-21, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# Some roundings of an input.
_TIE = {"float64": 2.0**-48, "float32": 2.0**-19, "float16": 2.0**-10, "bfloat16": 2.0**-8}
# What one sum may round by.
_UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-12, "bfloat16": 2.0**-9}
_TRIALS, _MORE = 6, 24
_SHAKEN = 4.0  # a difference is none while the original moves by a quarter of it when its inputs are shaken
_NOISE = 16.0
_FEW = 64  # entries of a gradient whose slopes are taken, at most
_NOTHING = 1e-8  # what is no larger may be 0 in theory, as a gradient behind a norm is; 1 / sqrt(epsilon) makes it of float64's own noise
_ZERO = 1e-4  # a gradient below this share of the largest may be zero in theory
_SMALL = 0.05  # and, rounded, one below this share may be what is left of larger terms
_IN_RANGE, _TAIL = 1e4, 1e-6  # an entry that every float dtype has; one that may be 0 because of an infinity further in
# An input beyond this is one at the edge of its dtype; how far from there a program may overflow or not.
_FAR, _MARGIN = (1e3, 16.0)
_GROWTH = 2.0
# Where the original itself is a tenth off, roundings are all that is left of the array: a norm of two entries gives +-1 whatever they
# are, and its gradient is what its terms do not cancel. There the fused form may be ten times as far, and no further.
_LOST, _GROWTH_LOST = 0.1, 10.0
_FLAT = 1e-9  # a slope of the outputs, of size 1, that finite differences in float64 cannot tell from 0
_NOTED = (
    "overflow in the program but not in the fused op"  # in the note of a site whose softmax is exp(s) / sum(exp(s))
)
_BLIND = "a fully masked query row gives 0 in the fused op"
_ATTENDS = ("dot_product_attention", "multi_transformer")
_SOONER = "overflows sooner"  # and cancels where a row's mean is far above its deviation: the original does, the fused op does not
_DIGITS = "read to 12 digits"
_AT_THE_EDGE = "near the edge of"  # in the note of a site that overflows there where the program does not
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Judgement:
    """What was found in a program, and what became of it.

    Attributes:
      seed: of the program.
      verdict: "same", "no site", "wrong" or "uncomparable".
      reason: why it is wrong or cannot be compared.
      candidates: pass -> sites fused.
      pairs: pass -> those of them fused together with their backward passes, in a program that is differentiated already.
      rejections: "pass: code" -> sites declined.
      shaken: differences that are as large when the original's inputs are shaken by a rounding.
      overflows: gradients that are inf or NaN in the original, and right in the fused program, whose notes say so.
    """

    seed: int
    verdict: str
    reason: str = ""
    candidates: dict[str, int] = field(default_factory=dict)
    rejections: dict[str, int] = field(default_factory=dict)
    shaken: int = 0
    overflows: int = 0
    pairs: dict[str, int] = field(default_factory=dict)


class Wrong(Exception):  # noqa: N818 - an answer
    """The fused program is not the program; the message says where."""


@dataclass
class Pair:
    """A program and its fused form, each with its gradients, as jaxprs of (arguments, cotangents)."""

    program: Program
    old: Any
    new: Any
    names: list[str]
    cotangents: list[Any]
    noted: bool  # a note says that the original overflows where the fused op does not
    blind: bool = False  # a note says that a query that sees no key is 0, where the original has NaN
    digits: bool = (
        False  # a note says that numbers of a float64 site are read to 12 digits; of scores of 1e8 that is seen
    )
    cancels: bool = False  # a note says that the original's variance cancels
    overflowing: bool = False  # a note says that the fused op overflows where the original does not
    baseline: Any = None  # jaxpr of the arguments, giving what to take off the outputs in float64
    shaken: int = 0
    overflows: int = 0
    inline: Any = field(default_factory=lambda: traced_once(meaning_of))

    def run(
        self, jaxpr: Any, args: Sequence[np.ndarray], rounded: bool = False, inline: Any = None
    ) -> list[np.ndarray]:
        outs = evaluate(jaxpr, args, inline=inline or self.inline, rounded=rounded)
        return self.of_interest(outs, args)

    def of_interest(self, outs: Sequence[np.ndarray], args: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Outputs in float64, the baseline, which is not rounded, taken off."""
        values = [np.asarray(a, np.float64) for a in outs]
        if self.baseline is None:
            return values
        return [a - b for a, b in zip(values, evaluate(self.baseline, args), strict=True)]

    @property
    def coarse(self) -> str:
        """The coarsest dtype of the program."""
        dtypes = {p.dtype for p in self.program.params}
        return next((d for d in ("bfloat16", "float16", "float32") if d in dtypes), "float64")

    @property
    def draws(self) -> tuple[str, ...]:
        """Of inputs. No large ones where a site's numbers are taken to some digits, or where an original that is differentiated already
        overflows and says so; none that are alike where a variance of float64 is what is left of two means, as its note says.
        """
        left_out = {"edge"}
        # exp(s - (max(s) + log(n))) of scores of 1e16 loses the log(n), in float64 too: weights that are alike come to n.
        by_logarithms = any(words in self.program.text for words in ("logsumexp", "log_softmax"))
        if self.digits or by_logarithms or (self.noted and self.program.baseline):
            left_out.add("large")
        if self.cancels and self.coarse == "float64":
            left_out.add("constant")
        return tuple(d for d in DRAWS if d not in left_out)

    def arguments(self, draw: str) -> list[np.ndarray]:
        rng = np.random.default_rng(self.program.seed)
        return [*self.program.arguments(draw), *(rng.normal(size=a.shape) for a in self.cotangents)]


def judge(
    program: Program,
    compiled: bool = False,
    rewrite: Callable[[Any], Callable] | None = None,
    passes: Sequence[str] = (),
) -> Judgement:
    """Judges one program.

    Args:
      program: what to judge.
      compiled: also compile both forms and run them in their own dtypes.
      rewrite: findings -> the fused function, judged also where there is no site; None: every accepted site fused.
      passes: the names of those that search; by default those that do without being asked.
    """
    found = _find(program, passes)
    candidates = dict(collections.Counter(c.pass_name for c in found.candidates))
    pairs = dict(collections.Counter(c.pass_name for c in found.candidates if _with_its_backward(c)))
    rejections = dict(collections.Counter(f"{r.pass_name}: {r.code}" for r in found.rejections))
    if not candidates and rewrite is None:
        return Judgement(program.seed, "no site", "", candidates, rejections)
    verdict, reason, excused = "same", "", (0, 0)
    try:
        pair = _pair(program, found, rewrite or (lambda f: jex_core.jaxpr_as_fun(f.rewritten())))
        try:
            _compare(pair, compiled)
        finally:
            excused = pair.shaken, pair.overflows
    except Wrong as wrong:
        verdict, reason = "wrong", f"{wrong}; {program.text}"
    except CannotEvaluate as unknown:
        verdict, reason = "uncomparable", str(unknown)
    return Judgement(program.seed, verdict, reason, candidates, rejections, *excused, pairs)


def _with_its_backward(candidate: Any) -> bool:
    backward = getattr(candidate, "backward", None)
    return backward is not None and getattr(backward, "stays", None) is None


# What the known activations look like is the same in every program; all other proofs are made anew.
_PROFILES: dict[Any, Any] = {}


def _find(program: Program, names: Sequence[str] = ()) -> Any:
    """`fl.find`, with what it learns of the known activations kept for the next program."""
    certifier = Certifier(meaning_of)
    certifier._known.update(_PROFILES)
    passes = [(p, {}) for p in (map(registry().__getitem__, names) if names else by_default())]
    found = find_in(fl.trace(program.fn, *program.avals), passes, Device.current(), certifier=certifier)
    _PROFILES.update((key, known) for key, known in certifier._known.items() if key[0] == "profile")
    return found


def _pair(program: Program, found: Any, rewrite: Callable[[Any], Callable]) -> Pair:
    plain = jex_core.jaxpr_as_fun(found.graph.top.jaxpr)  # as JAX traced it
    old, new = (transformed(f, program.outer) for f in (plain, rewrite(found)))
    outs = jax.eval_shape(old, *program.avals)
    floats = [i for i, p in enumerate(program.params) if p.dtype != "bool"] if program.differentiable else []
    cotangents = [o for o in outs if is_float(o.dtype)] if floats else []
    outputs = program.outputs or [f"output {i}" for i in range(len(outs))]
    names = [*outputs, *(f"gradient of argument {i}" for i in floats)]
    forms = [_with_gradients(f, floats, len(program.params)) for f in (old, new)]
    traced = [jax.make_jaxpr(f)(*program.avals, *cotangents) for f in forms]
    noted = any(_NOTED in note for c in found.candidates for note in c.notes)
    base = transformed(program.baseline, program.outer) if program.baseline else None
    baseline = None if base is None else jax.make_jaxpr(base)(*program.avals)
    blind, digits, edge = (
        any(w in n for c in found.candidates for n in c.notes) for w in (_BLIND, _DIGITS, _AT_THE_EDGE)
    )
    # No score of a model is near 3e38: that those overflow in another order is not said of every attention; of float16 it is.
    notes = [n for c in found.candidates for n in c.notes]
    cancels = any(_SOONER in n for n in notes)
    edge = edge or cancels or any(c.op in _ATTENDS and c.root.dtype != "float16" for c in found.candidates)
    return Pair(program, traced[0], traced[1], names, cotangents, noted, blind, digits, cancels, edge, baseline)


def _with_gradients(fn: Callable[..., list[Any]], floats: Sequence[int], count: int) -> Callable[..., list[Any]]:
    """(arguments, a cotangent for each float output) -> outputs and gradients of the float arguments."""

    def joint(*given: Any) -> list[Any]:
        primals, cotangents = list(given[:count]), iter(given[count:])
        if not floats:
            return list(fn(*primals))

        def of_floats(*xs: Any) -> list[Any]:
            full = list(primals)
            for i, x in zip(floats, xs, strict=True):
                full[i] = x
            return list(fn(*full))

        outs, pull = jax.vjp(of_floats, *(primals[i] for i in floats))
        zero = lambda o: np.zeros(o.shape, jax.dtypes.float0)  # noqa: E731
        return [*outs, *pull([next(cotangents) if is_float(o.dtype) else zero(o) for o in outs])]

    return joint


def _compare(pair: Pair, compiled: bool) -> None:
    """Raises Wrong where the two differ."""
    wants = {}
    for draw in pair.draws:
        args = pair.arguments(draw)
        wants[draw] = pair.run(pair.old, args)
        got = pair.run(pair.new, args)
        for name, gap, allowed in _gaps(pair, wants[draw], got, EXACT[pair.coarse], draw):
            if _is_of_nan(pair, wants[draw], name):
                continue
            if not _overflows(pair, args, wants[draw], got, name) and not _is_slope(pair, args, wants[draw], got, name):
                _excuse(pair, draw, wants[draw], name, gap, allowed)
    _no_new_overflow(pair)
    args, want = pair.arguments("normal"), wants["normal"]
    before, after = (pair.run(j, args, rounded=True) for j in (pair.old, pair.new))
    _no_worse(pair, want, before, after, "rounded")
    if compiled:
        before, after = _compiled(pair, args)
        _no_worse(pair, want, before, after, "compiled")


def _is_of_nan(pair: Pair, want: list, name: str) -> bool:
    """Whether an array is a gradient of an output that is NaN somewhere, and 0 in the fused form as a note says: what is made of that 0
    has a gradient.
    """
    outputs = (a for n, a in zip(pair.names, want, strict=True) if n.startswith("output"))
    return pair.blind and name.startswith("gradient") and any(np.isnan(a).any() for a in outputs)


def _no_new_overflow(pair: Pair) -> None:
    """Raises Wrong where numbers at the edge of their dtype become infinite or NaN by rounding, and no note of a site says so.

    Of values alone: gradients of a softmax overflow in many an order. And only where the original is some way from its own edge: a factor
    of the scores may stand before their sum or behind it. An original that has overflowed inside is right at a tail's 0 by chance.
    """
    if pair.overflowing:
        return
    args = pair.arguments("edge")
    less = [np.where(np.abs(a) > _FAR, a / _MARGIN, a) if a.dtype.kind == "f" else a for a in args]
    before = evaluate(pair.old, args, inline=pair.inline, rounded=True)
    after, nearer = (evaluate(pair.new, given, inline=pair.inline, rounded=True) for given in (args, less))
    exact = evaluate(pair.old, args, inline=pair.inline)
    for name, want, a, b, c in zip(pair.names, exact, before, after, nearer, strict=True):
        with np.errstate(all="ignore"):  # the original's own squares may have overflowed, to a 0 further on
            right = np.isfinite(a) & np.isclose(a, np.asarray(want, np.float64), rtol=0.1)
            if np.any(~right & (np.abs(want) < _IN_RANGE)):
                right &= np.abs(want) > _TAIL
        if name.startswith(("output", "loss")) and np.any(right & ~np.isfinite(b) & ~np.isfinite(c)):
            raise Wrong(f"{name} is finite and becomes infinite or NaN at edge inputs, rounded")


def _gaps(pair: Pair, want: list, got: list, allowed: float, draw: str) -> list[tuple[str, float, float]]:
    """(name, relative difference, allowed) of each array that differs by more than allowed."""
    scales = _scales(pair, want)
    found = []
    for name, a, b, scale in zip(pair.names, want, got, scales, strict=True):
        if a.shape != b.shape:
            raise Wrong(f"{name} has shape {list(b.shape)}, needed {list(a.shape)}")
        finite = np.isfinite(a)
        mended = bool(np.any(np.isfinite(b[~finite])))
        told = pair.noted or pair.blind
        if not np.all(np.isfinite(b[finite])) or (mended and not told):
            found.append((name, np.inf, allowed))
        else:
            gap = float(np.max(np.abs(a[finite] - b[finite]), initial=0.0)) / scale
            if gap > allowed:
                found.append((name, gap, allowed))
    return found


def _scales(pair: Pair, arrays: list[np.ndarray], share: float = _ZERO) -> list[float]:
    """What a difference in each array is measured by: its largest magnitude, but no less than a share of its group's."""
    own = [float(np.max(np.abs(a[np.isfinite(a)]), initial=0.0)) for a in arrays]
    groups = [n.split()[0] for n in pair.names]
    largest = {g: max((o for o, h in zip(own, groups, strict=True) if h == g), default=0.0) for g in groups}
    return [max(o, share * largest[g], _NOTHING) for o, g in zip(own, groups, strict=True)]


def _overflows(pair: Pair, args: list[np.ndarray], want: list, got: list, name: str) -> bool:
    """Whether a gradient differs only where the original's, in its own dtype, is inf or NaN, and the fused one is right there.

    Only in a program with a softmax that subtracts no maximum, as a site's note says: there the fused op, which subtracts
    it, is finite and the original is not. In float64 that original overflows too, only later, and its gradient before its
    value (from sum(exp(s)) > 1e162 on, sum^-2 is 0 and a term of it is lost): `want` is no reference for those entries.
    The slope of the original's own float64 outputs is one. Entries that even float64 makes inf or NaN have none.
    """
    if not pair.noted or not pair.cotangents or not name.startswith("gradient"):
        return False
    index, argument = pair.names.index(name), int(name.rpartition(" ")[2])
    known = np.isfinite(want[index])
    lost = known & ~np.isfinite(pair.run(pair.old, args, rounded=True)[index])
    outs = [a for n, a in zip(pair.names, want, strict=True) if n.startswith("output")]
    if all(np.isfinite(a).all() for a in outs):
        right = np.where(lost, _slopes(pair, args, argument, lost), want[index])[known]
    else:  # of an output that is NaN there are no slopes
        known = known & ~lost
        right = want[index][known]
    gap = np.max(np.abs(got[index][known] - right), initial=0.0)
    # Of a softmax that is saturated the slopes are 0, and what is measured is the rounding of the outputs.
    flat = _FLAT * max(1.0, abs(_total(pair, args, argument, (0,) * want[index].ndim, 0.0)))
    if not gap <= EXACT[pair.coarse] * np.max(np.abs(right), initial=0.0) + flat:  # NaN is no agreement
        return False
    pair.overflows += 1
    return True


def _is_slope(pair: Pair, args: list[np.ndarray], want: list, got: list, name: str) -> bool:
    """Whether a gradient, wherever it differs, is the slope of the original's outputs: then it is the original's that float64 loses, as
    where scores are so large that what a softmax adds up and takes away again is 1e11. Not where the original overflows in its own dtype:
    of that a note has to speak.
    """
    outs = [a for n, a in zip(pair.names, want, strict=True) if n.startswith("output")]
    if not pair.cotangents or not name.startswith("gradient") or not all(np.isfinite(a).all() for a in outs):
        return False
    index, argument = pair.names.index(name), int(name.rpartition(" ")[2])
    differs = ~(np.abs(got[index] - want[index]) <= EXACT[pair.coarse] * _scales(pair, want)[index])
    if differs.sum() > _FEW or not np.isfinite(pair.run(pair.old, args, rounded=True)[index][differs]).all():
        return False
    slopes = _slopes(pair, args, argument, differs)[differs]
    flat = _FLAT * max(1.0, abs(_total(pair, args, argument, (0,) * want[index].ndim, 0.0)))
    if not np.max(np.abs(got[index][differs] - slopes)) <= 1e-3 * np.max(np.abs(slopes)) + flat:
        return False
    pair.overflows += 1
    return True


def _slopes(pair: Pair, args: list[np.ndarray], argument: int, where: np.ndarray) -> np.ndarray:
    """The gradient of an argument at the entries `where`, NaN elsewhere, from the original's float64 outputs alone."""
    slopes = np.full(where.shape, np.nan)
    for at in map(tuple, np.argwhere(where)):
        step = 1e-5 * max(1.0, abs(float(args[argument][at])))
        far, near, after, beyond = (_total(pair, args, argument, at, k * step) for k in (-2, -1, 1, 2))
        # Of fourth order: right to 1e-8 or so where a score of some hundreds is a steep function of the entry, too.
        slopes[at] = (far - 8 * near + 8 * after - beyond) / (12 * step)
    return slopes


def _total(pair: Pair, args: list[np.ndarray], argument: int, at: tuple[int, ...], step: float) -> float:
    """What the gradients are of: the original's finite outputs times their cotangents, summed; an entry is `step` off."""
    moved = np.array(args[argument])
    moved[at] += step
    outs = pair.run(pair.old, [*args[:argument], moved, *args[argument + 1 :]])
    outputs = zip(pair.names, outs, pair.old.out_avals, strict=True)
    values = [a for name, a, aval in outputs if name.startswith("output") and is_float(aval.dtype)]
    finite = (np.where(np.isfinite(a), a * ct, 0.0) for a, ct in zip(values, args[-len(values) :], strict=True))
    return sum(float(np.sum(a)) for a in finite)


def _excuse(pair: Pair, draw: str, want: list, name: str, gap: float, allowed: float) -> None:
    """Raises Wrong unless the original itself is as unsteady there: a tie that rounding decides, a sum that cancels."""
    index = pair.names.index(name)
    scale, args = _scales(pair, want)[index], pair.arguments(draw)
    moved = 0.0
    for near in _shaken(args, _STEP[pair.coarse]):
        moved = max(moved, _furthest(pair.run(pair.old, near)[index], want[index]) / scale)
    group = [i for i, n in enumerate(pair.names) if n.split()[0] == name.split()[0]]
    noise = 0.0  # of float64 itself, in any array of the group: one form may cancel exactly where the other does not
    added = (traced_once(_added_otherwise(pair.inline, trial, 2.0**-52)) for trial in range(_TRIALS))
    runs = itertools.chain(
        (pair.run(pair.old, near) for step in (2.0**-50, 2.0**-52) for near in _shaken(args, step, _MORE)),
        (pair.run(pair.old, args, inline=otherwise) for otherwise in added),
    )
    for outs in runs:
        noise = max(noise, *(_furthest(outs[i], want[i]) / scale for i in group))
    if gap > allowed + _SHAKEN * moved + _NOISE * noise:
        raise Wrong(f"{name} differs by {gap:.2g} at {draw} inputs (allowed {allowed:.0e}, shaken {moved:.1g})")
    pair.shaken += 1


def _shaken(args: Sequence[np.ndarray], step: float, trials: int = _TRIALS) -> Iterator[list[np.ndarray]]:
    """The arguments, each off by at most a share `step` of itself; zeros stay zeros."""
    rng = np.random.default_rng(0)
    for _ in range(trials):
        yield [a * (1 + step * rng.uniform(-1, 1, a.shape)) if a.dtype.kind == "f" else a for a in args]


def _furthest(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference; infinite where one is finite and the other is not."""
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)):
        return np.inf
    return float(np.max(np.abs(got[finite] - want[finite]), initial=0.0))


def _no_worse(pair: Pair, want: list, before: list, after: list, where: str) -> None:
    """Raises Wrong where `after` is more than twice as far from `want` as `before`, and out of tolerance."""
    row = tolerance(pair.coarse, 128)
    allowed = max(row.atol + row.rtol, EXACT["float64"])
    arrays = [_judged(pair, *three) for three in zip(want, before, after, strict=True)]
    scales = _scales(pair, [w for w, _, _ in arrays], _SMALL)
    for index, ((w, b, a), scale) in enumerate(zip(arrays, scales, strict=True)):
        old, new = _furthest(b, w) / scale, _furthest(a, w) / scale
        if np.isinf(old) or new <= allowed + _GROWTH * old or _is_of_nan(pair, want, pair.names[index]):
            continue
        # The worst of several roundings, for one may be lucky; a compiled program is a rounding of its own.
        worst = _worst(pair, index, scale)
        old, new = worst if where == "rounded" else (max(old, worst[0]), new)
        growth = _GROWTH if old < _LOST else _GROWTH_LOST
        further = new > allowed + growth * old and new > _moved(pair, index, w, scale)
        if further and _is_no_luck(pair, index):
            raise Wrong(f"{pair.names[index]} is {new:.2g} from float64 {where}, the original {old:.2g}")
        pair.shaken += 1


def _moved(pair: Pair, index: int, want: np.ndarray, scale: float) -> float:
    """How far the original itself goes, in float64, when normal inputs are off by a rounding: a tie, say. Of what is judged."""
    near = _shaken(pair.arguments("normal"), _TIE[pair.coarse], _MORE)
    judged = (np.where(np.isnan(want), np.nan, pair.run(pair.old, moved)[index]) for moved in near)
    return max(_furthest(got, want) / scale for got in judged)


def _is_no_luck(pair: Pair, index: int) -> bool:
    """Whether the fused form is further off at most inputs, too: of one draw a rounding may be lost in a sum that cancels, or not."""
    errors = []
    for args in _shaken(pair.arguments("normal"), 0.5, _MORE):
        want = pair.run(pair.old, args)[index]
        rounded = (pair.run(j, args, rounded=True)[index] for j in (pair.old, pair.new))
        want, before, after = _judged(pair, want, *rounded)
        errors.append([_furthest(before, want), _furthest(after, want)])
    old, new = np.median(errors, axis=0)
    return not new <= _GROWTH * old


def _judged(
    pair: Pair, want: np.ndarray, before: np.ndarray, after: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three, NaN where rounding makes the original overflow: there no number is worse, and everywhere else one may be."""
    lost = (np.isfinite(want) | pair.blind | pair.noted) & ~np.isfinite(before)
    return np.where(lost, np.nan, want), np.where(lost, np.nan, before), np.where(lost, np.nan, after)


def _worst(pair: Pair, index: int, scale: float) -> tuple[float, float]:
    """The largest errors of both forms, rounded, over shaken normal inputs; the original's also with its gradients added otherwise."""
    old = new = 0.0
    for trial, args in enumerate(_shaken(pair.arguments("normal"), _NEARBY[pair.coarse])):
        want = pair.run(pair.old, args)[index]
        added = traced_once(_added_otherwise(pair.inline, trial, _UNIT[pair.coarse]))
        other = _judged(pair, want, *(pair.run(pair.old, args, rounded=True, inline=added)[index],) * 2)
        old = max(old, _furthest(other[1], other[0]) / scale)
        rounded = (pair.run(j, args, rounded=True)[index] for j in (pair.old, pair.new))
        want, before, after = _judged(pair, want, *rounded)
        old, new = max(old, _furthest(before, want) / scale), max(new, _furthest(after, want) / scale)
    return old, new


def _added_otherwise(inline: Any, seed: int, step: float) -> Any:
    """`inline`, and each sum of two terms of a gradient off by what their rounding may be.

    Of (c - c) + a and (c + a) - c only the first is exact where c is large. Which of them JAX writes hangs on the order in which the
    program reads a value, and a fused op reads all of its operands at once: no fault of its own.
    """
    rng = np.random.default_rng(seed)

    def known(eqn: Any) -> Any:
        if eqn.primitive.name != "add_any" or not is_float(eqn.outvars[0].aval.dtype):
            return inline(eqn)
        noise = jnp.asarray(step * rng.uniform(-1, 1, eqn.outvars[0].aval.shape), eqn.outvars[0].aval.dtype)
        return lambda a, b: [a + b + noise * (jnp.abs(a) + jnp.abs(b))]

    return known


def _compiled(pair: Pair, args: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Both forms compiled, in the program's own dtypes: `fl.fuse` of the function as a user would run it."""
    program, count = pair.program, len(pair.program.params)
    floats = [i for i, p in enumerate(program.params) if p.dtype != "bool"] if program.differentiable else []
    dtypes = [p.dtype for p in program.params] + [o.dtype for o in pair.cotangents]
    given = [jnp.asarray(a, d) for a, d in zip(args, dtypes, strict=True)]
    forms = []
    for f in (program.fn, fl.fuse(program.fn)):
        whole = _with_gradients(transformed(f, program.outer), floats, count)
        run = jax.jit(whole, compiler_options=QUICK)
        try:
            outs = run(*given)
        except ValueError as error:  # a product that no backend here has, as one of float16 that is summed in float32
            if forms or "not supported" not in str(error):
                raise
            raise CannotEvaluate(str(error)) from error
        forms.append(pair.of_interest(outs, args))
    return forms[0], forms[1]
