"""Pass `dot_product_attention`: softmax(scale * q k^T) v with its masks, biases, cap and dropout, in any layout -> one
`dot_product_attention` op. Keys and values whose heads are repeated for the queries are read before the repetition (`repeated_heads`).

The anchor is a product with an operand computed from exponentials of another product: a softmax between two products.
The spelling is read off the graph (`scores`, `forms`), masks are classified by their values (`masks`), and `plan` gives the op its
operands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ....graph.canonical.nodes import Coef
from ....graph.certify.alike import most_sizes_first
from ....graph.declined import Declined
from ....graph.dtypes import arithmetic_dtype, narrows
from ....graph.matching.match import Match, Miss, close, match
from ....graph.matching.pattern import pattern_of
from ....graph.matching.region import CASTS, Region, cut, shared_casts
from ....graph.matching.wide import wider_in
from ....graph.program.ir import Node, Value
from ...engine.base import Option, Pass, Search
from ...engine.declining import attempted
from ...engine.fully_masked_rows import NOTE, may_be_infinite, nan_test, nan_test_between
from ...engine.outcomes import Candidate, Rejection, with_concepts
from ...engine.wording import anchor_text
from .forms import Reading, Tail, tail_example, whole_example
from .masks import Masking, MaskReader
from .proposals import AttentionProposals
from .scores import NEGATED, readings
from .sinks import reason_of_logits
from .weights import exponentials, needless_changes, tails_of, weighs_a_part

MADE_OUTSIDE = "its mask is causal but computed outside the loop, so the fused op takes it as data"
_ROUNDED = "the program keeps its weights in a wider dtype until it rounds its result to {0}; the fused op may round the weights to {0} too"
_SAFE_FILL = -1e9  # above this the assumption on the scores is worth a note
_READINGS = 8  # ways to read one site's scores that are tried; sums of two products have more than one


class DotProductAttentionPass(Pass):
    """See the module docstring."""

    name = op = "dot_product_attention"
    formula = (
        "softmax(scale * q @ k.T + bias, masks, causal, local window) @ v, scale anywhere, capped or not, with a sink or without, "
        "with dropout or without, heads that share keys, any layout"
    )
    needs = "one floating dtype of 16 bits or more; softmax over the keys; attention weights read only by the product with v"
    options: ClassVar = {
        "deterministic": Option(False, "the same bits every time, gradients included: cuDNN's backward is not used")
    }
    summary = "Replaces scaled dot-product attention, from queries, keys and values to the weighted sum of the values, by one op."
    spellings = (
        "The scale may be applied to the queries, the keys or the scores, and may be a traced value. A constant scale may also be applied "
        "after masks and biases.",
        "Masks may be boolean, additive, or factors of ones and zeros; constants or data; one or several. Causal masks and local windows "
        "are detected from their values.",
        "Masks that fill with different finite scores are declined. So is a bias added after a mask, unless the mask fills with minus "
        "infinity.",
        "Any layout is recognised. Batch and heads may be merged for a part of the way, and a batch may share queries, keys or values.",
        "Operands of 16 bits may be widened before the products.",
        "Heads may share keys and values, repeated or grouped; the op reads them without a copy.",
        "The scores may be capped by a tanh. There may be a sink: one more logit for each head, whose weight is dropped.",
        "The weights may be multiplied by factors: dropout, or a weight for each head. A dropout mask of jax.random.bernoulli is generated "
        "again from its key.",
        "A query whose keys are all masked gives 0, where the program gives NaN.",
    )
    default = (
        "On. On sm_90 a site takes cuDNN's or FusionLab's kernels where they were measured faster than XLA's code. In float32, and with "
        "dropout, XLA's code was faster on an H200, and such a site keeps it. On a CPU the op runs in blocks of keys (xla_blockwise)."
    )
    codes = ("axes", "bias", "dropout", "mask", "scalar", "structure")
    primitives = ("dot_general",)

    def sample(self) -> tuple[Any, tuple[Any, ...]]:
        def attention(q: Any, k: Any, v: Any) -> Any:
            scores = jnp.einsum("bthd,bshd->bhts", q, k) * 0.25
            return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)

        q = jnp.zeros((2, 8, 2, 16))
        return attention, (q, q, q)

    def anchors(self, search: Search) -> list[tuple[Node, int, int]]:
        """The products whose weights are computed from exponentials, each with its weights and the exponentials (see `exponentials`)."""
        view, found = search.view, dict[int, tuple[int, int]]()
        nodes: list[Node] = []
        for node in self.possible_anchors(search):
            parts = exponentials(view, view.nodes[view.ref[node.outputs[0].id].nid])
            if parts is None or parts[1] in {of for _, of in found.values()} or weighs_a_part(view, node):
                continue  # the products of a backward pass read the same exponentials as their forward
            found[node.id] = parts
            nodes.append(node)
        return [(node, *found[node.id]) for node in most_sizes_first(nodes)]

    def examine(self, search: Search, anchor: Node, weights: int, exponentials: int) -> list[Candidate | Rejection]:
        return _SoftmaxSite(self, search, anchor).examined(weights, exponentials)


def _own(reason: Declined) -> Rejection:
    """The rejection in a reason. A reason without one is raised again: the place is not known to be an attention."""
    if reason.rejection is None:
        raise reason
    return reason.rejection


class _SoftmaxSite(AttentionProposals):
    """One softmax between two products, from anchor to candidate or rejection."""

    kind: str | None = None  # "unmasked", "causal" or "masked", once its masks have been read

    def examine(self, weights: int, exponentials: int) -> Candidate | Rejection:
        self.check_rule(exponentials)
        found = self.read(weights)
        if isinstance(found, Miss):
            self.check_choice(exponentials)
            self.check_logits(weights, exponentials)
            return self.missed(found)
        self.check_rows(found)
        return self.named(attempted(lambda: self.candidate(found), _own), found)

    def check_rows(self, read: Reading) -> None:
        """Declines if each row has values of its own and all rows share the keys, as in a mixture of experts."""
        found = read.match
        axes = {n: {c for (p, _), c in found.axes.items() if p == found.leaf_id(n)} for n in "qkv"}
        shared = [n for n in "qkv" if not set(found.letters["b"]) <= axes[n]]
        if shared and not found.letters["t"]:
            self.decline(
                "axes",
                f"{anchor_text(self.anchor)} weighs each row's own values by one set of scores, from keys or a query that all rows "
                "share: a mixture or a pooling; in an attention several queries read the same values",
            )

    def check_choice(self, exponentials: int) -> None:
        """Declines a choice that depends on which weights are NaN."""
        asked = nan_test_between(self.view, exponentials, self.anchor)
        if asked is not None:
            sentence = f"{anchor_text(asked)} tests the weights for NaN before {anchor_text(self.anchor)}: {NOTE}, so the test finds none"
            edit = "mask with a finite number such as -1e9, and remove the test (jnp.nan_to_num)"
            self.decline("mask", sentence, [asked], (1, 2), edit, concepts=("attention", "attention_masked"))

    def check_logits(self, weights: int, exponentials: int) -> None:
        """Declines a softmax over more than the keys."""
        reason = reason_of_logits(self.view, exponentials, weights)
        if reason is not None:
            sentence = f"{anchor_text(self.anchor)}: {reason[0]}"
            self.decline("structure", sentence, edit=reason[1], concepts=("attention",))

    def check_rule(self, exponentials: int) -> None:
        """Declines exponentials, or a whole softmax, with a derivative of the user's own."""
        if self.view.nodes[exponentials].op == "exp":
            return
        maker = self.view.maker(exponentials) or self.anchor
        sentence = f"{anchor_text(maker)} computes its weights with a derivative of the user's own, which the fused op would replace"
        edit = "use jax.nn.softmax if you want its derivative"
        self.decline("custom_rule", sentence, [maker], edit=edit, site=[maker, self.anchor])

    def named(self, outcome: Candidate | Rejection, read: Reading) -> Candidate | Rejection:
        """The outcome with the kind of attention as a concept, unless a number makes it not an attention."""
        if isinstance(outcome, Rejection) and outcome.code in ("scalar", "value"):
            return self.scaled_late(read, outcome) if outcome.code == "value" else outcome
        kind = self.kind or ("masked" if read.steps or read.tail.changes else "unmasked")
        return with_concepts(outcome, ("attention", f"attention_{kind}"))

    def read(self, weights: int) -> Reading | Miss:
        """The site's spelling, from the outside in; the miss that came furthest if no spelling matches."""
        best: Miss | None = None
        roots = self.roots()
        for tail, root in itertools.product(tails_of(self.view, weights, roots), roots):
            outer = self.tried(tail, root)
            if isinstance(outer, Match):
                return self.scores(tail, root, outer)
            if outer is not None and (best is None or outer.matched >= best.matched):
                best = outer
        if best is None:
            raise AssertionError("an attention's root is a product or a division")
        return best

    def tried(self, tail: Tail, root: int) -> Match | Miss | None:
        example = tail_example(tail)
        if not example.fits(self.view, root):
            return None
        pattern = pattern_of(example)
        if self.view.nodes[root].op != pattern.nodes[pattern.root].op:
            return None
        return match(pattern, self.view, root)

    def scores(self, tail: Tail, root: int, outer: Match) -> Reading | Miss:
        """The complete match of a site whose softmax has matched, for the first matching reading of its scores."""
        best: Miss | None = None
        z = outer.leaves["z"]
        for steps in itertools.islice(readings(self.view, z, self.read_times(outer, z)), _READINGS):
            for signed in (steps,) if steps else (steps, NEGATED):
                found = match(pattern_of(whole_example(tail, signed)), self.view, root)
                if isinstance(found, Match):
                    shown = self.view.values_of.get(z)
                    largest = float(jnp.finfo(shown[0].dtype if shown else jnp.float32).max)
                    return Reading.of(tail, signed, found, largest)
                best = found if best is None or found.matched > best.matched else best
        if best is None:
            raise AssertionError("scores have a reading")
        return best

    def read_times(self, outer: Match, z: int) -> Coef:
        """The factor of a softmax on its scores, a canonical node; 1 if it reads only their maximum, which passes a factor on."""
        readers = (self.view.nodes[t] for t in outer.nodes.values())
        found = (o.coef for n in readers if n.op in ("sum", "difference", "exp") for o in n.operands if o.nid == z)
        return next(found, 1.0)

    def roots(self) -> list[int]:
        """The product itself, or the division that follows it."""
        nid = self.view.ref[self.anchor.outputs[0].id].nid
        after = [u for u in self.view.users.get(nid, ()) if self.view.nodes[u].op == "prod"]
        return [*after, nid]

    def candidate(self, read: Reading) -> Candidate | Rejection:
        found, certifier = read.match, self.search.certifier
        region, rounded = self.placed(found)
        factor = self.factor_on_result(read, region)
        self.check(read, region)
        reader = MaskReader(self, read, region)
        masks = reader.masking()
        if not read.tail.spelling.subtracts_max and read.tail.sink is None and reader.are_blind(masks.biases):
            edit, blind = "use jax.nn.softmax, or let every row see a key", "some of its rows see no key"
            sentence = f"{anchor_text(self.anchor)}: {blind}, and without subtracting a maximum those rows are 0 / 0"
            self.decline("mask", sentence, site=region.nodes, edit=edit)
        # Without a maximum exp(fill) is 0: a row that sees no key is 0 / 0, as it is with minus infinity.
        if not read.tail.spelling.subtracts_max:
            masks = replace(masks, mask_value=-math.inf)
        needless, zeroed = needless_changes(self.view, read, region, masks, factor, certifier)
        self.kind = self.kind_of(read, region, masks, needless)
        self.check_masks(read, region, masks)
        blind = not zeroed and self.can_be_blind(read, region, masks)
        if zeroed:
            masks = replace(masks, mask_value=-math.inf)
        if blind:
            self.check_nan_tests(region)
        notes = (*_notes(read, masks, blind), *_notes_on_dtypes(region, rounded))
        return self.of_either_heads(read, region, masks.dropped | needless, (masks, factor, notes))

    def placed(self, found: Match) -> tuple[Region, bool]:
        """(the site, whether its result is rounded to the dtype of its operands at the end).

        Raises:
          Declined: it cannot be cut out.
        """
        region = self.cut(self.root_value(found), found)
        rounded = self.rounded(region)
        if rounded is not None:
            region = self.cut(rounded, found)
        if self.anchor not in region.nodes:
            raise Declined("the product is not part of the site")
        return region, rounded is not None

    def factor_on_result(self, read: Reading, region: Region) -> float:
        """The factor on the result that the values do not carry themselves, including the numbers of the changes of the weights.

        Raises:
          Declined: there is one, and no change of the weights could carry it.
        """
        self.carried(region, [s.leaf for s in read.steps if s.kind == "added"])
        factor = self.view.ref[region.root.id].coef / self.carried(region, ["v", *read.tail.changed_by])
        if not read.tail.changes and not close(factor, 1.0):
            raise Declined("its result has a factor that the values do not have")
        return factor * math.prod(read.match.scalars[name] for name in read.tail.shares)

    def kind_of(self, read: Reading, region: Region, masks: Masking, needless: frozenset[str]) -> str:
        """The kind of attention by the changes of its scores and weights: "unmasked", "causal" or "masked"."""
        capped = "cap" in read.match.scalars
        scaled = {s.leaf for s in read.steps if s.kind in ("times", "over")}
        if capped or set(region.leaves) - {*"qkv", "sink"} - masks.dropped - needless - scaled:
            only_masks = masks.causal_outside and not capped and needless >= set(read.tail.changed_by)
            return "causal" if only_masks else "masked"
        if masks.row is None:
            return "unmasked"
        return "causal" if masks.window is None else "masked"

    def check_masks(self, read: Reading, region: Region, masks: Masking) -> None:
        """Declines masks on the scores in addition to the softmax's own `where`."""
        if not read.tail.of_some_keys or (not masks.masks and masks.row is None):
            return
        sentence = f"{anchor_text(self.anchor)}: its softmax excludes keys (where=), and its scores are masked as well"
        self.decline("mask", sentence, site=region.nodes, edit="combine the two masks with &")

    def check_nan_tests(self, region: Region) -> None:
        """Declines a test of the result for NaN, which the op never returns."""
        asked = nan_test(self.view, region.root)
        if asked is None:
            return
        sentence = f"{anchor_text(self.anchor)}: {NOTE}, and {anchor_text(asked)} tests for NaN"
        edit = "mask with a finite number such as -1e9, or with softmax's where=, and select the result of fully masked rows yourself"
        self.decline("mask", sentence, [asked], site=region.nodes, edit=edit)

    def cut(self, root: Value, found: Match) -> Region:
        """The site that computes `root` from its operands before they are widened, if all three are and to no more than the op's own
        arithmetic; otherwise from each operand as it is read.
        """
        scaled = frozenset({"q", "k", "sink"})
        region = cut(self.view, root, found.leaves, scaled, through_casts=frozenset("qkv"))
        dtypes = _dtypes(region)
        if len(dtypes) != 1 or wider_in(region, arithmetic_dtype(dtypes.pop())) is not None:
            region = cut(self.view, root, found.leaves, scaled)
        return shared_casts(region)

    def rounded(self, region: Region) -> Value | None:
        """The cast that is the only reader of a result wider than its operands and rounds it to their dtype: the weights stay in
        float32 until then, as where a library is asked for a softmax in float32.
        """
        dtypes = _dtypes(region)
        if len(dtypes) != 1 or not narrows(next(iter(dtypes)), region.root.dtype):
            return None
        user = self.only_reader(self.behind_views(region.root))
        cast = user is not None and user.primitive in CASTS and {user.outputs[0].dtype} == dtypes
        return user.outputs[0] if user is not None and cast else None

    def can_be_blind(self, read: Reading, region: Region, masks: Masking) -> bool:
        """Whether data may mask a query row fully, which makes its result NaN in the program."""
        if read.tail.sink is not None:
            return False  # such a row has all of its weight at the sink, in the program as in the op
        hidden = bool(masks.masks) and masks.mask_value == -math.inf
        return hidden or may_be_infinite(
            self.view, region.leaves, masks.biases, not (masks.masks or masks.row is not None), self.search.certifier
        )


def _dtypes(region: Region) -> set[Any]:
    """The dtypes of queries, keys and values."""
    return {region.leaves[x].dtype for x in "qkv"}


def _notes(read: Reading, masks: Masking, blind: bool) -> Iterator[str]:
    """Where the fused op differs from the site on numbers that a model is not meant to see."""
    if masks.causal_outside:
        yield MADE_OUTSIDE
    if masks.row is not None and masks.fill > _SAFE_FILL:
        yield f"masked scores become {masks.fill:g}: correct as long as no score is as low"
    if not read.tail.spelling.subtracts_max:
        overflow = "no maximum is subtracted here: scores above 88 overflow in the program but not in the fused op"
        yield overflow if read.tail.sink else f"{overflow}, and a row of scores below -103 is 0 / 0 in the program"
    if read.tail.spelling.note is not None:
        yield read.tail.spelling.note
    if blind:
        yield NOTE


def _notes_on_dtypes(region: Region, rounded: bool) -> Iterator[str]:
    """The effect of the fused op's dtypes on the result."""
    if region.root.dtype == np.float64:
        yield "its constants are read to 12 digits"
    if rounded:
        yield _ROUNDED.format(region.root.dtype)


PASSES = {20: DotProductAttentionPass()}
