"""Pass `layer_norm`: LayerNorm and RMSNorm, with a scale and a bias or without -> one `layer_norm` op. Where a kernel runs it, a residual
and a vector added right before it are folded in; if the sum is read elsewhere too, the op returns it as well. Norms of groups of
channels become one `group_norm` op (`group_norms.py`).

The anchor is a root (or a power) of a mean of squares. The nodes between the normalised value and the results get a view of their own
(`View.over`), so that neither a factor of x nor the product that computes it is mixed with the norm's own. There every coefficient must
be the example's; 1/N is captured and must match the size of the axis that is summed over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp

from ....graph.canonical.rules import is_jax_rule
from ....graph.declined import Declined
from ....graph.dtypes import is_float, narrows
from ....graph.matching.match import Match, Miss, close, match
from ....graph.matching.pattern import Example, pattern_of
from ....graph.matching.region import CASTS, Region, cut, escapes, widens
from ....graph.program.ir import Node, Value
from ....graph.program.order import waits_for_itself
from ....graph.program.scopes import in_backward
from ....kernels import OPS
from ...engine.base import Pass, Search, Substitution
from ...engine.layout import AxisClasses, arrange, axes_of, input_positions, ordered_classes, present, restore
from ...engine.outcomes import Candidate, Rejection, in_turn, or_else, with_concepts
from ...engine.proposing import propose
from ...engine.wording import anchor_text
from .examples import EXAMPLES, NEAR, PLAIN_NORM
from .group_norms import GroupSite
from .misses import BY_COUNT, NormSite
from .summands import Summands, summands_of
from .surroundings import ROOTS, ChannelGroups, Surroundings, as_written, reduced_axes

_LENGTH = "is the root of a sum of squares, not of their mean: it divides x by its length, where a norm divides x by its root mean square"
_ROOT_EDIT = "add epsilon to the mean of the squares itself, not to the square of its root"
_OWN_RULE = "has a derivative of the user's own, which a fused norm would replace"
# Primitive -> rejection code, what it does, edit.
_HELD = {
    "stop_gradient": (
        "stop_gradient",
        "stops a gradient inside the norm; the fused op propagates the full gradient of mean and variance",
        "remove the stop_gradient if the full gradient is meant",
    ),
    "name": (
        "named_residual",
        "names a value inside the norm, which a remat policy may ask for",
        "name x or the norm's result instead, with jax.ad_checkpoint.checkpoint_name",
    ),
    "custom_jvp_call": ("custom_rule", _OWN_RULE, None),
    "custom_vjp_call": ("custom_rule", _OWN_RULE, None),
}


class LayerNormPass(Pass):
    """See the module docstring."""

    name = op = "layer_norm"
    formula = "(x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias, or x / sqrt(mean(x^2) + epsilon) * scale + bias"
    needs = (
        "mean and variance over the same axis (any single axis, or the last several); epsilon inside the root and below 0.01; the "
        "statistics read only by the norm; f64/f32/bf16/f16"
    )
    summary = "Replaces a LayerNorm or an RMSNorm, with or without scale and bias, by one op; a GroupNorm by fl.ops.group_norm."
    spellings = (
        "The variance may be spelled in any way. The norm may be written as a scale and a shift of x.",
        "Scale and bias may have another dtype than x.",
        "Where the kernel runs, the op also adds up the residual or the vector that x is a sum with, and returns the sum if something else "
        "reads it (fl.ops.layer_norm_and_sum).",
        "A GroupNorm may have images of any number of axes, with channels last as in Flax, Haiku and Keras. A reshape may split the groups "
        "anywhere before and merge them anywhere after. Its scale, its bias and a SiLU that follows are part of the op.",
    )
    default = (
        "On for sm_90. Its kernels run for 2^20 elements or more, in rows of up to 16,384 forward and 8,192 backward. Elsewhere a norm "
        "keeps XLA's code unless the pass is named: on a CPU XLA's code was measured as fast."
    )
    codes = ("axes", "scalar", "structure")
    primitives = ROOTS

    def sample(self) -> tuple[Any, tuple[Any, ...]]:
        def norm(x: Any, scale: Any, bias: Any) -> Any:
            centred = x - x.mean(-1, keepdims=True)
            return centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias

        return norm, (jnp.zeros((8, 16)), jnp.zeros(16), jnp.zeros(16))

    def is_anchor(self, node: Node) -> bool:
        return super().is_anchor(node) and is_float(node.outputs[0].dtype)

    def anchors(self, search: Search) -> Iterator[tuple[Node, set[int]]]:
        """The anchors, with the results of the norms that were found before each."""
        return zip(self.possible_anchors(search), itertools.repeat(set[int]()))

    def examine(self, search: Search, anchor: Node, norm_results: set[int]) -> Candidate | Rejection | None:
        around = Surroundings(search, anchor)
        if not around.is_norm:
            return None
        site = _NormSite(self, search, anchor, around, norm_results)
        outcome = site.attempt(site.examine)
        if isinstance(outcome, Candidate):
            norm_results.add(outcome.root.id)
        return outcome


class _NormSite(NormSite):
    """One norm, from anchor to candidate or rejection."""

    def __init__(
        self, pass_: LayerNormPass, search: Search, anchor: Node, around: Surroundings, norm_results: Collection[int]
    ) -> None:
        super().__init__(pass_, search, anchor)
        self.view, self.around, self.norm_results = around.view, around, norm_results
        self.x = {"x": self.nid(around.x)}  # for the matcher: the leaf x is x, and nothing made of it

    def examine(self) -> Candidate | Rejection:
        """The candidate with the furthest result; else the rejection of the furthest match; else the nearest miss."""
        if not self.around.is_mean:
            edit = "take the mean of the squares, jnp.mean, if that is meant"
            self.decline("scalar", f"{anchor_text(self.anchor)} {_LENGTH}", edit=edit)
        of_groups = self.of_groups()
        if isinstance(of_groups, Candidate):
            return of_groups
        results = self.own_results()
        outcome = self.furthest(results, of_groups)
        if outcome is not None:
            return outcome
        self.check_near()
        self.check_even()
        self.check_held()
        self.check_transposed()
        self.check_shifted()
        return self.missed(self.nearest(results))

    def of_groups(self) -> Candidate | Rejection | None:
        """The outcome for a norm of groups of channels; None if this is not one."""
        channels = ChannelGroups.of(self.around)
        if channels is None:
            return None
        problem: Rejection | None = None
        site = GroupSite(self.pass_, self.search, self.anchor, self.around, channels)
        for outcome in site.outcomes():
            if isinstance(outcome, Candidate):
                return outcome
            problem = problem or outcome
        return problem or self.grouped(channels, site.odd)

    def own_results(self) -> list[Value]:
        """The values that may be the norm's result: they have the dtype of x, and casts of them stay outside."""
        around = self.around
        wide = (v for v in around.results if not narrows(v.dtype, around.x.dtype))
        return [v for v in wide if not (self.is_widened(v) or self.is_cast_for_reader(v))]

    def furthest(self, results: Sequence[Value], problem: Rejection | None) -> Candidate | Rejection | None:
        """The candidate with the furthest result, else the `problem`, else the rejection of the furthest match; None if nothing matches."""
        paired: Candidate | None = None  # the furthest that may be fused with its backward pass, if with nothing less
        for value in results:
            found = self.matched(value)
            if found is None:
                continue
            outcome = self.named(self.attempt(self.candidate, found, value), found.pattern.example)
            if isinstance(outcome, Rejection):
                problem = problem or outcome
            elif not outcome.alternatives:
                return outcome if paired is None else or_else(paired, outcome)
            else:
                paired = paired or outcome
        return paired or problem

    def rejection(self, *args: Any, **options: Any) -> Rejection:
        """As for any site, with the nodes where the root meets x, however far a match got."""
        rejection = super().rejection(*args, **options)
        return replace(rejection, site_ids=rejection.site_ids | {n.id for n in self.around.quotients[:1]})

    def named(self, outcome: Candidate | Rejection, example: Example) -> Candidate | Rejection:
        """The outcome with the norm's name as a concept, unless a number, its readers or its axes make it another function."""
        another = outcome.code in ("scalar", "structure", "value") if isinstance(outcome, Rejection) else False
        if another or (isinstance(outcome, Rejection) and outcome.code == "axes" and self.over_batch()):
            return outcome
        return with_concepts(outcome, _concepts(example))

    def over_batch(self) -> bool:
        """Whether the statistics are taken over the first axis and not over the last, as a batch norm's are."""
        axes = [reduced_axes(n, self.around.x) for n in self.around.sums_of_x]
        return any(0 in a and len(self.around.x.shape) - 1 not in a for a in axes)

    def is_widened(self, value: Value) -> bool:
        """Whether a value is only another result in a dtype wider than that of x."""
        maker = self.search.block.producer.get(value.id)
        source = maker.inputs[0] if maker is not None and widens(maker) else None
        return isinstance(source, Value) and source.dtype == self.around.x.dtype and source in self.around.results

    def is_cast_for_reader(self, value: Value) -> bool:
        """Whether a value is another result cast for one of its several readers; the cast then belongs to the reader, not to the norm."""
        maker = self.search.block.producer.get(value.id)
        if maker is None or maker.primitive not in CASTS or maker.inputs[0] not in self.around.results:
            return False
        return sum(not in_backward(u) for u in self.users(maker.inputs[0])) > 1

    def matched(self, value: Value) -> Match | None:
        ref = self.view.ref[value.id]
        fit = (e for e in EXAMPLES if close(ref.coef, 1.0) and e.fits(self.view, ref.nid))
        found = (match(pattern_of(example), self.view, ref.nid, self.x) for example in fit)
        return next((m for m in found if isinstance(m, Match)), None)

    def nearest(self, values: Sequence[Value]) -> Miss:
        """The miss that comes furthest, of any example at any of these values; failing that, of the plainest example at the furthest."""
        pairs = ((e, self.view.ref[v.id]) for v, e in itertools.product(values, EXAMPLES))
        ending = (e for e in pairs if close(e[1].coef, 1.0) and e[0].ends_in(self.view, e[1].nid))
        found = (match(pattern_of(example), self.view, ref.nid, self.x) for example, ref in ending)
        misses = [miss for miss in found if isinstance(miss, Miss)]
        if misses:
            return max(misses, key=lambda miss: miss.matched)
        value = self.around.results[0] if self.around.results else self.anchor.outputs[0]
        plainest = match(pattern_of(PLAIN_NORM), self.view, self.nid(value), self.x)
        assert isinstance(plainest, Miss)
        return plainest

    def check_near(self) -> None:
        """Declines a function known to be a near miss of a norm."""
        for near, value in itertools.product(NEAR, self.around.results):
            nid = self.nid(value)
            for example in near.examples:
                fits = example.fits(self.view, nid)
                if fits and isinstance(match(pattern_of(example), self.view, nid, self.x), Match):
                    sentence = f"{anchor_text(self.anchor)} {near.problem}"
                    self.decline("structure", sentence, edit=near.edit, concepts=_concepts(example))

    def check_even(self) -> None:
        """Declines sums of x over different axes."""
        sums = [(n, reduced_axes(n, self.around.x)) for n in self.around.sums_of_x]
        for total, axes in sums:
            first, wanted = sums[0]
            if axes != wanted:
                over = f"{anchor_text(total)} sums over axes {axes} and {anchor_text(first)} over {wanted}"
                edit = "take the mean and the variance over the same axes"
                self.decline("axes", f"{over}; a norm takes all its statistics over the same axes", [total], edit=edit)

    def check_held(self) -> None:
        """Declines a node inside the norm with a meaning that the fused op does not have."""
        for primitive, (code, problem, edit) in _HELD.items():
            node = self.around.first(primitive)
            if node is not None and not is_jax_rule(node):
                self.decline(code, f"{anchor_text(node)} {problem}", [node], edit=edit)

    # -- the candidate --------------------------------------------------------------------------------------------

    def candidate(self, found: Match, root: Value) -> Candidate | Rejection:
        region = cut(self.view, root, found.leaves, through_casts=frozenset(found.leaves))
        if self.anchor not in region.nodes:
            raise Declined("the root of the variance is not part of the site")
        self.check_scalars(found)
        self.check_dtypes(region)
        edit = "compute the outside use from x again"
        plain = self.unless_read(region, edit, lambda: self.proposed(found, region))
        return self.with_summands(plain, found, region)

    def with_summands(self, plain: Candidate | Rejection, found: Match, region: Region) -> Candidate | Rejection:
        """The site with the sum right before it, where a kernel runs it; unchanged if that is not possible."""
        # Where the norm is XLA's own code, XLA fuses additions with it by itself.
        if not _has_kernel(plain):
            return plain
        summands = self.summands(found, region)
        if summands is None:
            return plain
        leaks = escapes(summands.joined_to(region))
        # A site of several results is not fused with its backward pass: that is for who reads the sum there to allow.
        gives_sum = bool(leaks) and not self.search.differentiated
        wide = summands.joined_to(region, (region.leaves["x"],) if gives_sum else ())
        if gives_sum and not _stands_alone(wide):
            return plain
        outcome = self.proposed(found, wide, summands)
        if not _has_kernel(outcome):
            return plain
        return replace(outcome, plain=plain, alternatives=in_turn([plain]) if leaks and not gives_sum else ())

    def summands(self, found: Match, region: Region) -> Summands | None:
        """The sum that makes x right before the norm, in the dtype of its result; None if there is none."""
        x = region.leaves["x"]
        if x.dtype != region.root.dtype:
            return None
        axes = axes_of(found, self.view, found.leaf_id("x"), x)
        features = ordered_classes(axes, found.letters["n"])
        feature = axes.index(features[0]) if len(features) == 1 else None
        return summands_of(self.search.block, x, feature, self.norm_results)

    def proposed(self, found: Match, region: Region, summands: Summands | None = None) -> Candidate | Rejection:
        plan = self.attempt(self.plan, found, region, summands)
        if isinstance(plan, Rejection):
            return plan
        outcome = propose(self.search, self.pass_.name, region, plan, self.anchor, self.notes(region))
        # A root that is squared again is the number under it, with a gradient of NaN at 0.
        squared = isinstance(outcome, Rejection) and outcome.code == "gradient"
        return replace(outcome, edit=_ROOT_EDIT) if squared else outcome

    def plan(self, found: Match, region: Region, summands: Summands | None) -> Substitution:
        """Takes x (and a residual) unchanged if one axis is normalised over, else [*R, N] with the last axes merged; the vectors [N].

        Raises:
          Declined: it normalises over several axes that are not the last ones.
        """
        sizes, x = found.sizes, summands.nodes[0].outputs[0] if summands else region.leaves["x"]
        own = {n: region.leaves[n] for n in found.leaves} | {"x": x}
        axes: dict[str, AxisClasses] = {n: axes_of(found, self.view, found.leaf_id(n), v) for n, v in own.items()}
        features = ordered_classes(axes["x"], found.letters["n"])
        groups = _groups(present(axes["x"]), features)
        if groups is None:
            over = tuple(i for i, c in enumerate(axes["x"]) if c in features)
            sentence = f"it normalises over axes {over} of {list(x.shape)}; several axes must be the last ones for the fused op"
            edit = "move the normalised axes to the end first, with jnp.moveaxis"
            self.decline("axes", f"{anchor_text(self.anchor)}: {sentence}", edit=edit, site=region.nodes)
        where, direct = input_positions(region), len(features) == 1
        root_axes = axes_of(found, self.view, found.pattern.root, region.root)
        dtype = region.root.dtype

        def whole(name: str, inputs: Sequence[Any]) -> Any:
            if name not in where:
                return None
            given = inputs[where[name]].astype(dtype)
            return given if direct else arrange(given, axes["x"], groups, sizes)

        def operands(*inputs: Any) -> tuple[Any, ...]:
            vectors = (
                arrange(inputs[where[n]], axes[n], [features], sizes) if n in where else None for n in ("scale", "bias")
            )
            shift = inputs[where["shift"]].reshape(-1) if "shift" in where else None
            return whole("x", inputs), *vectors, shift, whole("residual", inputs)

        def finish(out: Any) -> Any:
            if not region.others:
                return restore(out, groups, root_axes, region.root.shape, sizes)
            normed, total = out
            summed = restore(total, groups, axes["x"], x.shape, sizes)
            return restore(normed, groups, root_axes, region.root.shape, sizes), summed

        op = OPS["layer_norm"]
        attrs = {
            "kind": found.pattern.example.name.partition("_")[0],
            "epsilon": as_written(found.scalars["epsilon"]),
            "axis": axes["x"].index(features[0]) if direct else -1,
            "implementation": self.search.implementation,
            **({"gives_sum": True} if region.others else {}),
        }
        there = {slot: slot in where for slot in ("scale", "bias", "shift", "residual")}
        return Substitution(op, attrs, operands, finish, op.formula(**attrs, **there))

    def check_scalars(self, found: Match) -> None:
        size = math.prod(found.sizes[c] for c in found.letters["n"])
        share, epsilon = found.scalars["1/N"], as_written(found.scalars["epsilon"])
        where = anchor_text(self.anchor)
        if not close(share, 1 / size):
            sentence = f"{where} takes a sum of {size} entries times {share:.6g}, which is not their mean (times {1 / size:.6g})"
            self.decline("scalar", sentence, edit=BY_COUNT)
        self.check_guarded(epsilon)


def _concepts(example: Example) -> tuple[str]:
    return (f"{example.name.partition('_')[0]}_norm",)


def _has_kernel(outcome: Candidate | Rejection) -> TypeGuard[Candidate]:
    """Whether the implementation is not XLA's own code."""
    return isinstance(outcome, Candidate) and outcome.backend is not None and not outcome.same_code


def _stands_alone(region: Region) -> bool:
    """Whether nothing outside reads an inner value of a region, and no leaf of it depends on one of its results."""
    return not escapes(region) and waits_for_itself(region.block, region.leaves.values(), region.roots) is None


def _groups(order: Sequence[int], features: tuple[int, ...]) -> list[list[int]] | None:
    """The classes that each axis of the op's x merges; None if it normalises over several axes that are not the last ones."""
    if len(features) == 1:
        return [[c] for c in order]
    rows = [c for c in order if c not in features]
    return [*([c] for c in rows), list(features)] if tuple(order[len(rows) :]) == features else None


PASSES = {30: LayerNormPass()}
