"""The program as compiled by XLA: the kernels of the module, mapped to the Graph's nodes, many to many.

`xla_view` compiles the program with every equation tagged by its node's number (`tagged`), so that the mapping is read and not guessed.
`read_hlo` takes existing HLO text; without tags, nodes are found by JAX's metadata: the primitive, the source line and the
scope.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from ...showing import Shown
from ..primitives import having
from ..program.graph import Graph
from ..program.ir import Node
from ..program.scopes import Source, clean_scope, in_backward, kind_of_file, source_among, split_scope
from ..program.symbolic import needs_numbers
from ..program.trace import trace
from ..settings import as_function
from .contents import Contents
from .hlo_text import CONTROL, Instruction, Module, element_type, inside, instruction_kind, parse_hlo, running
from .tagging import tag_in, tagged_jaxpr


@dataclass(frozen=True, repr=False)
class ModuleKernel(Shown):
    """One instruction of the compiled module that launches a kernel, or controls a loop or branch.

    Attributes:
      name: XLA's name for it ("loop_add_fusion.3").
      kind: "fusion", "library" (cuBLAS, cuDNN, oneDNN, Eigen, ...), "custom" (any other custom call), "copy", "collective",
        "unfused" (one operation alone) or "loop control" (while, conditional: no kernel).
      target: the code that runs it, in XLA's terms: "kLoop", "__triton_gemm", "__cublas$gemm", an operation's name.
      nodes: ids of the nodes whose operations are in it, ascending.
      inferred: it has no metadata on its origin (a fill or a copy of XLA's own), and `nodes` are the readers of its result, or
        else its operands.
      sources: the nodes' lines, in order of the nodes; the lines in the metadata if they have none.
      computation: the computation that contains it: the entry, or the body of a loop or branch.
    """

    _told = ("name", "kind", "target", "nodes", "sources")

    name: str
    kind: str
    target: str
    nodes: tuple[int, ...]
    sources: tuple[Source, ...]
    computation: str
    inferred: bool = False

    def __str__(self) -> str:
        nodes = ", ".join(f"n{i}" for i in self.nodes[:8]) + (", ..." if len(self.nodes) > 8 else "")
        lines = ", ".join(map(str, self.sources[:3])) + (", ..." if len(self.sources) > 3 else "")
        origin = f"{'for' if self.inferred else 'of'} {nodes}" if nodes else "of no node"
        return f"{self.name} ({self.kind}, {self.target}) {origin}{f' at {lines}' if lines else ''}"


@dataclass(frozen=True, eq=False, repr=False)
class CompiledModule(Shown):
    """A compiled module mapped to a Graph.

    Attributes:
      module: XLA's name for the module.
      kernels: every kernel and loop control, in the order of the text.
      graph: the program whose nodes these are.
      tagged: the module carries the nodes' numbers; else they were found by primitive, source line and scope.
      views: node id -> operations of it that launch nothing ("bitcast", "constant", "parameter").
    """

    _listed = "kernels"

    module: str
    kernels: tuple[ModuleKernel, ...]
    graph: Graph
    tagged: bool
    views: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @functools.cached_property
    def _of_node(self) -> dict[int, tuple[ModuleKernel, ...]]:
        found: dict[int, list[ModuleKernel]] = {}
        for kernel in self.kernels:
            for i in kernel.nodes:
                found.setdefault(i, []).append(kernel)
        return {i: tuple(kernels) for i, kernels in found.items()}

    def kernels_of(self, *nodes: Node | int) -> tuple[ModuleKernel, ...]:
        """The kernels that contain one or several nodes, each once, in order, without loop control."""
        ids = {n if isinstance(n, int) else n.id for n in nodes}
        return tuple(k for k in self.kernels if k.kind != CONTROL and not ids.isdisjoint(k.nodes))

    def fate(self, node: Node | int) -> str:
        """The fate of a node, in a sentence."""
        nid = node if isinstance(node, int) else node.id
        own = [k for k in self._of_node.get(nid, ()) if not k.inferred]
        if own:
            return "; ".join(f"in {k.name} ({k.kind}, {k.target}) {_company(k, nid)}" for k in own)
        if nid in self.views:
            return f"no kernel of its own: {', '.join(self.views[nid])}"
        return "removed: folded into a constant, merged with an equal node, or simplified away"

    @property
    def counts(self) -> dict[str, int]:
        """Kind -> number of kernels, with a loop's body counted once; loop control does not count."""
        return dict(Counter(k.kind for k in self.kernels if k.kind != CONTROL))

    @property
    def launches(self) -> int:
        """The sum of `counts`."""
        return sum(self.counts.values())

    def __repr__(self) -> str:
        return f"<Compiled {self.module}: {self.launches} kernels{_in_words(self.counts)}>"

    def __str__(self) -> str:
        return "\n".join([repr(self)[1:-1], *(f"  {k}" for k in self.kernels)])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        kernels = [asdict(k) | {"sources": [str(s) for s in k.sources], "nodes": list(k.nodes)} for k in self.kernels]
        return {"module": self.module, "tagged": self.tagged, "counts": self.counts, "kernels": kernels}


def _company(kernel: ModuleKernel, node: int) -> str:
    others = len(kernel.nodes) - (node in kernel.nodes)
    return f"with {others} other node{'s' if others > 1 else ''}" if others else "alone"


def _in_words(counts: Mapping[str, int]) -> str:
    listing = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    return f" ({listing})" if listing else ""


def xla_view(
    program: Callable | Graph,
    *args: Any,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> CompiledModule:
    """Compiles a program for this process's default device, or the mesh of its arguments, and maps the compiled kernels to the nodes.

    Args:
      program: a function `jax.jit` accepts, with its arguments; or a Graph, without any.
      *args, **kwargs, static_argnums, static_argnames: as for `fusionlab.trace`. Nothing is run and nothing donated.

    Raises:
      TraceError, ArgumentError: as for `fusionlab.trace`. Errors of the compiler propagate unchanged.
    """
    if not isinstance(program, Graph):
        program = trace(program, *args, static_argnums=static_argnums, static_argnames=static_argnames, **kwargs)
    needs_numbers(program, "a compilation by XLA")
    return read_hlo(compiled_text(tagged_jaxpr(program), program), program)


def compiled_text(closed: Any, graph: Graph) -> str:
    """Optimised HLO text of a closed jaxpr that takes the graph's inputs."""
    run = as_function(closed)

    def program(*args: Any) -> Any:
        return run(*args)

    program.__name__ = program.__qualname__ = graph.name
    values, shardings = graph.top.inputs, graph.in_shardings or (None,) * len(graph.top.inputs)
    examples = (_example(v.aval, sharding) for v, sharding in zip(values, shardings, strict=True))
    with metadata_of_its_own():
        return jax.jit(program).lower(*examples).compile().as_text() or ""


@contextlib.contextmanager
def metadata_of_its_own() -> Iterator[None]:
    """A context in which JAX's persistent cache never returns a program with the metadata of another one.

    The cache's key normally excludes metadata, so an equal program without these numbers, or with others, would match.
    """
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _example(aval: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False), sharding=sharding)


def read_hlo(text: str, graph: Graph) -> CompiledModule:
    """Maps optimised HLO text of `graph`'s program, with or without tags. Text that is not HLO gives no kernels."""
    module = parse_hlo(text)
    tagged = any(tag_in(i.op_name) is not None for i in module.instructions.values())
    reader = _Reader(module, graph, tagged)
    kernels, views = [], {}
    for computation, instruction in running(module):
        if kind := instruction_kind(instruction):
            kernels.append(reader.kernel(computation, instruction, kind))
        else:
            for i in sorted(reader.own(instruction)):
                views.setdefault(i, []).append(instruction.opcode)
    return CompiledModule(
        module.name, tuple(kernels), graph, tagged, {i: tuple(dict.fromkeys(v)) for i, v in views.items()}
    )


_Step = Callable[[Instruction], list[Instruction]]
_PRODUCTS = having("product")
_VIEWS_AND_CASTS = having("layout", "cast") | {"copy"}


def _multiplies(instruction: Instruction) -> bool:
    """Whether an instruction is a product, plain or a library's."""
    libraries = ("__cublas", "__cudnn$conv", "__onednn$matmul")
    return instruction.opcode in ("dot", "convolution") or instruction.target.startswith(libraries)


class _Reader:
    """The nodes of a module's instructions."""

    def __init__(self, module: Module, graph: Graph, tagged: bool) -> None:
        self.module, self.graph, self.tagged = module, graph, tagged
        self.users: dict[str, list[Instruction]] = {}
        self.caller: dict[str, Instruction] = {}  # of the computation that an instruction stands in
        for instruction in module.instructions.values():
            for name in instruction.operands:
                self.users.setdefault(name, []).append(instruction)
            for computation in (c for names in instruction.called.values() for c in names):
                self.caller |= {i.name: instruction for i in module.computations.get(computation, ())}
        self.near = None if tagged else _ByMetadata(graph)
        self.found: dict[str, frozenset[int]] = {}
        # Thousands of instructions have one of few origins.
        self._sources: dict[tuple[int, str, int], Source | None] = {}
        self._near: dict[tuple[str, int, str, int], frozenset[int]] = {}

    def kernel(self, computation: str, instruction: Instruction, kind: str) -> ModuleKernel:
        nodes = self.nodes(instruction)
        inferred = not nodes
        if inferred:
            nodes = self.around(instruction, self.readers) or self.around(instruction, self.read)
        target = instruction.target or instruction.fusion_kind or instruction.opcode
        ids, sources = tuple(sorted(nodes)), self.sources(instruction, nodes)
        return ModuleKernel(instruction.name, kind, target, ids, sources, computation, inferred and bool(nodes))

    def sources(self, instruction: Instruction, nodes: Iterable[int]) -> tuple[Source, ...]:
        """The lines of an instruction's nodes, each once; the lines in the metadata if the nodes have none."""
        found = self.lines(frozenset(nodes))
        if not found:
            sources = map(self.source, inside(self.module, instruction))
            found = tuple(dict.fromkeys(s for s in sources if s is not None))
        return found

    def source(self, instruction: Instruction) -> Source | None:
        """The line of an instruction, of those in its metadata."""
        key = instruction.frame, instruction.file, instruction.line
        if key not in self._sources:
            self._sources[key] = source_among(self.module.origin(instruction))
        return self._sources[key]

    @functools.cache  # noqa: B019 - one is made for one reading
    def lines(self, nodes: frozenset[int]) -> tuple[Source, ...]:
        """The lines of nodes, each once."""
        known = (self.graph.node_by_id[i].source for i in sorted(nodes))
        return tuple(dict.fromkeys(s for s in known if s is not None))

    def nodes(self, instruction: Instruction) -> frozenset[int]:
        """The nodes of an instruction and of all it calls, except a loop's body, which has kernels of its own."""
        if instruction.name not in self.found:
            whole = instruction_kind(instruction) != CONTROL and instruction.called
            parts = inside(self.module, instruction) if whole else (instruction,)
            own = {self.own(i) for i in parts if i.opcode != "parameter"}
            self.found[instruction.name] = frozenset().union(*own)
        return self.found[instruction.name]

    def own(self, instruction: Instruction) -> frozenset[int]:
        if self.near is not None:
            key = instruction.op_name, instruction.frame, instruction.file, instruction.line
            if key not in self._near:
                self._near[key] = self.near.nodes(instruction.op_name, self.source(instruction))
            return self._near[key]
        tag = tag_in(instruction.op_name)
        if tag not in self.graph.node_by_id:
            return frozenset()
        return frozenset({tag, *(self.viewed_product(tag) if _multiplies(instruction) else ())})

    def viewed_product(self, nid: int) -> Iterable[int]:
        """The product of which a node's result is a view: XLA writes a transposed product as one product, named by the transpose."""
        node: Node | None = self.graph.node_by_id[nid]
        views: list[int] = []
        while node is not None and node.primitive in _VIEWS_AND_CASTS:
            views.append(node.id)
            node = self.graph.block_of[node.id].producer.get(getattr(node.inputs[0], "id", -1))
        return (*views, node.id) if node is not None and node.primitive in _PRODUCTS else ()

    def around(
        self, instruction: Instruction, step: _Step, nodes_of: Callable[[Instruction], frozenset[int]] | None = None
    ) -> frozenset[int]:
        """The nodes of the nearest instructions in one direction that have any."""
        found: set[int] = set()
        waiting, seen = [*step(instruction)], {instruction.name}
        while waiting:
            here = waiting.pop()
            if here.name in seen:
                continue
            seen.add(here.name)
            nodes = (nodes_of or self.nodes)(here)
            found |= nodes
            waiting += () if nodes else step(here)
        return frozenset(found)

    def readers(self, instruction: Instruction) -> list[Instruction]:
        return self.users.get(instruction.name) or self.calling(instruction)

    def read(self, instruction: Instruction) -> list[Instruction]:
        known = self.module.instructions
        return [known[name] for name in instruction.operands if name in known] or self.calling(instruction)

    def calling(self, instruction: Instruction) -> list[Instruction]:
        """The loop, branch or call whose body contains an instruction, where the body's results are read and its inputs come from."""
        return [self.caller[instruction.name]] if instruction.name in self.caller else []


@dataclass(frozen=True, repr=False)
class Origin(Shown):
    """What computes the content of a buffer of a compiled module.

    Attributes:
      nodes: ids of the nodes that compute it, ascending.
      sources: their lines, as of a `ModuleKernel`.
      argument: the argument that it is, or is a copy of: "params['w']"; "" for none. Its nodes are those that read it.
      type: of the buffer, as in the text: "f32[8,16]"; "" where the text has none.
    """

    nodes: tuple[int, ...]
    sources: tuple[Source, ...]
    argument: str = ""
    type: str = ""


class Origins:
    """The origin of each buffer of a compiled module: HLO, as text or read, with the graph of its program, with or without tags.

    JAX keeps one and the same line for all that a function makes of a tree's leaves: hundreds of nodes are then near to each of
    hundreds of buffers, so what is found for a set of nodes is kept.
    """

    def __init__(self, module: Module | str, graph: Graph) -> None:
        self.module = parse_hlo(module) if isinstance(module, str) else module
        tagged = any(tag_in(i.op_name) is not None for i in self.module.instructions.values())
        self._graph, self._reader = graph, _Reader(self.module, graph, tagged)
        self._contents = Contents(self.module, lambda i: bool(self._plain(self._reader.own(i))))
        self._arguments = {
            i.name for i in self.module.computations.get(self.module.entry, ()) if i.opcode == "parameter"
        }
        self._by_line: dict[Source | None, list[Node]] = {}
        for node in graph.nodes():
            if node.source is not None:
                self._by_line.setdefault(node.source, []).append(node)

    @property
    def unknown_lines(self) -> float:
        """The share of the user's lines in the module's metadata that no node has: of a module compiled before its source was edited."""
        found = set(map(self._reader.source, self.module.instructions.values()))
        places = {(s.file, s.line) for s in found if s is not None and kind_of_file(s.file) == "user"}
        known = {(s.file, s.line) for s in self._by_line if s is not None}
        return len(places - known) / len(places) if places else 0.0

    def of(self, name: str, index: tuple[int, ...] = ()) -> Origin:
        """The origin of an instruction's result, or of an element of its tuple."""
        named = self.module.instructions.get(name)
        written = self._contents.written(name, index)
        if named is None or written is None:
            return Origin((), ())
        argument = written.op_name if written.name in self._arguments else ""
        reader, shape = self._reader, element_type(named.type, index)
        nodes = self._products(written) or self._plain(reader.own(written)) or self._on_line(written)
        nodes = nodes or self._plain(reader.nodes(named))
        nodes = nodes or reader.own(written)
        for nodes_of in (reader.nodes, self._on_line):
            for step in (reader.readers, reader.read):
                nodes = nodes or reader.around(named, step, nodes_of)
        ids = tuple(sorted(self._fitting(nodes, shape)))
        return Origin(ids, reader.sources(written, ids), argument, shape)

    def _products(self, written: Instruction) -> frozenset[int]:
        """Of a product that is named by views of its result: the product."""
        own = self._reader.own(written) if _multiplies(written) else ()
        return frozenset(product for n in own for product in [*self._reader.viewed_product(n)][-1:])

    def _on_line(self, written: Instruction) -> frozenset[int]:
        """The nodes of an instruction's line: JAX lowers some primitives to others, as a logistic to a division."""
        return self._on(self._reader.source(written), "transpose(" in written.op_name)

    @functools.cache  # noqa: B019 - one is made for one reading
    def _on(self, source: Source | None, backward: bool) -> frozenset[int]:
        nodes = [n for n in self._by_line.get(source, ()) if in_backward(n) == backward]
        return self._plain(frozenset(n.id for n in [n for n in nodes if n.primitive not in _VIEWS_AND_CASTS] or nodes))

    def _fitting(self, nodes: frozenset[int], shape: str) -> frozenset[int]:
        """Those with a result of the buffer's size, or of one of its rows, which a loop writes one by one; all where none has."""
        numbers = [int(n) for n in re.findall(r"\d+", shape.partition("[")[2])]
        return self._of_size(nodes, frozenset({math.prod(numbers), math.prod(numbers[1:])})) or nodes

    @functools.cache  # noqa: B019 - one is made for one reading
    def _of_size(self, nodes: frozenset[int], sizes: frozenset[int]) -> frozenset[int]:
        results = ((n, v) for n in nodes for v in self._graph.node_by_id[n].outputs)
        return frozenset(n for n, v in results if math.prod(v.shape) in sizes)

    @functools.cache  # noqa: B019 - one is made for one reading
    def _plain(self, nodes: frozenset[int]) -> frozenset[int]:
        """Those that are no regions: a region has the line of its call, its nodes have theirs."""
        return frozenset(n for n in nodes if not self._graph.node_by_id[n].blocks)


class _ByMetadata:
    """Nodes by JAX's own metadata of an operation: its primitive, its line, its scope, and whether it is in a backward pass."""

    def __init__(self, graph: Graph) -> None:
        self.at: dict[tuple[str, str, int], list[Node]] = {}
        for node in graph.nodes():
            for primitive in (node.primitive, *(("",) if node.blocks else ())):
                self.at.setdefault(_place(primitive, node.source), []).append(node)

    def nodes(self, op_name: str, source: Source | None) -> frozenset[int]:
        if not op_name:
            return frozenset()
        *scopes, primitive = split_scope(op_name)
        # What a region does besides its body has the region's line, and primitives that may not stand there.
        found = self.at.get(_place(primitive, source)) or self.at.get(_place("", source), [])
        scope = clean_scope("/".join(s for s in scopes if not s.startswith(("jit(", "pjit("))))
        backward = "transpose(" in op_name
        for wanted in (lambda n: in_backward(n) == backward, lambda n: n.scope == scope):
            found = [n for n in found if wanted(n)] or found
        return frozenset(n.id for n in found)


def _place(primitive: str, source: Source | None) -> tuple[str, str, int]:
    return (primitive, source.file, source.line) if source is not None else (primitive, "", 0)
