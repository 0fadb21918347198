"""Attention with a sink: a softmax over the keys and one more logit, whose weight is dropped; the ways to write it.

The logit is appended to the scores and sliced off after the softmax (gpt-oss; the canonical view does not distinguish at which end), or
it is only in the sum of the exponentials; or weights without it are scaled by their remaining share, sigmoid(logsumexp(z) - sink), before
or after they weigh the values. It may be a constant of the program: with 1 + the sum of exp(z) as the sum, it is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Spelling:
    """A way to write the weights softmax(z), or all of softmax(z) @ v.

    Attributes:
      name: unique among the spellings.
      fn: (scores, sink) -> weights; or (scores, values, sink) -> result, if the product with the values is part of it (`after`).
      sink: the kind of the additional logit: an operand ("data"), a constant of the program ("number"), or 0, which is written
        differently ("zero"); None if there is none.
      holds: the canonical ops that it has and a plain softmax does not have, if any.
      subtracts_max: whether the exponents are scores minus their maximum.
      of_the_sink: whether the sink minus some value of the scores is exponentiated.
    """

    name: str
    fn: Callable[..., Any]
    sink: str | None = None
    holds: str = ""
    after: bool = False
    subtracts_max: bool = True
    of_the_sink: bool = False

    def sink_of(self, given: Mapping[str, Any]) -> Any:
        """The sink among an example's operands and numbers, by name."""
        if self.sink == "data":
            return given["sink"][..., None]
        return given["sink_number"] if self.sink == "number" else 0.0 if self.sink else None

    def may_be_in(self, view: CanonicalView) -> bool:
        """Whether a view has the ops that only this kind of spelling has."""
        return set(self.holds.split()) <= view.by_op.keys()

    @property
    def note(self) -> str | None:
        """The note on how the fused op differs if numbers are far apart."""
        if not self.of_the_sink:
            return None
        return "a sink 88 above all scores of a row overflows in the program but not in the fused op"

    @property
    def is_a_factor(self) -> bool:
        """Whether the weights are a softmax times a factor, as if a mask or a factor per head multiplied them."""
        return "logistic" in self.holds

    def number(self, found: Match) -> float | None:
        """The sink of a match as a number; None if it is an operand, or if there is none.

        Raises:
          Declined: the term added to the sum of the exponentials is not an exponential.
        """
        if self.sink in (None, "data"):
            return None
        number = found.scalars.get("sink_number", 0.0)
        if self.fn is not _to_the_sum:
            return number
        if not 0 < number < math.inf:
            raise Declined(f"{number:g} is added to the sum of its exponentials; needed a number above 0")
        return math.log(number)


def weigh(p: Any, v: Any) -> Any:
    """The product of weights with values."""
    return jnp.einsum("bts,bsd->btd", p, v)


def _with(z: Any, sink: Any) -> Any:
    return z if sink is None else jnp.concatenate([z, jnp.broadcast_to(sink, (*z.shape[:-1], 1))], -1)


def _without(p: Any, sink: Any) -> Any:
    return p if sink is None else p[..., :-1]


def _logsumexp(z: Any) -> Any:
    return jax.nn.logsumexp(z, -1, keepdims=True)


def _softmax(z: Any, sink: Any) -> Any:
    return _without(jax.nn.softmax(_with(z, sink), -1), sink)


def _total(e: Any, sink: Any, top: Any = None) -> Any:
    """The sum of the exponentials of the scores and of a sink, both minus `top`."""
    total = e.sum(-1, keepdims=True)
    return total if sink is None else total + jnp.exp(sink if top is None else sink - top)


def _below_own_max(z: Any, sink: Any) -> Any:
    top = z.max(-1, keepdims=True)
    e = jnp.exp(z - top)
    return e / _total(e, sink, top)


def _without_max(z: Any, sink: Any) -> Any:
    e = jnp.exp(z)
    return e / _total(e, sink)


def _to_the_sum(z: Any, number: Any) -> Any:
    e = jnp.exp(z)
    return e / (_total(e, None) + number)


def _by_logsumexp(z: Any, sink: Any) -> Any:
    return jnp.exp(z - _logsumexp(_with(z, sink)))


def _by_log_softmax(z: Any, sink: Any) -> Any:
    return jnp.exp(_without(jax.nn.log_softmax(_with(z, sink), -1), sink))


def _by_logaddexp(z: Any, sink: Any) -> Any:
    return jnp.exp(z - jnp.logaddexp(_logsumexp(z), sink))


def _left(z: Any, sink: Any) -> Any:
    return jax.nn.sigmoid(_logsumexp(z) - sink)


def _left_by_hand(z: Any, sink: Any) -> Any:
    return 1 / (1 + jnp.exp(sink - _logsumexp(z)))


def _divided_after(z: Any, v: Any, sink: Any) -> Any:
    top = z.max(-1, keepdims=True)
    top = top if sink is None else jnp.maximum(top, sink)
    e = jnp.exp(z - top)
    return weigh(e, v) / _total(e, sink, top)


def _scaled(left: Callable[..., Any]) -> Callable[..., Any]:
    return lambda z, sink: jax.nn.softmax(z) * left(z, sink)


def _scaled_after(left: Callable[..., Any]) -> Callable[..., Any]:
    return lambda z, v, sink: weigh(jax.nn.softmax(z), v) * left(z, sink)


SOFTMAXES = (
    Spelling("softmax", _softmax),
    Spelling("softmax without max", _without_max, subtracts_max=False),
    Spelling("exp(z - logsumexp(z))", _by_logsumexp),
    Spelling("exp(log_softmax(z))", _by_log_softmax),
    Spelling("division after the product", _divided_after, after=True),
)
_BESIDE = Spelling("softmax with a sink", _softmax, "data", "max")
_IN_LOGSUMEXP = Spelling("exp(z - logsumexp(z and a sink))", _by_logsumexp, "data", "max log")
_BY_MAX = (
    _BESIDE,
    Spelling("softmax below the scores' maximum, with a sink", _below_own_max, "data", of_the_sink=True),
    _IN_LOGSUMEXP,
    Spelling("exp(log_softmax(z and a sink))", _by_log_softmax, "data", "max log"),
    Spelling("exp(z - logaddexp(logsumexp(z), sink))", _by_logaddexp, "data", "log1p"),
    Spelling("softmax times sigmoid(logsumexp - sink)", _scaled(_left), "data", "logistic log"),
    Spelling("softmax over 1 + exp(sink - logsumexp)", _scaled(_left_by_hand), "data", "log", of_the_sink=True),
    Spelling("division by the sum with a sink after the product", _divided_after, "data", "max", after=True),
    Spelling("product times sigmoid(logsumexp - sink)", _scaled_after(_left), "data", "logistic log", after=True),
    Spelling(
        "product over 1 + exp(sink - logsumexp)", _scaled_after(_left_by_hand), "data", "log", True, of_the_sink=True
    ),
)
# In the order in which they are tried: scores below a maximum are also scores with a bias.
SINKS = (
    *_BY_MAX,
    *(replace(spelling, sink="zero") for spelling in _BY_MAX),
    *(replace(spelling, sink="number") for spelling in (_BESIDE, _IN_LOGSUMEXP)),
    Spelling("softmax without max, with a sink", _without_max, "data", subtracts_max=False),
    Spelling("softmax with a number added to its sum", _to_the_sum, "number", subtracts_max=False),
)


def may_have_sink(view: CanonicalView, roots: Sequence[int]) -> bool:
    """Whether the sum that divides the exponentials of scores has further terms, by a quick check."""
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
    """Whether a node occurs in a spelling of a softmax with a sink but in none of a plain softmax."""
    if node.op == "sum":
        return _adds_to_exponentials(view, node)
    # logaddexp makes a log1p, and sigmoid(logsumexp(z) - sink) a logistic of a log.
    return node.op == "log1p" or (node.op == "logistic" and "log" in view.by_op)


def _adds_to_exponentials(view: CanonicalView, added: CNode) -> bool:
    """Whether a sum has a sum of exponentials and another term, or 1 and an exponential."""
    terms = [view.nodes[o.nid] for o in added.operands]
    if any(t.op == "reduce_sum" and view.nodes[t.operands[0].nid].op == "exp" for t in terms):
        return True
    return {t.op for t in terms} == {"one", "exp"}


def reason_of_logits(view: CanonicalView, exponentials: int, weights: int) -> tuple[str, str | None] | None:
    """Sentence and edit for weights that are a softmax over more than the keys but not an attention with a sink; None if the softmax is
    over the scores only. `weights` is the canonical node that weighs the values.
    """
    parts = _parts_of(view, exponentials)
    if sum(_of_a_product(view, nid) for _, nid in parts) != 1:
        return None  # two sets of keys, say
    keys = next(n for n, nid in parts if _of_a_product(view, nid))
    more = sum(n for n, _ in parts) - keys
    beside = "one more logit" if more == 1 else f"{more} more logits"
    start = f"its softmax is over {keys} scores and {beside} per row"
    if more > 1:
        return f"{start}, and a sink of the fused op is a single logit", None
    if view.nodes[weights].op not in SLICES:
        return f"{start}, whose weight is kept; the fused op drops its sink's weight", None
    return (
        f"{start}, and the slice that follows removes more than its weight, or does not follow the softmax directly",
        "mask the scores before appending the sink, and apply dropout after slicing off the sink's weight",
    )


def _parts_of(view: CanonicalView, exponentials: int) -> list[tuple[int, int]]:
    """The parts of a softmax's logits, as in `joined`: of those that it exponentiates or whose maximum it takes."""
    tops = (o.nid for o in _below(view, exponentials) if view.nodes[o.nid].op == "reduce_max")
    over = [exponentials, *(view.nodes[t].operands[0].nid for t in tops)]
    return next((p for nid in over if (p := joined(view, nid))), [])


def _of_a_product(view: CanonicalView, nid: int) -> bool:
    """Whether a node is a product, or a scaled, masked, capped or biased one."""
    return nearest_below(view, nid, is_dot, _STEPS - 1, _ON_SCORES) is not None


def _below(view: CanonicalView, nid: int) -> list[Operand]:
    """The operands of a node, through sums."""
    own = list(view.nodes[nid].operands)
    return [*own, *(o for at in own if view.nodes[at.nid].op == "sum" for o in view.nodes[at.nid].operands)]


def factor_of(view: CanonicalView, found: Match, region: Region) -> float:
    """The program's factor on the bound sink.

    Raises:
      Declined: the factor differs between places.
    """
    leaf, own = found.leaf_id("sink"), float(view.ref[region.leaves["sink"].id].coef)
    factors = []
    for pid, order in found.order.items():
        operands = view.nodes[found.nodes[pid]].operands
        for wanted, at in zip(found.pattern.nodes[pid].operands, order, strict=True):
            if wanted.nid == leaf:
                factors.append(float(operands[at].coef) / float(wanted.coef) / own)
    if any(not close(f, factors[0]) for f in factors):
        raise Declined("its sink is multiplied by different numbers in different places")
    return factors[0]
