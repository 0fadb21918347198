"""The search: every pass over every block, overlaps settled, sites named."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..device import Device, asked_about
from ..graph.backward.find import Derivatives
from ..graph.canonical.blocks import views
from ..graph.canonical.view import CanonicalView
from ..graph.certify.certify import Certifier
from ..graph.jax_compat import types_in
from ..graph.program.boundary import Fault, guarded
from ..graph.program.graph import Graph
from ..graph.program.ir import Block, Node
from ..graph.settings import jax_defaults, no_full_collections, wide_types
from ..kernels import plain_meaning_of
from ..progress import SILENT, Stages
from .engine.base import GRADIENT, Pass, Search, found_at
from .engine.declining import faulty, reject
from .engine.outcomes import Candidate, Rejection, declined
from .engine.overlaps import settle, with_shares_left
from .engine.pairing import failed_on, has_backward_pass, with_backward
from .registry import BUILT_IN
from .report.findings import Findings


def find_in(
    graph: Graph,
    passes: Iterable[tuple[Pass, Mapping[str, Any]]],
    device: Device,
    implementation: str | None = None,
    certifier: Certifier | None = None,
    stages: Stages = SILENT,
) -> Findings:
    """Searches a graph.

    Args:
      graph: the raw graph.
      passes: passes with their options, in order.
      device: the device for which backends are chosen.
      implementation: as in `fuse`.
      certifier: caches proofs; a new one by default.
      stages: called with the pass under way and the number of sites so far.
    """
    certifier, numbered = certifier or Certifier(plain_meaning_of), graph.numbered
    asked = list(passes), device, implementation, certifier, stages
    with jax_defaults(), wide_types(types_in(graph.top.jaxpr)), no_full_collections(), asked_about(device):
        if numbered is None:
            return _find_in(graph, *asked)
        if numbered.graph is not None:
            return _declined_for(graph, _find_in(numbered.graph, *asked))
        names = ", ".join(numbered.symbols)
        note = f"the sizes of this program are symbolic ({names}), and it traces at none of the sizes tried: nothing was searched"
        return Findings(
            graph, tuple(p.name for p, _ in asked[0]), (), (), device=str(device), notes=(note,), where=device
        )


def _declined_for(graph: Graph, found: Findings) -> Findings:
    """The findings at concrete sizes, with every site declined, because kernels are launched for concrete sizes."""
    names, nodes = ", ".join(graph.numbered.symbols), graph.numbered.nodes

    def here(ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(nodes[i] for i in ids if i in nodes))

    def symbolic(site: Candidate) -> Rejection:
        sentence = f"{site.formula} is a site at concrete sizes, but the sizes of this program are symbolic ({names})"
        edit = "export the fused function at concrete sizes, one export for each size that is served"
        ids = here(site.node_ids)
        return declined(site, "symbolic", sentence, node_ids=ids, site_ids=frozenset(ids), edit=edit)

    def as_here(rejection: Rejection) -> Rejection:
        ids_here = {"node_ids": here(rejection.node_ids), "site_ids": frozenset(here(rejection.site_ids))}
        return replace(rejection, **ids_here, region=None, backward=None)

    ledger = (*map(as_here, found.rejections), *map(symbolic, found.candidates))
    ordered = sorted(ledger, key=lambda r: min(r.site_ids, default=0))
    return replace(found, graph=graph, candidates=(), rejections=tuple(ordered), router=None)


def _find_in(
    graph: Graph,
    passes: list[tuple[Pass, Mapping[str, Any]]],
    device: Device,
    implementation: str | None,
    certifier: Certifier,
    stages: Stages,
) -> Findings:
    for pass_, options in passes:
        pass_.check(options)
    seconds: dict[str, float] = {}
    unread: list[tuple[Block, Fault]] = []
    stages("searching")
    with _timed(seconds, "canonicalise"):
        found_views = list(views(graph, failed=lambda block, fault: unread.append((block, fault))))
    found: list[Candidate | Rejection] = [*_unread(passes, unread)]
    differentiated = has_backward_pass(graph)
    derivatives = Derivatives() if differentiated else None
    shared: dict[Any, Any] = {}
    search_of = functools.partial(Search, graph, device=device, certifier=certifier, implementation=implementation)
    for pass_, options in sorted(passes, key=lambda asked: asked[0].whole):
        if implementation not in (None, *pass_.fused_op.implementations):
            continue
        with _timed(seconds, pass_.name):
            stage = stages(f"searching: {pass_.name}, {_sites_text(found)}", len(found_views))
            for view, owner in found_views:
                search = search_of(view, options=options, derivatives=derivatives, shared=shared)
                found += _searched(pass_, search, owner)
                stage.step()
    stages(f"searching: {'backward passes of ' if differentiated else ''}{_sites_text(found)}")
    with _timed(seconds if differentiated else {}, "pairs"):
        candidates, rejections = guarded(
            lambda: _settled(graph, passes, found_views, found, certifier, derivatives),
            lambda fault: ([], [failed_on(item, fault) for item in found]),
        )
    return Findings(
        graph,
        tuple(p.name for p, _ in passes),
        *_number(candidates, rejections),
        seconds,
        str(device),
        gradients=_gradients(passes),
        differentiated=differentiated,
        router=_router(passes, found_views, search_of),
        where=device,
    )


def _sites_text(found: Sequence[Candidate | Rejection]) -> str:
    n = sum(isinstance(item, Candidate) for item in found)
    return f"{n} site{'' if n == 1 else 's'} so far"


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Records the time of its body under a name."""
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


def _gradients(passes: Iterable[tuple[Pass, Mapping[str, Any]]]) -> tuple[str, ...]:
    """The names of the `_grad` passes that are on."""
    return tuple(f"{p.name}_grad" for p, options in passes if not p.forward_only and options.get(GRADIENT, True))


def _router(
    passes: Iterable[tuple[Pass, Mapping[str, Any]]],
    found_views: Iterable[tuple[CanonicalView, Node | None]],
    search_of: Callable[..., Search],
) -> Callable[[Findings], Any]:
    """The function that finds the route of every product, from the pass that has routes, even if that pass is not requested."""
    asked = {p.name: options for p, options in passes}
    pass_, routes = next((p, p.routes) for p in BUILT_IN.values() if p.routes is not None)
    # An implementation is named for the passes that are requested: another pass may not have it.
    own = {} if pass_.name in asked else {"implementation": None}
    options = asked.get(pass_.name, {})
    return functools.partial(routes, [(search_of(view, options=options, **own), owner) for view, owner in found_views])


def _searched(pass_: Pass, search: Search, rule: Node | None) -> list[Candidate | Rejection]:
    """The outcomes of a pass in a block, up to the point where it fails on the block itself. `rule`: the user's derivative rule that the
    block belongs to."""
    found: list[Candidate | Rejection] = []
    nodes = search.block.nodes
    failed = guarded(
        lambda: found.extend(pass_.search(search)),
        lambda fault: faulty(pass_.name, fault, nodes[0], nodes) if nodes else None,
    )
    items = search.shared[found_at(pass_.name, search.view)] = [*found, failed] if failed is not None else found
    return items if rule is None else [_inside_rule(item, rule) for item in items]


def _unread(
    passes: Iterable[tuple[Pass, Mapping[str, Any]]], unread: Sequence[tuple[Block, Fault]]
) -> Iterator[Rejection]:
    """The rejections of blocks that no pass can search because they have no canonical form."""
    for (pass_, _), (block, fault) in itertools.product(passes, unread):
        if not block.nodes:
            continue
        nodes = block.nodes
        where = f"the body {block.path}" if block.path else "the program"
        sentence = f"{where} of {len(nodes)} nodes was not searched: {fault}"
        rejection = reject(pass_.name, "uncertified", sentence, nodes[0], nodes, nodes, (0, len(nodes)))
        yield replace(rejection, origin=fault.origin, failed=True)


def _settled(
    graph: Graph,
    passes: list[tuple[Pass, Mapping[str, Any]]],
    found_views: list[tuple[CanonicalView, Node | None]],
    found: list[Candidate | Rejection],
    certifier: Certifier,
    derivatives: Derivatives | None,
) -> tuple[list[Candidate], list[Rejection]]:
    """The sites with their backward passes, overlaps settled."""
    found = with_shares_left(found)
    if derivatives is not None:
        found = with_backward(graph, [view for view, _ in found_views], found, certifier, derivatives)
        for pass_, options in passes:
            found = pass_.together(found, options)
    return settle(found)


def _inside_rule(item: Candidate | Rejection, owner: Node) -> Rejection:
    """A site inside a user's custom_jvp or custom_vjp: its gradient is the user's, so it is left as it is."""
    if isinstance(item, Rejection):
        return item
    where = f" ({owner.source})" if owner.source else ""
    sentence = f"{item.formula} lies inside a {owner.primitive}{where}, whose derivative is the user's own"
    return declined(item, "custom_rule", sentence, node_ids=(owner.id,))


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

    def backward_of(item: Candidate | Rejection) -> Any:
        idle = isinstance(item, Candidate) and bool(item.idle)
        return item.backward and replace(item.backward, site=ids[id(item)], idle=idle)

    new_c = tuple(
        replace(c, id=ids[id(c)], backward=backward_of(c)) for c in sorted(candidates, key=lambda c: first[id(c)])
    )
    new_r = tuple(
        replace(r, id=ids[id(r)], winner=winners.get(r.winner or ""), backward=backward_of(r))
        for r in sorted(rejections, key=lambda r: first[id(r)])
    )
    return new_c, new_r
