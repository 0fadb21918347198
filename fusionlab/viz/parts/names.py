"""Names of cards: readable aloud, never an id, a count of nodes or the name of a wrapper."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from fusionlab.fusers.engine.outcomes import Candidate
from fusionlab.graph.cost.cost import quantity
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Node, Value
from fusionlab.graph.program.meshes import collective_axes, collective_bytes
from fusionlab.graph.program.scopes import Source, frames_of, spoken

from .items import Item
from .nodes import PRODUCTS, fused_name, is_light

ArgumentOf = Callable[[int], str]  # id of a value -> the name of the parameter that it holds, or ""
# What libraries call the parameters of every layer.
_ALIKE = frozenset({"kernel", "weight", "scale", "bias", "embedding", "w", "b", "value"})
_TURN = re.compile(r"(.*)turn (\d+)")
_NUMBERED = re.compile(r"(\d+)(.*)")
_INDEX = re.compile(r"\[(['\"]?)([^\]]*?)\1\]")


def program_name(graph: Graph) -> str:
    """The function's name; "lambda · model.py:12" of one that has none."""
    if spoken(graph.name):
        return graph.name
    outermost = [frames[0] for n in graph.nodes() if (frames := frames_of(n))]
    word = "lambda" if "lambda" in graph.name else "program"
    return " · ".join(filter(None, (word, lines_text(outermost))))


def run_name(first: str, last: str) -> str:
    """The name of equal parts in a row: "layer_0 … 23", "blocks[0 … 11]", "relu" where both are called so."""
    if first == last:
        return first
    turn, other = _TURN.fullmatch(first), _TURN.fullmatch(last)
    if turn and other and turn[1] == other[1]:
        return f"{turn[1]}turns {turn[2]} … {other[2]}"
    shared = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    cut = re.split(r"\d*$", shared)[0]
    one, another = (_NUMBERED.match(name[len(cut) :]) for name in (first, last))
    if one and another and one[2] == another[2]:
        return f"{cut}{one[1]} … {another[1]}{one[2]}"
    return f"{first} … {last[len(cut) :]}" if cut else f"{first} … {last}"


def lines_text(sources: Iterable[Source]) -> str:
    """ "model.py:22-24"; the lines of the file that has most of them, "" for none."""
    known = list(sources)
    if not known:
        return ""
    file = Counter(s.file for s in known).most_common(1)[0][0]
    here = [s for s in known if s.file == file]
    lines = sorted({s.line for s in here})
    name = here[0].short.rpartition(":")[0]
    return f"{name}:{lines[0]}" + (f"-{lines[-1]}" if lines[-1] > lines[0] else "")


def parameter_name(path: str) -> str:
    """An argument's path as people write it, without its container: "params['blocks'][3]['q']" -> "blocks[3].q"."""
    path = _INDEX.sub(lambda m: f"[{m[2]}]" if m[2].isdigit() else f".{m[2]}", path)
    path = re.sub(r"\.(?:value|raw_value)\b", "", path)
    return path.partition(".")[2] or path


def shared_parameter(paths: Sequence[str]) -> str:
    """The part that all parameters of a group have in common: "blocks[3]" of blocks[3].q and blocks[3].norm.scale; "" for none."""
    if not paths:
        return ""
    parts = [re.split(r"\.|(?=\[)", p) for p in paths]
    common = [same[0] for same in _same(parts)]
    if len(paths) == 1 or len(common) == len(parts[0]):
        common = common[:-1]
    return "".join(p if p.startswith("[") or not k else f".{p}" for k, p in enumerate(common))


def _same(parts: Sequence[Sequence[str]]) -> Iterable[tuple[str, ...]]:
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            return
        yield column


def short_parameter(name: str) -> str:
    """ "w_out" of "layers[3].w_out", but "q.kernel" of "blocks[3].q.kernel": libraries call all that layers hold alike."""
    parts = re.split(r"\.", name)
    last, before = parts[-1], parts[-2] if len(parts) > 1 else ""
    if last in _ALIKE and before and not before.endswith("]"):
        return f"{before}.{last}"
    return last if re.search(r"[^\W\d]", last) else name


def item_name(item: Item, argument_of: ArgumentOf) -> str:
    """The name of one thing: a site's formula, a product by its parameter, a function, or what it computes."""
    if item.site is not None:
        return _site_name(item.site.record)
    if item.is_region:
        return _region_name(item.main)
    if name := fused_name(item.main):
        return name
    products = [n for n in item.nodes if n.primitive in PRODUCTS]
    return (_product(products[0], argument_of) if products else "") or works_on(item.nodes)


def _site_name(record: object) -> str:
    return record.formula if isinstance(record, Candidate) else str(getattr(record, "pass_name", ""))


def _region_name(node: Node) -> str:
    names = {"scan": "scan", "while": "loop", "cond": "choice", "shard_map": "sharded"}
    function = spoken(node.source.function) if node.source else ""
    kind = names.get(node.primitive, node.primitive)
    return f"{function} ({kind})" if function else kind


def _product(node: Node, argument_of: ArgumentOf) -> str:
    """ "x @ w_out"; "" for a product without a parameter."""
    names = [argument_of(v.id) if isinstance(v, Value) else "" for v in node.inputs[:2]]
    sign = "@" if node.primitive != "conv_general_dilated" else "∗"
    return f" {sign} ".join(short_parameter(n) if n else "x" for n in names) if any(names) else ""


def works_on(nodes: Sequence[Node]) -> str:
    """ "conv_block :182": function and lines of a few nodes; what they compute where no function has a name."""
    solid = [n for n in nodes if not is_light(n)] or list(nodes)
    if all(n.primitive == "add_any" for n in solid):
        return "sum of gradients"
    sources: dict[str, list[Source]] = {}
    for frames in filter(None, map(frames_of, solid)):
        sources.setdefault(spoken(frames[-1].function), []).append(frames[-1])
    function, here = max(sources.items(), key=lambda pair: len(pair[1]), default=("", []))
    lines = lines_text(here).rpartition(":")[2]
    return f"{function} :{lines}" if function and lines else computes(nodes)


def computes(nodes: Sequence[Node]) -> str:
    """ "add", "exp · sum", "where and 7 more": the operations of a few nodes, those that only move data left out."""
    solid = [n for n in nodes if not is_light(n)] or list(nodes)
    words = [w for w, _ in itertools.groupby(_plain(n) for n in solid)]
    if len(words) <= 3:
        return " · ".join(words)
    fused = next(filter(None, map(fused_name, solid)), "")
    return f"{fused or Counter(words).most_common(1)[0][0]} and {len(words) - 1} more"


def sent(nodes: Iterable[Node]) -> str:
    """The collectives among nodes, equal ones counted: "2 × psum over tensor: 16.4 kB"."""
    found = Counter(text for n in nodes if (text := _collective(n)))
    return ", ".join(f"{count} × {text}" if count > 1 else text for text, count in found.items())


def _collective(node: Node) -> str:
    axes = collective_axes(node)
    name = node.primitive.removesuffix("_invariant")  # what JAX makes of a psum where replication is checked
    return f"{name} over {', '.join(axes)}: {quantity(collective_bytes(node))}B" if axes else ""


def _plain(node: Node) -> str:
    if text := _collective(node) or fused_name(node):
        return text
    named = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "select_n": "where", "add_any": "add"}
    return named.get(node.primitive, node.primitive).replace("_", " ")
