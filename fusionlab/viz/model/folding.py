"""Folding: from a program of thousands of nodes to a tree of groups of which a page is visible.

Module scopes, regions (scan, cond, ...) and sites become groups; runs of identical neighbours are shown once with their
count; what is still too long is cut into chunks. A scope that a program enters twice (forward, then backward) gives two
groups, because groups are runs in program order: so the folded graph stays as acyclic as the program.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from fusionlab.graph.primitives import having
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Atom, Block, Literal, Node, literal_text
from fusionlab.graph.program.meshes import region_mesh_text

from .groups import Group, Item, NodeBox, has_site, nodes_in, shown_nodes
from .sites import ShownSite

_FAN_OUT = 32
_WORTH = 4  # repeats of fewer nodes are quicker read than a frame with a count
BACKWARD = " (backward)"
# Nodes that move or convert data; they do not decide where a site stands.
LAYOUT_OPS = having("layout", "cast", "copy", "variance", "precision") | {
    "iota",
    "slice",
    "rev",
    "stop_gradient",
    "name",
}


class FoldFacts:
    """What folding learns of a graph that no toggle changes: kept, so that folding it again asks JAX's records nothing twice."""

    def __init__(self) -> None:
        self.signatures: dict[object, int] = {}
        self.of_node: dict[int, int] = {}
        # By the identity of objects that the graph keeps alive: thousands of nodes share a few.
        self.types: dict[int, int] = {}
        self.stacks: dict[int, bool] = {}
        self.paths: dict[tuple[str, str], tuple[str, ...]] = {}

    def signature(self, node: Node) -> int:
        """The same number for nodes of the same primitive, types and constants."""
        found = self.of_node.get(node.id)
        if found is None:
            ins = tuple(
                (literal_text(a.val), self.type(a)) if isinstance(a, Literal) else self.type(a) for a in node.inputs
            )
            key = (node.primitive, ins, tuple(map(self.type, node.outputs)))
            found = self.of_node[node.id] = self.number(key)
        return found

    def type(self, atom: Atom) -> int:
        """The same number for the same shape and dtype."""
        found = self.types.get(id(atom.aval))
        if found is None:
            found = self.types[id(atom.aval)] = self.number(("type", atom.shape, atom.dtype))
        return found

    def number(self, key: object) -> int:
        """The same number for the same key."""
        return self.signatures.setdefault(key, len(self.signatures))

    def is_backward(self, node: Node) -> bool:
        """True for what reverse-mode differentiation added: JAX wraps its scopes in `transpose(...)`."""
        return any(self._transposed(eqn.source_info.name_stack) for eqn in (*node.calls, node.eqn))

    def _transposed(self, stack: Any) -> bool:
        found = self.stacks.get(id(stack))
        if found is None:
            found = self.stacks[id(stack)] = "transpose(" in str(stack)
        return found

    def below(self, scope: str, outer: str) -> tuple[str, ...]:
        """The names of a scope below another one."""
        found = self.paths.get((scope, outer))
        if found is None:
            found = self.paths[scope, outer] = _below(scope, outer)
        return found


def fold_graph(
    graph: Graph, sites: Collection[ShownSite] = (), *, max_nodes: int = 60, known: FoldFacts | None = None
) -> Group:
    """The tree of a graph's groups, all closed but the root; `opening.Tree` decides which are open.

    Args:
      graph: the program.
      sites: as `drawn_sites` gives them; each one drawn is a group.
      max_nodes: a block of more nodes than this that has no module scopes is told apart by functions.
      known: what was learnt of this graph before.
    """
    builder = _Builder(sites, max_nodes, known or FoldFacts())
    return Group("", "root", graph.name, builder.block(graph.top, ""), open=True)


class _Builder:
    """Builds the tree; holds what all levels share: sites by block, ids given out, what is known of the graph."""

    def __init__(self, sites: Collection[ShownSite], max_nodes: int, known: FoldFacts):
        self.max_nodes = max_nodes
        self.known = known
        self.by_block: dict[str, list[ShownSite]] = {}
        for site in sites:
            if site.drawn:
                self.by_block.setdefault(site.block, []).append(site)
        self.used: dict[str, int] = {}

    def fresh(self, wanted: str) -> str:
        """The wanted id, or wanted~2, wanted~3 ... when a scope is entered again."""
        n = self.used[wanted] = self.used.get(wanted, 0) + 1
        return wanted if n == 1 else f"{wanted}~{n}"

    def block(self, block: Block, outer_scope: str) -> list[Item]:
        entries = self.entries(block, outer_scope)
        # Without module scopes, the functions of the source tell the parts apart.
        if len(entries) > self.max_nodes and not any(path for path, _ in entries):
            entries = [((_function(item),), item) for _, item in entries]
            if len({path for path, _ in entries}) > 1:
                return self.nest(entries, 0, "", "function")
            entries = [((), item) for _, item in entries]
        return self.nest(entries, 0, outer_scope, "scope")

    def entries(self, block: Block, outer_scope: str) -> list[tuple[tuple[str, ...], Item]]:
        """The block's nodes in program order, each with its scope below the block's; a site stands where it ends."""
        sites = sorted(self.by_block.get(block.path, ()), key=lambda s: len(s.members))
        item_of: dict[int, tuple[tuple[str, ...], Item]] = {}
        order = {n.id: i for i, n in enumerate(block.nodes)}
        for node in block.nodes:
            item_of[node.id] = (self.known.below(node.scope, outer_scope), self.item(node))
        for site in sites:  # small ones first: a larger one takes the finished group in
            *_, last = ids = sorted(site.members, key=order.__getitem__)
            if len(ids) == 1 and isinstance(item_of[last][1], NodeBox):
                item_of[last][1].site = site
                continue
            inside = [block.nodes[order[nid]] for nid in ids if nid in item_of]
            item_of[last] = self.site_group(site, inside, item_of)
        return [item_of[nid] for nid in sorted(item_of, key=order.__getitem__)]

    def site_group(
        self, site: ShownSite, nodes: list[Node], item_of: dict[int, tuple[tuple[str, ...], Item]]
    ) -> tuple[tuple[str, ...], Group]:
        """A site as a group that takes its nodes' items in, and the scope that they share; layout ops may come from others."""
        heavy = [n for n in nodes if n.primitive not in LAYOUT_OPS]
        path = _common([item_of[n.id][0] for n in heavy or nodes])
        inside = [item_of.pop(n.id)[1] for n in nodes]
        return path, Group(self.fresh(site.id), "site", site.pass_name, inside, site=site)

    def item(self, node: Node) -> Item:
        if not node.blocks:
            return NodeBox(node)
        gid = self.fresh(f"n{node.id}")
        children: list[Item]
        if len(node.blocks) == 1:
            children = self.block(node.blocks[0], node.scope)
        else:
            children = [
                Group(f"{gid}.{b.label}", "branch", b.label, self.block(b, node.scope), node=None)
                for b in node.blocks
                if b.nodes
            ]
        return Group(gid, "region", region_label(node), children, node=node)

    def nest(self, entries: list[tuple[tuple[str, ...], Item]], depth: int, prefix: str, kind: str) -> list[Item]:
        items: list[Item] = []
        i = 0
        while i < len(entries):
            path = entries[i][0]
            if len(path) <= depth:
                items.append(entries[i][1])
                i += 1
                continue
            j = i
            while j < len(entries) and entries[j][0][: depth + 1] == path[: depth + 1]:
                j += 1
            full = f"{prefix}/{path[depth]}" if prefix else path[depth]
            children = self.nest(entries[i:j], depth + 1, full, kind)
            items.append(self.scope_group(full, path[depth], children, kind, depth))
            i = j
        return self.chunk(self.repeats(items, prefix), prefix)

    def scope_group(self, full: str, label: str, children: list[Item], kind: str, depth: int) -> Item:
        only = children[0] if len(children) == 1 else None
        if isinstance(only, NodeBox):  # a frame around one box says nothing
            return only
        if isinstance(only, Group) and only.kind in ("scope", "function") and only.count == 1:
            only.label = f"{label}/{only.label}"
            return only
        backward = depth == 0 and kind == "scope" and all(map(self.known.is_backward, shown_nodes(children)))
        return Group(self.fresh(full), kind, label + BACKWARD if backward else label, children)

    # Repeats -------------------------------------------------------------------------------------------------------
    def signature(self, item: Item) -> int:
        if isinstance(item, NodeBox):
            number = self.known.signature(item.node)
            return number if item.site is None else self.known.number((number, _state(item.site)))
        if item._signature is None:
            region = item.node.primitive if item.node is not None else ""
            shown = item.label if item.kind in ("region", "branch") else ""
            inside = tuple(map(self.signature, item.children))
            item._signature = self.known.number((item.kind, region, shown, item.count, _state(item.site), inside))
        return item._signature

    def repeats(self, items: list[Item], prefix: str) -> list[Item]:
        """Identical neighbours (one item, or a sequence of items) once, with their count."""
        if len(items) < 2:
            return items
        sigs = [self.signature(i) for i in items]
        where: dict[int, list[int]] = {}
        for i, s in enumerate(sigs):
            where.setdefault(s, []).append(i)
        out: list[Item] = []
        i = 0
        while i < len(items):
            period, count = _best_repeat(sigs, i, where[sigs[i]], items)
            if count < 2:
                out.append(items[i])
                i += 1
                continue
            units = [items[i + k * period : i + (k + 1) * period] for k in range(count)]
            out.append(self.run(units, prefix))
            i += period * count
        return out

    def run(self, units: list[list[Item]], prefix: str) -> Group:
        first = units[0]
        if len(first) == 1 and isinstance(first[0], Group) and first[0].count == 1:
            group, last = first[0], units[-1][0]
            assert isinstance(last, Group)
            if last.label != group.label:
                group.label = f"{group.label.removesuffix(BACKWARD)} … {last.label}"
            # Copies hold what the group holds, so that members pair up: its own region node comes first.
            group.hidden = [[u] for u in (unit[0] for unit in units[1:])]
            group.count = len(units)
            group.changed()
            return group
        gid = self.fresh(f"{prefix}/run" if prefix else "run")
        return Group(gid, "run", "block", list(first), count=len(units), hidden=units[1:])

    # Chunks --------------------------------------------------------------------------------------------------------
    def chunk(self, items: list[Item], prefix: str) -> list[Item]:
        """Cuts long stretches without sites into groups, so that a level never has more than a page of boxes."""
        if len(items) <= _FAN_OUT + 8:
            return items
        out: list[Item] = []
        stretch: list[Item] = []
        for item in [*items, None]:
            if item is not None and not has_site(item):
                stretch.append(item)
                continue
            out.extend(self.cut(stretch, prefix) if len(stretch) > 6 else stretch)
            stretch = []
            if item is not None:
                out.append(item)
        return out

    def cut(self, items: list[Item], prefix: str) -> list[Item]:
        levels = max(1, math.ceil(math.log(len(items)) / math.log(_FAN_OUT)))
        length = math.ceil(len(items) / math.ceil(len(items) ** (1 / levels))) if levels > 1 else len(items)
        pieces = [items[i : i + length] for i in range(0, len(items), length)]
        return [self.piece(p, prefix) for p in pieces]

    def piece(self, items: list[Item], prefix: str) -> Item:
        if len(items) == 1:
            return items[0]
        gid = self.fresh(f"{prefix}/part" if prefix else "part")
        label = f"{sum(map(nodes_in, items)):,} nodes"
        return Group(gid, "chunk", label, self.cut(items, gid) if len(items) > _FAN_OUT else items)


def region_label(node: Node) -> str:
    """A region by what it does: "scan, 12 steps", "cond", "relu (custom_jvp)", "shard_map, mesh data=2 x tensor=4"."""
    kind = {"custom_jvp_call": "custom_jvp", "custom_vjp_call": "custom_vjp", "checkpoint": "remat"}.get(
        node.primitive, node.primitive
    )
    if kind == "scan":
        return f"scan, {node.params.get('length')} steps"
    if mesh := region_mesh_text(node):
        return f"{kind}, {mesh}"
    name = function_name(node.blocks[0]) if kind.startswith("custom_") else node.params.get("name")
    return f"{name} ({kind})" if isinstance(name, str) and name else kind


def function_name(block: Block) -> str:
    """The name of the function a block was traced from; "" when JAX kept none."""
    jaxpr = getattr(block.jaxpr, "jaxpr", block.jaxpr)
    info = str(getattr(getattr(jaxpr, "debug_info", None), "func_src_info", "") or "")
    return info.partition(" at ")[0].strip()


def _state(site: ShownSite | None) -> tuple[str, ...]:
    return () if site is None else (site.pass_name, site.state, getattr(site.record, "code", ""))


def _below(scope: str, outer: str) -> tuple[str, ...]:
    if outer and (scope == outer or scope.startswith(outer + "/")):
        scope = scope[len(outer) + 1 :]
    return tuple(scope.split("/")) if scope else ()


def _common(paths: list[tuple[str, ...]]) -> tuple[str, ...]:
    first = paths[0]
    for n in range(len(first), 0, -1):
        if all(p[:n] == first[:n] for p in paths):
            return first[:n]
    return ()


def _function(item: Item) -> str:
    while isinstance(item, Group):
        if item.node is not None:
            break
        item = item.children[-1]
    source = item.node.source if item.node is not None else None
    parts = [p for p in source.function.split(".") if not p.startswith("<")] if source else []
    return parts[-1] if parts else ""


def _best_repeat(sigs: list[int], start: int, positions: list[int], items: list[Item]) -> tuple[int, int]:
    """The (period, count) that covers most from `start`; (1, 1) when nothing worth folding repeats there."""
    best = (1, 1)
    n = len(sigs)
    tried = 0
    for p in positions:
        period = p - start
        if period <= 0:
            continue
        if 2 * period > n - start or tried >= 64:
            break
        tried += 1
        unit = sigs[start:p]
        count = 1
        while sigs[start + count * period : start + (count + 1) * period] == unit:
            count += 1
        if count < 2:
            continue
        nodes = sum(map(nodes_in, items[start:p]))
        worth = nodes >= _WORTH or nodes * count >= 3 * _WORTH
        if worth and period * count > best[0] * best[1]:
            best = (period, count)
    return best
