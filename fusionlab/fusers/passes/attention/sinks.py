"""Attention with a sink: a softmax over the keys and one logit more, whose weight is dropped; the ways it is written.

The logit stands beside the scores and is sliced off after the softmax (gpt-oss; which end it stands at, and how, the canonical view does
not tell), or it is in the sum of the exponentials alone; or weights without it are scaled by what it leaves of them, which is
sigmoid(logsumexp(z) - sink), before the values are weighed or after. It may be a number of the program: with 1 + the sum of exp(z) for the
sum it is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ....graph.canonical.concatenated import SLICES, joined
from ....graph.canonical.nodes import ONE, CNode, Operand
from ....graph.canonical.view import CanonicalView
from ....graph.declined import Declined
from ....graph.matching.match import Match, close
from ....graph.matching.region import Region
from .levels import is_dot, nearest_below

_ON_SCORES = frozenset("select sum tanh prod concatenate".split())
_STEPS = 8
_LOOKED_AT = 48  # nodes between the weights and the scores; a softmax by a logarithm of a sum has a dozen


def _weigh(p: Any, v: Any) -> Any:
    return jnp.einsum("bts,bsd->btd", p, v)


def _with(z: Any, sink: Any) -> Any:
    return jnp.concatenate([z, jnp.broadcast_to(sink, (*z.shape[:-1], 1))], -1)


def _logsumexp(z: Any) -> Any:
    return jax.nn.logsumexp(z, -1, keepdims=True)


def _beside(z: Any, sink: Any) -> Any:
    return jax.nn.softmax(_with(z, sink), -1)[..., :-1]


def _over_both(z: Any, top: Any, sink: Any) -> Any:
    e = jnp.exp(z - top)
    return e / (e.sum(-1, keepdims=True) + jnp.exp(sink - top))


def _below_own_max(z: Any, sink: Any) -> Any:
    return _over_both(z, z.max(-1, keepdims=True), sink)


def _without_max(z: Any, sink: Any) -> Any:
    e = jnp.exp(z)
    return e / (e.sum(-1, keepdims=True) + jnp.exp(sink))


def _to_the_sum(z: Any, number: Any) -> Any:
    e = jnp.exp(z)
    return e / (e.sum(-1, keepdims=True) + number)


def _by_logsumexp(z: Any, sink: Any) -> Any:
    return jnp.exp(z - _logsumexp(_with(z, sink)))


def _by_log_softmax(z: Any, sink: Any) -> Any:
    return jnp.exp(jax.nn.log_softmax(_with(z, sink), -1)[..., :-1])


def _by_logaddexp(z: Any, sink: Any) -> Any:
    return jnp.exp(z - jnp.logaddexp(_logsumexp(z), sink))


def _left(z: Any, sink: Any) -> Any:
    return jax.nn.sigmoid(_logsumexp(z) - sink)


def _left_by_hand(z: Any, sink: Any) -> Any:
    return 1 / (1 + jnp.exp(sink - _logsumexp(z)))


def _divided_after(z: Any, v: Any, sink: Any) -> Any:
    top = jnp.maximum(z.max(-1, keepdims=True), sink)
    e = jnp.exp(z - top)
    return _weigh(e, v) / (e.sum(-1, keepdims=True) + jnp.exp(sink - top))


# The canonical ops that a spelling has and a plain softmax has not, where there are any: see `Example.holds`.
SinkSpelling = tuple[Callable[..., Any], frozenset[str]]
SINK_WITHOUT_MAX = "softmax without max, with a sink"
TO_THE_SUM = "softmax with a number added to its sum"
_OWN_MAX, _BY_HAND = "softmax below the scores' maximum, with a sink", "softmax over 1 + exp(sink - logsumexp)"
_AFTER_BY_HAND = "product over 1 + exp(sink - logsumexp)"
WEIGHTS: Mapping[str, SinkSpelling] = {
    "softmax with a sink": (_beside, frozenset({"max"})),
    _OWN_MAX: (_below_own_max, frozenset()),
    SINK_WITHOUT_MAX: (_without_max, frozenset()),
    TO_THE_SUM: (_to_the_sum, frozenset()),
    "exp(z - logsumexp(z and a sink))": (_by_logsumexp, frozenset({"max", "log"})),
    "exp(log_softmax(z and a sink))": (_by_log_softmax, frozenset({"max", "log"})),
    "exp(z - logaddexp(logsumexp(z), sink))": (_by_logaddexp, frozenset({"log1p"})),
    "softmax times sigmoid(logsumexp - sink)": (
        lambda z, sink: jax.nn.softmax(z) * _left(z, sink),
        frozenset({"logistic", "log"}),
    ),
    _BY_HAND: (
        lambda z, sink: jax.nn.softmax(z) * _left_by_hand(z, sink),
        frozenset({"log"}),
    ),
}
# Of the product with the values: (z, v, sink).
RESULTS: Mapping[str, SinkSpelling] = {
    "division by the sum with a sink after the product": (_divided_after, frozenset({"max"})),
    "product times sigmoid(logsumexp - sink)": (
        lambda z, v, sink: _weigh(jax.nn.softmax(z), v) * _left(z, sink),
        frozenset({"logistic", "log"}),
    ),
    _AFTER_BY_HAND: (
        lambda z, v, sink: _weigh(jax.nn.softmax(z), v) * _left_by_hand(z, sink),
        frozenset({"log"}),
    ),
}
NO_MAXIMUM = frozenset({SINK_WITHOUT_MAX, TO_THE_SUM})
_OF_THE_SINK = frozenset({_OWN_MAX, _BY_HAND, _AFTER_BY_HAND})  # exponentials of the sink less something of the scores'


@dataclass(frozen=True)
class Sink:
    """The one logit more of a spelling: an operand ("data"), a number of the program ("number"), or 0, which leaves other traces.

    Attributes: `spelling` (a key of `WEIGHTS` or `RESULTS`), `given` (one of those three).
    """

    spelling: str
    given: str = "data"

    def weights(self, z: Any, given: Mapping[str, Any]) -> Any:
        return WEIGHTS[self.spelling][0](z, self._of(given))

    def result(self, z: Any, v: Any, given: Mapping[str, Any]) -> Any:
        return RESULTS[self.spelling][0](z, v, self._of(given))

    def _of(self, given: Mapping[str, Any]) -> Any:
        return (
            given["sink"][..., None]
            if self.given == "data"
            else given["sink_number"]
            if self.given == "number"
            else 0.0
        )

    @property
    def note(self) -> str | None:
        """What the fused op does otherwise where numbers are far apart."""
        if self.spelling not in _OF_THE_SINK:
            return None
        return "a sink that is 88 above all scores of a row makes an overflow in the original and not in the fused op"

    @property
    def after(self) -> bool:
        """Whether the product with the values is a part of the spelling."""
        return self.spelling in RESULTS

    @property
    def is_a_factor(self) -> bool:
        """Whether the weights are a softmax times something, as where a mask or a factor on heads multiplies them."""
        return "logistic" in self.holds

    @property
    def leaves(self) -> dict[str, str]:
        return {"sink": "bt"} if self.given == "data" else {}

    @property
    def scalars(self) -> tuple[str, ...]:
        return ("sink_number",) if self.given == "number" else ()

    @property
    def holds(self) -> frozenset[str]:
        return (RESULTS if self.after else WEIGHTS)[self.spelling][1]

    def number(self, found: Match) -> float | None:
        """The number that the sink of a match is; None where it is an operand.

        Raises:
          Declined: what is added to the sum of the exponentials is no exponential.
        """
        if self.given == "data":
            return None
        number = found.scalars.get("sink_number", 0.0)
        if self.spelling != TO_THE_SUM:
            return number
        if not 0 < number < math.inf:
            raise Declined(f"{number:g} is added to the sum of its exponentials, needed a number above 0")
        return math.log(number)


# In the order in which they are tried: scores below a maximum are also scores with a bias.
SINKS = (
    *(Sink(name) for name in (*WEIGHTS, *RESULTS) if name not in NO_MAXIMUM),
    *(Sink(name, "zero") for name in (*WEIGHTS, *RESULTS) if name not in NO_MAXIMUM),
    *(Sink(name, "number") for name in ("softmax with a sink", "exp(z - logsumexp(z and a sink))")),
    Sink(SINK_WITHOUT_MAX),
    Sink(TO_THE_SUM, "number"),
)


def may_have_sink(view: CanonicalView, roots: Sequence[int]) -> bool:
    """Whether there is more in the sum that divides the exponentials of scores than they are, as far as is soon told."""
    stack, seen = list(roots), set[int]()
    while stack and len(seen) < _LOOKED_AT:
        nid = stack.pop()
        if nid in seen:
            continue
        seen.add(nid)
        node = view.nodes[nid]
        if _tells_of_more(view, node):
            return True
        if node.op not in ("dot", "reduce_max") or nid in roots:
            stack += [o.nid for o in node.operands if o.nid != ONE]
    return False


def _tells_of_more(view: CanonicalView, node: CNode) -> bool:
    """Whether a node stands in a spelling of a softmax with a sink, and in none of a plain softmax."""
    if node.op == "sum":
        return _adds_to_exponentials(view, node)
    # logaddexp makes a log1p, and sigmoid(logsumexp(z) - sink) a logistic of a log.
    return node.op == "log1p" or (node.op == "logistic" and "log" in view.by_op)


def _adds_to_exponentials(view: CanonicalView, added: CNode) -> bool:
    """Whether a sum is of a sum of exponentials and something else, or of 1 and an exponential."""
    terms = [view.nodes[o.nid] for o in added.operands]
    if any(t.op == "reduce_sum" and view.nodes[t.operands[0].nid].op == "exp" for t in terms):
        return True
    return {t.op for t in terms} == {"one", "exp"}


def reason_of_logits(view: CanonicalView, exponentials: int, weights: int) -> tuple[str, str | None] | None:
    """What is said, and what would help, of weights that are a softmax over more than the keys, and no attention with a sink; None where
    nothing stands beside the scores. `weights` is the canonical node that the values are weighed by.
    """
    parts = _parts_of(view, exponentials)
    if sum(_of_a_product(view, nid) for _, nid in parts) != 1:
        return None  # two sets of keys, say
    keys = next(n for n, nid in parts if _of_a_product(view, nid))
    more = sum(n for n, _ in parts) - keys
    beside = "one more logit" if more == 1 else f"{more} more logits"
    start = f"its softmax is over {keys} scores and {beside} of each row"
    if more > 1:
        return f"{start}, and a sink of the fused op is one", None
    if view.nodes[weights].op not in SLICES:
        return f"{start}, whose weight is kept: that of the fused op's sink is dropped", None
    return (
        f"{start}, and what is sliced off is not its weight alone, or not right after the softmax",
        "mask the scores before the sink is put beside them, and drop weights after its own is sliced off",
    )


def _parts_of(view: CanonicalView, exponentials: int) -> list[tuple[int, int]]:
    """What the logits of a softmax are put together of, as `joined` has it: those that it exponentiates, or takes the maximum of."""
    tops = (o.nid for o in _below(view, exponentials) if view.nodes[o.nid].op == "reduce_max")
    over = [exponentials, *(view.nodes[t].operands[0].nid for t in tops)]
    return next((p for nid in over if (p := joined(view, nid))), [])


def _of_a_product(view: CanonicalView, nid: int) -> bool:
    """Whether a node is a product, or one that is scaled, masked, capped or biased."""
    return nearest_below(view, nid, is_dot, _STEPS - 1, _ON_SCORES) is not None


def _below(view: CanonicalView, nid: int) -> list[Operand]:
    """What a node reads, through sums."""
    own = list(view.nodes[nid].operands)
    return [*own, *(o for at in own if view.nodes[at.nid].op == "sum" for o in view.nodes[at.nid].operands)]


def factor_of(view: CanonicalView, found: Match, region: Region) -> float:
    """What the program multiplies the bound sink by.

    Raises:
      Declined: another factor in one place than in another.
    """
    leaf, own = found.leaf_id("sink"), float(view.ref[region.leaves["sink"].id].coef)
    factors = []
    for pid, order in found.order.items():
        operands = view.nodes[found.nodes[pid]].operands
        for wanted, at in zip(found.pattern.nodes[pid].operands, order, strict=True):
            if wanted.nid == leaf:
                factors.append(float(operands[at].coef) / float(wanted.coef) / own)
    if any(not close(f, factors[0]) for f in factors):
        raise Declined("its sink is multiplied by one number in one place, and by another in another")
    return factors[0]
