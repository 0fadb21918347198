"""Which sites are drawn, in which block, around which nodes, and in which state."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fusionlab.fusers.engine.outcomes import Candidate, Rejection
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Block, Node


@dataclass(frozen=True, eq=False)
class ShownSite:
    """A candidate or a rejection as a picture shows it.

    Attributes:
      state: "candidate", "applied" or "declined".
      block: path of the block whose nodes it outlines.
      members: ids of the nodes of that block it outlines (a region node stands for all nodes inside it).
      drawn: False where another site's outline is in the way; it is then listed, not outlined.
    """

    record: Candidate | Rejection
    state: str
    block: str
    members: frozenset[int]
    drawn: bool

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def pass_name(self) -> str:
        return self.record.pass_name


def owners(graph: Graph) -> dict[str, Node]:
    """Block path -> the node that owns the block; the top block has no owner."""
    return {block.path: node for node in graph.nodes() for block in node.blocks}


def is_applied(c: Candidate, enabled: Collection[str] | None) -> bool:
    """Whether a candidate is one of those `enabled`, by id (None: all that are not idle)."""
    return not c.idle if enabled is None else c.id in enabled


def drawn_sites(graph: Graph, findings: Findings | None, enabled: Collection[str] | None) -> list[ShownSite]:
    """All sites of the findings, candidates first; `enabled` are the ids of applied candidates (None: all that are not idle)."""
    if findings is None:
        return []
    owner = owners(graph)
    sites: list[ShownSite] = []
    drawn: dict[int, list[ShownSite]] = {}  # node id -> the sites drawn around it
    records = [(c, "applied" if is_applied(c, enabled) else "candidate", c.node_ids) for c in findings.candidates]
    declined = [(r, "declined", frozenset(r.site_ids or r.node_ids)) for r in findings.rejections]
    for record, state, node_ids in (*records, *declined):
        site = _place(graph, owner, record, state, node_ids, drawn)
        sites.append(site)
        for nid in site.members if site.drawn else ():
            drawn.setdefault(nid, []).append(site)
    return sites


def _place(
    graph: Graph,
    owner: dict[str, Node],
    record: Candidate | Rejection,
    state: str,
    node_ids: frozenset[int],
    drawn: dict[int, list[ShownSite]],
) -> ShownSite:
    chains = [_chain(graph, owner, nid) for nid in sorted(node_ids) if nid in graph.node_by_id]
    if not chains:
        return ShownSite(record, state, "", frozenset(), False)
    depth = _shared_depth(chains)
    block = chains[0][depth][0]
    members = frozenset(c[depth][1].id for c in chains if _whole(c[depth][1], node_ids))
    loser = isinstance(record, Rejection) and record.winner is not None
    return ShownSite(record, state, block.path, members, not loser and _fits(state, members, drawn))


def _fits(state: str, members: frozenset[int], drawn: dict[int, list[ShownSite]]) -> bool:
    """Whether there is something to outline, and no other outline in the way."""
    others = {o.id: o for nid in members for o in drawn.get(nid, ())}
    return bool(members) and all(_compatible(state, members, o) for o in others.values())


def _shared_depth(chains: Sequence[Sequence[tuple[Block, Node]]]) -> int:
    """Where the innermost block that is around all of the nodes stands in their chains."""
    depth = 0
    while all(len(c) > depth + 1 for c in chains) and len({c[depth + 1][0].path for c in chains}) == 1:
        depth += 1
    return depth


def _chain(graph: Graph, owner: dict[str, Node], nid: int) -> list[tuple[Block, Node]]:
    """The blocks around a node, outermost first, each with its node that holds (or is) the node asked for."""
    node = graph.node_by_id[nid]
    chain = [(graph.block_of[nid], node)]
    while (up := owner.get(chain[-1][0].path)) is not None:
        chain.append((graph.block_of[up.id], up))
    return chain[::-1]


def _whole(node: Node, node_ids: frozenset[int]) -> bool:
    """A region node is outlined when it, or everything in it, belongs to the site."""
    if node.id in node_ids:
        return True
    return bool(node.blocks) and all(_whole(n, node_ids) for b in node.blocks for n in b.nodes)


def _compatible(state: str, members: frozenset[int], other: ShownSite) -> bool:
    """Outlines may nest, not cross; a declined site inside a candidate would only be noise."""
    if members.isdisjoint(other.members) or members > other.members:
        return True
    return members < other.members and not (state == "declined" and other.state != "declined")
