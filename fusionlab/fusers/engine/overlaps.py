"""Overlapping sites: which one is kept, and what becomes of the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ...graph.backward.gradients import BackwardPart, first_gradients
from ...graph.program.ir import Block
from ...graph.program.order import SitesWaitError, in_order
from .outcomes import Candidate, Rejection, declined


def with_shares_left(found: Sequence[Candidate | Rejection]) -> list[Candidate | Rejection]:
    """The sites; one whose extra work (see `Candidate.plain`) would take nodes of other sites is replaced by its plain form.

    A sum that two norms read belongs to the first one. An idle site, or one that takes the rest, takes nothing from others.
    """
    firm = _Claims()
    for c in found:
        if isinstance(c, Candidate) and not c.idle and not c.takes_the_rest:
            firm.add(c, c.seen)
    left: list[Candidate | Rejection] = []
    for c in found:
        if isinstance(c, Candidate) and c.plain is not None:
            if firm.beside(c, c).keys() != firm.beside(c, c.plain).keys():
                left.append(c.plain)
                continue
            firm.add(c, c)
        left.append(c)
    return left


class _Claims:
    """The nodes and values that sites take and read."""

    def __init__(self) -> None:
        # a node, a value that only exists inside a site, a value that one reads -> those sites, by their ids
        self.sites: dict[tuple[str, int], dict[int, Candidate]] = defaultdict(dict)

    def add(self, c: Candidate, form: Candidate) -> None:
        """Adds a site, in one of its forms."""
        for key in _keys(form, "inner", "read"):
            self.sites[key][id(c)] = c

    def remove(self, c: Candidate) -> None:
        for key in _keys(c, "inner", "read"):
            self.sites[key].pop(id(c), None)

    def beside(self, c: Candidate, form: Candidate) -> dict[int, Candidate]:
        """Ids of the other sites that a site in this form excludes, those that share nodes with it first."""
        hits: dict[int, Candidate] = {}
        for key in _keys(form, "read", "inner"):
            hits |= self.sites.get(key, {})
        return {i: other for i, other in hits.items() if i != id(c)}

    def holds(self, node: int) -> bool:
        """Whether a site takes a node."""
        return bool(self.sites.get(("node", node)))


def _keys(c: Candidate, inside: str, given: str) -> Iterator[tuple[str, int]]:
    """The nodes of a site, then the values that exist only inside it and those that it reads, under these names."""
    yield from (("node", n) for n in c.node_ids)
    yield from ((given, v.id) for v in c.site.leaves)
    own = {v.id for v in c.roots}
    yield from ((inside, v.id) for n in c.site.nodes for v in n.outputs if v.id not in own)


def settle(found: list[Candidate | Rejection]) -> tuple[list[Candidate], list[Rejection]]:
    """Settles overlaps: the candidate with more nodes wins, and any wins over an idle one; the loser becomes a rejection naming the winner.

    Candidates overlap if they share nodes, or if one reads a value that exists only inside the other. A rejection inside a winner is
    dropped. A candidate that takes the rest (`Candidate.takes_the_rest`) takes the nodes that the others leave, or would only leave to
    XLA.

    Of sites with several results that depend on each other, the one with fewer nodes is declined, an idle one first. A site that can
    manage with one result (`Candidate.plain`) does so.
    """
    candidates = [c for c in found if isinstance(c, Candidate)]
    declined_before = [r for r in found if isinstance(r, Rejection)]
    stuck: list[Rejection] = []
    while True:
        taken, kept, lost = _claimed(candidates)
        waiting = _waiting(kept)
        if waiting is None:
            outside = [r for r in declined_before if not all(map(taken.holds, r.site_ids))]
            return kept, [*outside, *lost, *stuck]
        given_up, others = waiting
        if given_up.plain is not None:
            candidates[candidates.index(given_up)] = given_up.plain
        else:
            candidates.remove(given_up)
            stuck.append(_stuck(given_up, others))


def _claimed(candidates: Sequence[Candidate]) -> tuple[_Claims, list[Candidate], list[Rejection]]:
    """The claims of candidates, the candidates kept, and the others, each declined for the one that it lost to."""
    taken = _Claims()
    lost: dict[int, Candidate] = {}
    for c in sorted(candidates, key=lambda c: (bool(c.idle), c.takes_the_rest, -c.nodes_before)):
        others = list(taken.beside(c, c).values())
        if _gives_way(c, others):
            lost[id(c)] = others[0]
            continue
        for other in others:
            taken.remove(other)
            lost[id(other)] = c
        taken.add(c, c)
    kept = [c for c in candidates if id(c) not in lost]
    return taken, kept, [_lost(c, lost[id(c)]) for c in candidates if id(c) in lost]


def _gives_way(c: Candidate, others: Sequence[Candidate]) -> bool:
    """Whether a site yields to the overlapping sites kept so far.

    A site that takes the rest is kept if it has code of its own while each of the others runs the same code as XLA.
    """
    if not others:
        return False
    return not c.takes_the_rest or c.same_code or not all(o.same_code for o in others)


def _waiting(candidates: list[Candidate]) -> tuple[Candidate, list[Candidate]] | None:
    """A candidate of several results that cannot be replaced with the others, and those of several results involved in the cycle."""
    for block in {c.region.block.path: c.region.block for c in candidates if c.others and c.region}.values():
        here = [c for c in candidates if c.block_path == block.path]
        pairs = parts_in(block, enumerate(candidates))
        try:
            in_order(block, first_gradients(block, pairs), [c.site for c in here])
        except SitesWaitError as error:
            round_ = sorted((here[i] for i in error.numbers), key=lambda c: (not c.idle, c.nodes_before))
            return round_[0], round_[1:]
    return None


def part_in(block: Block, item: Candidate | Rejection) -> BackwardPart | None:
    """The backward pass that is replaced with a site, if it is in this block."""
    part = item.site.backward if isinstance(item, Candidate) else None
    return part if part is not None and part.block_path == block.path else None


def parts_in(block: Block, items: Iterable[tuple[int, Candidate | Rejection]]) -> list[tuple[int, BackwardPart]]:
    """The backward passes in a block that are replaced with sites, each with the number of its site."""
    return [(i, part) for i, item in items if (part := part_in(block, item)) is not None]


def _stuck(c: Candidate, others: Sequence[Candidate]) -> Rejection:
    whose = f"results of {', '.join(o.formula for o in others)}" if others else "the gradients of another site"
    return declined(c, "order", f"{c.formula} depends on {whose}, which in turn depends on a result of this site")


def _lost(c: Candidate, winner: Candidate) -> Rejection:
    why = "which is larger" if winner.nodes_before > c.nodes_before else "which comes first"
    edit = None
    if c.idle and not winner.idle:
        why = f"which is fused by default, while this one is left as it is: {c.idle}"
        edit = f"name the pass: passes=[{c.pass_name!r}]"
    sentence = f"{c.formula} shares nodes with {winner.formula} of {winner.pass_name}, {why}"
    shared = tuple(c.node_ids & winner.node_ids)
    return declined(c, "overlap", sentence, node_ids=shared, edit=edit, winner=str(id(winner)))
