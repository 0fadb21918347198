"""The search: every pass over every block, overlaps settled, sites named."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..device import Device
from ..graph.certify import Certifier
from ..graph.ir import Graph, Node
from ..graph.views import views
from ..kernels import plain_meaning_of
from .base import GRADIENT, Pass, Search
from .findings import Candidate, Findings, Rejection
from .linear_groups import grouped
from .pairing import is_differentiated, with_backward


def find_in(
    graph: Graph,
    passes: Iterable[tuple[Pass, Mapping[str, Any]]],
    device: Device,
    implementation: str | None = None,
    certifier: Certifier | None = None,
) -> Findings:
    """Searches a graph.

    Args:
      graph: the raw graph.
      passes: passes with their options, in order.
      device: what backends are judged for.
      implementation: as in `fuse`.
      certifier: remembers proofs; a new one by default.
    """
    with _collector_paused():
        return _find_in(graph, list(passes), device, implementation, certifier or Certifier(plain_meaning_of))


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """A search makes many small tuples and no cycles; each full collection would walk all of them, which is quadratic."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _find_in(
    graph: Graph,
    passes: list[tuple[Pass, Mapping[str, Any]]],
    device: Device,
    implementation: str | None,
    certifier: Certifier,
) -> Findings:
    started = time.perf_counter()
    found_views = list(views(graph))
    seconds = {"canonicalise": time.perf_counter() - started}
    found: list[Candidate | Rejection] = []
    differentiated = is_differentiated(graph)
    for pass_, options in passes:
        if implementation is not None and implementation not in _implementations(pass_):
            continue
        started = time.perf_counter()
        for view, owner in found_views:
            search = Search(graph, view, device, certifier, options, implementation, differentiated)
            for item in pass_.search(search):
                found.append(_inside_rule(item, owner) if owner is not None else item)
        seconds[pass_.name] = time.perf_counter() - started
    if differentiated:
        started = time.perf_counter()
        certifier_views = [view for view, _ in found_views]
        found = with_backward(graph, certifier_views, found, certifier)
        found = grouped(found, next((o.get("grouping") for p, o in passes if p.name == "gemm_epilogue"), None))
        seconds["pairs"] = time.perf_counter() - started
    candidates, rejections = _settle(found)
    names = tuple(p.name for p, _ in passes)
    gradients = tuple(f"{p.name}_grad" for p, options in passes if options.get(GRADIENT, True))
    found_all = _number(candidates, rejections)
    return Findings(graph, names, *found_all, seconds, str(device), gradients=gradients, differentiated=differentiated)


def _implementations(pass_: Pass) -> Mapping[str, Any]:
    from ..kernels import OPS

    return OPS[pass_.op].implementations


def _inside_rule(item: Candidate | Rejection, owner: Node) -> Rejection:
    """A site inside a user's custom_jvp or custom_vjp: its gradient is the user's, so it is left alone."""
    if isinstance(item, Rejection):
        return item
    where = f" ({owner.source})" if owner.source else ""
    return Rejection(
        item.id,
        item.pass_name,
        "custom_rule",
        f"{item.formula} stands inside a {owner.primitive}{where}, whose derivative is the user's own",
        (owner.id,),
        item.node_ids,
        item.nodes_before,
        item.nodes_before,
        item.source,
        concepts=item.concepts,
    )


def _settle(found: list[Candidate | Rejection]) -> tuple[list[Candidate], list[Rejection]]:
    """Where candidates overlap the one with more nodes wins; the loser becomes a rejection naming the winner.

    They overlap where they share nodes, and where one reads a value that only exists inside the other. What was declined inside a winner
    is part of it, and no site of its own.
    """
    owner: dict[int, Candidate] = {}  # node -> the winner it belongs to
    inner: dict[int, Candidate] = {}  # value made inside a winner and not by its root -> the winner
    read: dict[int, Candidate] = {}  # value a winner reads -> the winner
    lost: dict[int, Candidate] = {}
    candidates = [c for c in found if isinstance(c, Candidate)]
    for c in sorted(candidates, key=lambda c: -c.nodes_before):
        made = _inner_values(c)
        taken = next((owner[n] for n in c.node_ids if n in owner), None)
        taken = taken or next((inner[v.id] for v in c.site.leaves if v.id in inner), None)
        taken = taken or next((read[i] for i in made if i in read), None)
        if taken is not None:
            lost[id(c)] = taken
            continue
        owner.update(dict.fromkeys(c.node_ids, c))
        inner.update(dict.fromkeys(made, c))
        read.update((v.id, c) for v in c.site.leaves)
    rejections = [r for r in found if isinstance(r, Rejection) and not r.site_ids <= owner.keys()]
    return _with_losers(candidates, lost, rejections)


def _inner_values(c: Candidate) -> list[int]:
    """The values that a candidate's nodes make, without the one it gives."""
    return [v.id for n in c.site.nodes for v in n.outputs if v.id != c.root.id]


def _with_losers(
    candidates: list[Candidate], lost: Mapping[int, Candidate], rejections: list[Rejection]
) -> tuple[list[Candidate], list[Rejection]]:
    kept = [c for c in candidates if id(c) not in lost]
    for c in candidates:
        winner = lost.get(id(c))
        if winner is not None:
            sentence = f"{c.formula} shares nodes with {winner.formula} of {winner.pass_name}, which is larger"
            shared, size = tuple(c.node_ids & winner.node_ids), c.nodes_before
            rejections.append(
                Rejection(
                    c.id,
                    c.pass_name,
                    "overlap",
                    sentence,
                    shared,
                    c.node_ids,
                    size,
                    size,
                    c.source,
                    winner=str(id(winner)),
                    concepts=c.concepts,
                )
            )
    return kept, rejections


def _number(
    candidates: list[Candidate], rejections: list[Rejection]
) -> tuple[tuple[Candidate, ...], tuple[Rejection, ...]]:
    """Completes ids with the ordinal within (pass, scope), in program order over candidates and rejections alike."""
    first = {id(x): min(x.node_ids if isinstance(x, Candidate) else x.site_ids) for x in (*candidates, *rejections)}
    counter: dict[str, int] = {}
    ids: dict[int, str] = {}
    for item in sorted((*candidates, *rejections), key=lambda x: (x.pass_name, first[id(x)])):
        counter[item.id] = counter.get(item.id, 0) + 1
        ids[id(item)] = f"{item.id}#{counter[item.id]}"
    winners = {str(key): name for key, name in ids.items()}

    def told(item: Candidate | Rejection) -> Any:
        return item.backward and replace(item.backward, site=ids[id(item)])

    new_c = tuple(replace(c, id=ids[id(c)], backward=told(c)) for c in sorted(candidates, key=lambda c: first[id(c)]))
    new_r = tuple(
        replace(r, id=ids[id(r)], winner=winners.get(r.winner or ""), backward=told(r))
        for r in sorted(rejections, key=lambda r: first[id(r)])
    )
    return new_c, new_r
