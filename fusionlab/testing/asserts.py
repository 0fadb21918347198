"""The assertions. They are plain functions, for any test runner; the pytest fixture `fusionlab` has them as methods.

Assertions on findings trace the function and run nothing, so example arguments may be `jax.ShapeDtypeStruct`s.
"""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..device import Device
from ..errors import REJECTIONS, ArgumentError, unknown_name
from ..evidence.instruments.device_clock import NAME as DEVICE_TIME
from ..evidence.instruments.timing import Timing, Verdict
from ..fusers import Candidate, Findings, Rejection, registry
from ..fusers.report.findings import RUNS_UNDER_GRAD
from ..tracebacks import own_lines_hidden
from ..verbs import comparison, lab
from .messages import FusionAssertionError, nearest, nearest_lines, site_lines, sources_of, survivor_lines
from .survivors import ACTIVATION_KINDS, CONCEPTS, Survivor, survivors

MARGIN = 0.05  # how much slower is still not slower: two compilations of one function differ by up to 3 %


@dataclass(frozen=True)
class Asserted:
    """The subject of an assertion: a function at its example arguments, searched by passes for a device.

    Attributes:
      fn: the function, as for `jax.jit`; not one that is already fused.
      args, kwargs: example arguments.
      passes, device, implementation: as for `fusionlab.find`.
      static_argnums, static_argnames: as in `jax.jit`.
      on_found: called with the findings of each search.

    Raises:
      ArgumentError: `args` is not a tuple or list, or `fn` is already fused.
    """

    fn: Callable
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    passes: Any = None
    device: Any = None
    implementation: str | None = None
    static_argnums: int | Sequence[int] = ()
    static_argnames: str | Iterable[str] = ()
    on_found: Callable[[lab.Findings], None] | None = None

    def __post_init__(self) -> None:
        __tracebackhide__ = True
        if not isinstance(self.args, tuple | list):
            kind = type(self.args).__name__
            raise ArgumentError(f"args: got {kind}, needed a tuple of the function's arguments; (x,) for one")
        if isinstance(self.fn, lab.Fused):
            raise ArgumentError(f"fn: got {self.fn!r}, which is already fused; pass the original function")
        object.__setattr__(self, "kwargs", dict(self.kwargs or {}))

    @property
    def name(self) -> str:
        fn = self.fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        return getattr(fn, "__name__", type(fn).__name__)

    @property
    def static(self) -> dict[str, Any]:
        """The static arguments that were named, for calls that otherwise detect them."""
        named = {"static_argnums": self.static_argnums, "static_argnames": self.static_argnames}
        return {key: value for key, value in named.items() if value != ()}

    def find(self) -> lab.Findings:
        """As `fusionlab.find`, but keyword arguments of the function may have the names of options."""
        graph = lab.trace(self.fn, *self.args, **self.static, **self.kwargs)
        found = lab.find(graph, passes=self.passes, device=self.device, implementation=self.implementation)
        if self.on_found is not None:
            self.on_found(found)
        return found

    def fuse(self) -> lab.Fused:
        return lab.fuse(self.fn, passes=self.passes, implementation=self.implementation, **self.static)


def fused_counts(found: Findings) -> dict[str, int | str]:
    """`Findings.counts()` of the fused sites: those left as they are on this device do not count."""
    chosen = found.select()
    counts: dict[str, int | str] = {}
    for name, count in found.counts().items():
        if name in found.passes:
            counts[name] = sum(c.pass_name == name for c in chosen)
        else:
            mine = [c for c in chosen if f"{c.pass_name}_grad" == name]
            counts[name] = count if count == RUNS_UNDER_GRAD else sum(_with_backward(c) for c in mine)
    return counts


def _with_backward(site: Candidate) -> bool:
    return site.backward is not None and site.backward.is_fused


@own_lines_hidden
def assert_fused(
    fn: Callable,
    args: Sequence[Any] = (),
    *,
    expect: Mapping[str, int | str] | None = None,
    survive: Mapping[str, int] | None = None,
    **options: Any,
) -> lab.Findings:
    """Asserts how many sites of a function each pass fuses, and what remains outside them.

    Args:
      fn, args: the function and its example arguments, arrays or `jax.ShapeDtypeStruct`s of any shape and dtype, in any pytrees.
      expect: pass -> exact number of sites that `fusionlab.fuse` would replace; passes not named are not checked. In an already
        differentiated program, "<pass>_grad" counts the sites fused with their backward passes. An activation or a concept
        ("relu", "attention_causal"; see `survive`) counts the sites of any pass that contain it.
      survive: name -> exact number of occurrences outside the fused ops: of an activation ("relu", in any spelling), a concept
        ("linear", "attention", "layer_norm", "softmax", ...) or a primitive ("dot_general"); see `survivors.survivors`.
      **options: `kwargs` (the function's keyword arguments), `passes`, `device` (also a simulated one, "sm_90"), `implementation`,
        `static_argnums` and `static_argnames`, as for `fusionlab.find`.

    Returns:
      The findings.

    Raises:
      FusionAssertionError: a count differs; the message shows the nearest miss with its line and edit.
      UnknownNameError: a name in `expect` is neither a requested pass nor a concept, or a name in `survive` cannot survive.
      ArgumentError: neither `expect` nor `survive` is given, or `args` is not a tuple. TraceError: the function does not trace.
    """
    __tracebackhide__ = True
    if not expect and not survive:
        raise ArgumentError("assert_fused: got neither expect nor survive, needed a count to assert")
    call = Asserted(fn, args, **options)
    found = call.find()
    expect, survive = expect or {}, survive or {}
    counts = _counts(found, expect)
    wrong = {name: n for name, n in expect.items() if counts[name] != n}
    after = found.apply() if survive else found.graph
    left = {name: (n, survivors(found, after, name)) for name, n in survive.items()}
    odd = {name: (n, stay) for name, (n, stay) in left.items() if len(stay) != n}
    if wrong or odd:
        differences = [f"{name}: {_count_text(counts[name])}, expected {n}" for name, n in wrong.items()]
        differences += [f"{name}: {len(stay)} not fused, expected {n}" for name, (n, stay) in odd.items()]
        lines = [f"{call.name}: {'; '.join(differences)}", *_count_lines(found, wrong, counts, odd)]
        raise FusionAssertionError("\n".join(lines), found)
    return found


def _counts(found: lab.Findings, names: Iterable[str]) -> dict[str, int | str]:
    """The number of fused sites, by pass and by the named concepts."""
    __tracebackhide__ = True
    counts = fused_counts(found)
    concepts = (ACTIVATION_KINDS | CONCEPTS | set(found.concepts())) - set(registry())
    for name in names:
        if name not in counts and name not in concepts:
            raise unknown_name("pass or concept in expect", name, {*counts, *concepts})
        counts.setdefault(name, sum(name in c.concepts for c in found.select()))
    return counts


def _count_text(count: int | str) -> str:
    return f"{count} fused" if isinstance(count, int) else count


def _count_lines(
    found: lab.Findings,
    wrong: Mapping[str, int | str],
    counts: Mapping[str, int | str],
    odd: Mapping[str, tuple[int, list[Survivor]]],
) -> list[str]:
    """The lines below the headline: the surplus sites, and the reasons for missing ones."""
    extra = [name for name, n in wrong.items() if isinstance(n, int) and _as_int(counts[name]) > n]
    lines = [line for name in extra for line in (f"fused by {name}:", *site_lines(_sites_of(found, name)))]
    stay = [s for n, left in odd.values() if len(left) > n for s in left]
    lines += ["not fused:", *survivor_lines(stay)] if stay else []
    lacking = [name.removesuffix("_grad") for name in wrong if name not in extra]
    return [*lines, *_lacking_lines(found, lacking, stay)] if lacking or stay else lines


def _sites_of(found: Findings, name: str) -> list[Candidate]:
    """The fused sites of a pass (also by the name of its gradient) or of a concept."""
    return [c for c in found.select() if c.pass_name == name.removesuffix("_grad") or name in c.concepts]


def _lacking_lines(found: lab.Findings, lacking: Sequence[str], stay: Sequence[Survivor]) -> list[str]:
    """The nearest misses of passes and concepts that fuse too little, and the backward passes that are left as they are."""
    concepts = [name for name in lacking if name not in found.passes]
    stays = (p for p in found.pairs if p.stays and p.site.partition("@")[0] in lacking)
    backward = [f"  backward: {p.text}" for p in stays]
    return [*nearest_lines(found, nearest(found, lacking, concepts, stay)), *backward[:3]]


def _as_int(count: int | str) -> int:
    return count if isinstance(count, int) else 0


@own_lines_hidden
def assert_rejected(
    fn: Callable,
    args: Sequence[Any] = (),
    *,
    code: str,
    pass_: str | None = None,
    at: str | None = None,
    count: int | None = None,
    **options: Any,
) -> tuple[Rejection, ...]:
    """Asserts that a site of a function is declined, and for which reason.

    Args:
      fn, args: as for `assert_fused`.
      code: the reason, a key of `fusionlab.errors.REJECTIONS`.
      pass_: the pass that declines it; None for any.
      at: the place: a site's id or scope ("encoder/mlp"), or a line ("model.py:12"), as the findings print them; None for anywhere.
      count: how many; None for one or more.
      **options: as for `assert_fused`.

    Returns:
      The rejections.

    Raises:
      FusionAssertionError: there is none, or a different number; the message lists what was declined instead.
      UnknownNameError: a code or a pass that does not exist. ArgumentError, TraceError: as for `assert_fused`.
    """
    __tracebackhide__ = True
    if code not in REJECTIONS:
        raise unknown_name("rejection code", code, REJECTIONS)
    call = Asserted(fn, args, **options)
    found = call.find()
    if pass_ is not None and pass_ not in found.passes:
        raise unknown_name("pass", pass_, found.passes)
    asked = [r for r in found.rejections if _is_asked(found, r, pass_, at)]
    same = tuple(r for r in asked if r.code == code)
    if same and count in (None, len(same)):
        return same
    headline = f"{call.name}: expected {_wanted(code, pass_, at, count)}, got {len(same) or 'none'}"
    fused = [c for c in found.select() if _is_asked(found, c, pass_, at)]
    raise FusionAssertionError("\n".join([headline, *_instead_lines(found, fused, asked, code)]), found)


def _is_asked(found: lab.Findings, item: Candidate | Rejection, pass_: str | None, at: str | None) -> bool:
    """Whether a site belongs to a pass and is at a place; None for any pass, and for anywhere."""
    return pass_ in (None, item.pass_name) and at in (None, item.id, item.scope, *map(str, sources_of(found, item)))


def _wanted(code: str, pass_: str | None, at: str | None, count: int | None) -> str:
    """The expectation of `assert_rejected`, in words."""
    by, where = f" by {pass_}" if pass_ else "", f" at {at}" if at else ""
    return f"{'a site' if count is None else count} declined [{code}]{by}{where}"


def _instead_lines(found: lab.Findings, fused: Sequence[Candidate], asked: Sequence[Rejection], code: str) -> list[str]:
    """The lines for a missing rejection: the sites fused or declined at the place, those declined for the code, or any declined."""
    lines = ["fused:", *site_lines(fused)] if fused else []
    others = asked or [r for r in found.rejections if r.code == code] or found.rejections
    return [*lines, *nearest_lines(found, others)] if others or not fused else lines


@own_lines_hidden
def assert_equivalent(
    fn: Callable,
    args: Sequence[Any] = (),
    *,
    fused: Callable | None = None,
    grad: bool = True,
    argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> comparison.Comparison:
    """Asserts that the fused function computes the same as the original: every output and gradient, compared with float64.

    A result passes if it is within tolerance of the same program in float64 (by dtype and reduction size, see
    `fusionlab.testing.tolerances`) or at most twice as far from it as the original, and if it has no new NaN or infinity.

    Args:
      fn: the original.
      args: arrays of any shape and dtype, in any pytrees; both are run on them.
      fused: the function to check; None is `fusionlab.fuse(fn)`.
      grad: also compare the gradients of a random weighting of all float outputs.
      argnums: the arguments to differentiate by; None is every float leaf.
      **options: as for `assert_fused`; `device` is not used: the functions run here.

    Returns:
      The comparison: `.numerics` has every error.

    Raises:
      FusionAssertionError: a result is worse than the original's, or there is no float64 reference.
      ArgumentError: shapes where arrays are needed. SideEffectError: the function prints or calls back. TraceError: it does not trace.
    """
    __tracebackhide__ = True
    call = Asserted(fn, args, **options)
    other = call.fuse() if fused is None else fused
    found = replace(call, device=None).find() if fused is None else None
    given = call.static | ({} if argnums is None else {"argnums": argnums})
    evidence = comparison.compare(fn, other, *args, grad=grad, timing=False, memory=False, **given, **call.kwargs)
    if evidence.numerics is None:
        raise FusionAssertionError(f"{call.name}: nothing to compare: {'; '.join(evidence.notes)}", found, evidence)
    bad = evidence.numerics.regressions
    if bad:
        n = len(evidence.numerics.leaves)
        lines = [f"{call.name}: {len(bad)} of {n} outputs and gradients are worse than the original's"]
        lines += [f"  {leaf}" for leaf in bad[:3]] + ([f"  and {len(bad) - 3} more"] if len(bad) > 3 else [])
        raise FusionAssertionError("\n".join([*lines, *_fused_lines(found)]), found, evidence)
    return evidence


def _fused_lines(found: lab.Findings | None) -> list[str]:
    """The sites that are fused by default; none if there are no findings."""
    fusing = found.select() if found is not None else ()
    return ["fused:", *site_lines(fusing)] if fusing else []


@own_lines_hidden
def assert_not_slower(
    fn: Callable,
    args: Sequence[Any] = (),
    *,
    fused: Callable | None = None,
    grad: bool = False,
    margin: float = MARGIN,
    samples: int = 40,
    budget_s: float = 60.0,
    **options: Any,
) -> comparison.Comparison:
    """Asserts that the fused function takes no longer than the function under `jax.jit`, in device time on a GPU.

    It fails only if the whole 95 % interval of the ratio before/after lies below 1 - margin, so that noise fails no test. Without
    a GPU, without device time, or with too few samples, the test is skipped with that reason.

    Args:
      fn, args, fused: as for `assert_equivalent`.
      grad: also check value and gradient.
      margin: in [0, 1): the slowdown that still passes; two compilations of one function differ by up to 0.03.
      samples, budget_s: of each, and seconds; at least 40 samples for a verdict.
      **options: as for `assert_fused`; `device` is not used: the functions run here.

    Returns:
      The comparison.

    Raises:
      FusionAssertionError: it is slower. unittest.SkipTest: it cannot be measured here.
      ArgumentError: a margin outside [0, 1), shapes where arrays are needed. SideEffectError, TraceError: as for `assert_equivalent`.
    """
    __tracebackhide__ = True
    if not 0 <= margin < 1:
        raise ArgumentError(f"margin: got {margin}, needed a share of the time from 0 to below 1")
    call = Asserted(fn, args, **options)
    here = Device.current()
    if here.platform != "cuda":
        raise unittest.SkipTest(f"assert_not_slower needs a CUDA GPU for device time; this process runs on {here}")
    other = call.fuse() if fused is None else fused
    found = replace(call, device=None).find() if fused is None else None
    effort = {"samples": samples, "budget_s": budget_s, **call.static}
    evidence = comparison.compare(fn, other, *args, grad=grad, numerics=False, memory=False, **effort, **call.kwargs)
    if evidence.same_code:
        return evidence
    slow = [t for t in evidence.timings if judged(t).interval[1] < 1 - margin]
    if slow:
        lines = [f"{call.name}: slower than under jax.jit by more than {margin:.0%}", *(f"  {t}" for t in slow)]
        raise FusionAssertionError("\n".join([*lines, *_fused_lines(found)]), found, evidence)
    return evidence


def judged(timing: Timing) -> Timing:
    """A timing that allows a verdict.

    Raises:
      unittest.SkipTest: wall time, or too few samples.
    """
    if timing.clock != DEVICE_TIME:
        raise unittest.SkipTest(f"assert_not_slower needs device time, got {timing.clock}: one device, and CuPy")
    if timing.verdict == Verdict.INCONCLUSIVE:
        raise unittest.SkipTest(f"assert_not_slower: {timing.text}")
    return timing
