"""The sentence of a near miss: the value found, the value needed, and the place, without the matcher's own terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...graph.canonical.nodes import ONE
from ...graph.canonical.view import CanonicalView
from ...graph.matching.match import Miss
from ...graph.program.ir import Node, Value
from .wording import anchor_text

# What a canonical node is to a reader, where no pass has a better word.
_WORDS = {
    "dot": "a product of matrices",
    "sum": "a sum or difference",
    "prod": "an elementwise product or quotient",
    "select": "a selection by a mask (jnp.where)",
    "reduce_max": "a maximum over an axis",
    "reduce_sum": "a sum over an axis",
    "one": "a number written in the program",
}


def sentence_of(view: CanonicalView, miss: Miss, anchor: Node, words: Mapping[str, str]) -> str:
    """The sentence for the nearest miss of a site at `anchor`; `words`: the pass's names for nodes and leaves of its patterns."""
    words = {**_WORDS, **words}
    if miss.leaves is not None:
        return _axis(view, miss, anchor, words)
    if miss.factor is not None:
        return _factor(view, miss, anchor)
    if miss.wanted is None:
        return f"{anchor_text(anchor)}: {miss.reason}"
    target, bound = canonical_text(view, miss.target, anchor), miss.known.get(miss.wanted)
    if bound is not None:
        both = f"{target} and {canonical_text(view, bound, anchor)}"
        return f"{both} are two different values where the same value is needed twice{_at(view, miss, anchor)}"
    reader = miss.bound.get(miss.at[0]) if miss.at is not None else None
    if reader is None:
        return f"{target} is found where {_needed(miss, words)} is needed{_at(view, miss, anchor)}"
    return f"{canonical_text(view, reader, anchor)} reads {target}, where {_needed(miss, words)} is needed{_at(view, miss, anchor)}"


def _at(view: CanonicalView, miss: Miss, anchor: Node) -> str:
    """The anchor, for a sentence that would otherwise name no line of the program."""
    reader = miss.bound.get(miss.at[0]) if miss.at is not None else None
    return "" if maker_of(view, miss.target) or (reader and maker_of(view, reader)) else f", for {anchor_text(anchor)}"


def _needed(miss: Miss, words: Mapping[str, str]) -> str:
    """What the pattern needs there: the number that it captures, or the kind of node."""
    wanted = miss.pattern.nodes[miss.wanted or ONE]
    edge = miss.pattern.edges.get(miss.at) if miss.at is not None else None
    if wanted.id == ONE and edge is not None:
        return f"{words.get(edge.scalar, edge.scalar)} as {words['one']}"
    if wanted.op == "dot" and wanted.id == miss.pattern.root:
        return words.get("result", words["dot"])
    return words.get(wanted.op, f"the operation {wanted.op}")


def _factor(view: CanonicalView, miss: Miss, anchor: Node) -> str:
    """For an operand that is read with a factor different from the pattern's."""
    assert miss.factor is not None
    coef, operand, wanted = miss.factor
    reads = "has the number" if operand == ONE else f"reads {canonical_text(view, operand, anchor)} times"
    return f"{canonical_text(view, miss.target, anchor)} {reads} {coef:g}, where {wanted} is needed"


def _axis(view: CanonicalView, miss: Miss, anchor: Node, words: Mapping[str, str]) -> str:
    """For an axis that some operands share and others lack."""
    assert miss.leaves is not None
    names, size = miss.leaves
    of = {name: miss.known[pid] for pid, name in miss.pattern.leaf_of.items() if pid in miss.known}

    def listed(some: Iterable[str]) -> str:
        return " and ".join(f"{words.get(n.rstrip('0123456789'), n)} {value_of(view, of[n])}" for n in some if n in of)

    having, lacking = listed(names), listed(n for n in of if n not in names)
    if not having:
        return f"{anchor_text(anchor)} has an axis of {size} entries that none of its operands has"
    return f"{anchor_text(anchor)}: an axis of {size} entries belongs to {having}" + (
        f", but not to {lacking}" if lacking else ""
    )


def value_of(view: CanonicalView, nid: int) -> str:
    """A value of a canonical node, by its name and type."""
    values = view.values_of.get(nid)
    return repr(values[0]) if values else "of no name"


def canonical_text(view: CanonicalView, nid: int, anchor: Node) -> str:
    """A canonical node as the program has it: the operation that computes it, with its line, or the given value."""
    if nid == ONE:
        return "a number"
    maker = maker_of(view, nid)
    if maker is not None:
        return anchor_text(maker)
    values: list[Value] = view.values_of.get(nid, [])
    return repr(values[0]) if values else f"an operand of {anchor_text(anchor)}"


def maker_of(view: CanonicalView, nid: int) -> Node | None:
    """The operation of the program that computes a canonical node's value; None for a given array or a number."""
    return None if nid == ONE else view.maker(nid)
