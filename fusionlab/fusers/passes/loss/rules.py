"""Losses with a derivative of the user's own, as MaxText's: taken where that is proved to be the derivative.

A rule may differ from the derivative at places that no random point meets: it may clip. So its arithmetic has to be analytic, and two
analytic functions that agree on an open set agree everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core as jex_core

from ....graph.canonical.rules import is_jax_rule
from ....graph.canonical.view import CanonicalView
from ....graph.certify.certify import with_vjp
from ....graph.declined import Declined
from ....graph.dtypes import is_float
from ....graph.jax_compat import child_jaxprs, split_closed
from ....graph.matching.region import CASTS, VIEWS, Region
from ....graph.program.ir import Block, Node, Value
from .heads import product_of
from .rows import RULES
from .softmaxes import exponentiated

_EDIT = "write the loss without a rule of its own, as optax and jax.nn have it: the fused op brings its gradient"
# A maximum is subtracted from the logits, and added again.
_ANALYTIC = (
    VIEWS
    | CASTS
    | frozenset(
        "add add_any sub mul div neg exp log integer_pow square dot_general reduce_sum reduce_max stop_gradient iota copy jit pjit "
        "closed_call custom_jvp_call custom_vjp_call slice pad concatenate".split()
    )
)


def logits_of_rule(view: CanonicalView, node: Node) -> Value | None:
    """The logits of a product that a function with a rule of the user's own reads, and the logarithm of the sum of whose exponentials it
    computes."""
    if node.primitive not in RULES or not node.blocks or is_jax_rule(node):
        return None
    read = _exponentiated_inputs(node.blocks[0])
    given = (a for v, a in zip(node.blocks[0].inputs, node.inputs, strict=False) if v.id in read)
    return next((a for a in given if isinstance(a, Value) and product_of(view, a) is not None), None)


def _exponentiated_inputs(block: Block) -> set[int]:
    """The ids of the logits in a block that computes the logarithm of the sum of their exponentials."""
    view = CanonicalView(block)
    found = (exponentiated(view, n) for n in block.nodes if n.primitive == "log")
    return {f[0].id for f in found if f is not None}


def check_rules(region: Region) -> None:
    """Raises Declined for a region with a rule of the user's own that random points do not prove."""
    rules = [n for n in region.nodes if n.primitive in RULES and not is_jax_rule(n)]
    if not rules:
        return
    fn, avals = jex_core.jaxpr_as_fun(region.jaxpr()), [v.aval for v in region.inputs]
    closed = with_vjp(lambda *a: fn(*a)[0], avals, region.root.aval)
    jaxpr, _ = split_closed(closed)
    odd = next(_not_analytic(jaxpr, {v for v in jaxpr.invars if is_float(v.aval.dtype)}), None)
    if odd is not None:
        sentence = f"it has a derivative of the user's own with {odd}, which values at random points do not prove"
        raise Declined(sentence, "custom_rule", rules, _EDIT)


def _not_analytic(jaxpr: Any, moving: set[Any]) -> Iterator[str]:
    """The primitives of a program that may make different functions of the same logits; `moving` are its inputs that depend on them."""
    moving = set(moving)
    for eqn in jaxpr.eqns:
        moves = [not isinstance(v, jex_core.Literal) and v in moving for v in eqn.invars]
        if not any(moves):
            continue  # of labels alone
        moving.update(eqn.outvars)
        if not _is_analytic(eqn, moves):
            yield eqn.primitive.name
        for _, _, child in child_jaxprs(eqn):
            inner, _ = split_closed(child)
            alike = len(inner.invars) == len(moves)
            yield from _not_analytic(inner, {v for i, v in enumerate(inner.invars) if not alike or moves[i]})


def _is_analytic(eqn: Any, moves: list[bool]) -> bool:
    """Whether an equation is analytic in those of its operands that `moves`: a choice by labels is, and so is the larger of a number and
    minus infinity."""
    name = eqn.primitive.name
    if name == "select_n":
        return not moves[0]
    if name == "max":
        return any(isinstance(v, jex_core.Literal) and v.val == -math.inf for v in eqn.invars)
    return name in _ANALYTIC
