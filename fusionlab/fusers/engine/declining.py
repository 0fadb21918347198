"""How a pass declines a place: the rejection and its wording, also for a place on which the search failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...graph.declined import Declined
from ...graph.program.boundary import Fault, guarded
from ...graph.program.ir import Node
from .outcomes import LEFT_TO_XLA, Candidate, Rejection
from .wording import anchor_text

T = TypeVar("T")
U = TypeVar("U")

# Codes that stand before what else reads a site's inner values: whoever that is, it is not fused.
_BEFORE = LEFT_TO_XLA | {"implementation", "dtype"}
FUSE_FIRST = "fuse the function before it is differentiated: jax.grad(fl.fuse(loss))"


def reject(
    name: str,
    code: str,
    sentence: str,
    anchor: Node,
    guilty: Iterable[Node],
    site: Iterable[Node],
    progress: tuple[int, int] | None = None,
    edit: str | None = None,
    concepts: Sequence[str] = (),
) -> Rejection:
    """A Rejection at `anchor`; `progress` defaults to all of the site's nodes having matched."""
    site_ids = frozenset(n.id for n in site) | {anchor.id}
    matched, total = progress or (len(site_ids), len(site_ids))
    guilty_ids = tuple(n.id for n in guilty)
    place = f"{name}@{anchor.scope}", name, code, sentence
    return Rejection(*place, guilty_ids, site_ids, matched, total, anchor.source, edit, concepts=tuple(concepts))


def faulty(name: str, fault: Fault, anchor: Node, nodes: Sequence[Node]) -> Rejection:
    """The rejection of a place on which FusionLab itself failed."""
    rejection = reject(name, "uncertified", f"{anchor_text(anchor)}: {fault}", anchor, nodes, nodes)
    return replace(rejection, origin=fault.origin, failed=True)


def listed(outcome: Any) -> list[Candidate | Rejection]:
    """Outcomes as a list: from one outcome, several (a generator runs here) or None."""
    if outcome is None:
        return []
    return [outcome] if isinstance(outcome, Candidate | Rejection) else list(outcome)


def examined(name: str, anchor: Node, examine: Callable[[], Any]) -> list[Candidate | Rejection]:
    """The outcomes of `examine` at one place, or the rejection of a place on which it failed."""
    return guarded(lambda: listed(examine()), lambda fault: [faulty(name, fault, anchor, [anchor])])


def attempted(make: Callable[[], T], instead: Callable[[Declined], U]) -> T | U:
    """The result of `make`, or that of `instead` for the reason if `make` declined. Nothing else catches `Declined`."""
    try:
        return make()
    except Declined as reason:
        return instead(reason)


def reason_to_tell(problem: Rejection | None, outcome: Rejection) -> Rejection:
    """The rejection to report for a site whose inner values are read outside (`problem`) and which would be declined for `outcome` even if
    only the backward pass read them. `outcome` alone is reported if the requested implementation cannot run the site, its dtypes rule out
    any fusion, XLA's code is what runs on the device, or the search failed on it. Otherwise its sentence follows that of `problem`, which
    an edit may remove, and its edit replaces an edit that would only lead to it.
    """
    if problem is None or outcome.code in _BEFORE or outcome.failed:
        return outcome
    if outcome is problem:
        return problem
    edit = outcome.edit if problem.edit == FUSE_FIRST else problem.edit
    return replace(
        problem, sentence=f"{problem.sentence}; once that is fixed: [{outcome.code}] {outcome.sentence}", edit=edit
    )
