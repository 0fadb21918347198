"""The raw layer: the data structures of a traced program. This layer is displayed and rewritten.

A `Graph` is a tree of `Block`s. A block is a straight list of `Node`s, each an equation of the traced program with its
own stable id; `jit` calls are flattened into the block that calls them, while scan, while, cond, shard_map, remat,
custom_jvp and custom_vjp stay nodes that own child blocks. Everything here is immutable; passes return new graphs.

A name is unique in the whole graph: values print as `%12`, nodes are numbered in program order, depth first.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...showing import Shown
from ..jax_compat import has_side_effects
from .scopes import Source, scope_of, source_of


@dataclass(frozen=True, slots=True)
class Value(Shown):
    """An SSA result: made once, by one node (or as a block's input or constant), read any number of times.

    `id` is unique in the graph, and `aval` is what JAX knows of it. `shape` is a tuple of ints, `dtype` a numpy dtype (extended dtypes
    such as PRNG keys keep JAX's dtype object).
    """

    _told = ("name", "shape", "dtype")

    id: int
    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis; () for a token."""
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def dtype(self) -> Any:
        """A numpy dtype; JAX's own object for an extended dtype, such as that of PRNG keys."""
        return getattr(self.aval, "dtype", np.dtype(bool))

    @property
    def name(self) -> str:
        """How it is printed: "%3"."""
        return f"%{self.id}"

    @property
    def nbytes(self) -> int:
        """Size in bytes; extended dtypes count with their item size, tokens with 0."""
        return math.prod(map(int, self.shape)) * int(getattr(self.dtype, "itemsize", 0))

    def __repr__(self) -> str:
        return f"{self.name}:{type_text(self.aval)}"


@dataclass(frozen=True, slots=True, eq=False)
class Literal(Shown):
    """A constant written into an equation: a scalar `val` of type `aval`."""

    _told = ("val", "shape", "dtype")

    val: Any
    aval: Any

    shape = Value.shape
    dtype = Value.dtype

    def __repr__(self) -> str:
        return literal_text(self.val)


Atom = Value | Literal


def values_in(atoms: Iterable[Atom]) -> list[Value]:
    """Those atoms that are values, in order, each as often as it occurs."""
    return [a for a in atoms if isinstance(a, Value)]


@dataclass(frozen=True, eq=False, repr=False)
class Block(Shown):
    """A straight list of nodes: the whole program, a scan body, one branch of a cond, ...

    Attributes:
      path: the block's position, e.g. "" for the top, "n12.body" for the body of node 12.
      label: its owner's name for it ("body", "cond", "branch0", ...).
      inputs: values bound by the caller, in order.
      consts: values bound to arrays captured by the program, with those arrays.
      nodes: in program order.
      outputs: the values that the block returns; an output may be a literal or an input.
      jaxpr: the traced jaxpr this block came from (its debug info and effects are kept when rewriting).
    """

    _listed = "nodes"

    path: str
    label: str
    inputs: tuple[Value, ...]
    consts: tuple[tuple[Value, Any], ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Atom, ...]
    jaxpr: Any = dataclasses.field(repr=False)

    @functools.cached_property
    def producer(self) -> dict[int, Node]:
        """Value id -> the node of this block that makes it."""
        return {v.id: n for n in self.nodes for v in n.outputs}

    @functools.cached_property
    def position(self) -> dict[int, int]:
        """Node id -> its place in the block."""
        return {n.id: i for i, n in enumerate(self.nodes)}

    @functools.cached_property
    def users(self) -> dict[int, tuple[Node, ...]]:
        """Value id -> the nodes of this block that read it, in program order, each once."""
        users: dict[int, dict[int, Node]] = {}
        for n in self.nodes:
            for a in n.inputs:
                if isinstance(a, Value):
                    users.setdefault(a.id, {})[n.id] = n
        return {vid: tuple(ns.values()) for vid, ns in users.items()}

    @functools.cached_property
    def effect_before(self) -> dict[int, Node]:
        """Node with side effects (its id) -> the node of this block whose side effects come just before."""
        with_effects = [n for n in self.nodes if n.id >= 0 and has_side_effects(n.eqn)]
        return {n.id: before for before, n in itertools.pairwise(with_effects)}

    @functools.cached_property
    def returned(self) -> frozenset[int]:
        """Ids of the values this block returns."""
        return frozenset(v.id for v in values_in(self.outputs))

    def __str__(self) -> str:
        return f"block {self.path or 'of the program'}: {len(self.nodes)} nodes, gives {', '.join(map(repr, self.outputs))}"


@dataclass(frozen=True, eq=False)
class Node(Shown):
    """One equation: a primitive applied to inputs, giving outputs; region primitives own child blocks.

    `id` is unique in the graph. `eqn` is JAX's own equation (its variables do NOT name values here; only its params, effects, context
    and source information count). `calls` are the equations of the flattened calls and regions around it, outermost first.
    """

    _told = ("primitive", "inputs", "outputs", "scope", "source")

    id: int
    primitive: str
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    eqn: Any = dataclasses.field(repr=False)
    blocks: tuple[Block, ...] = ()
    calls: tuple[Any, ...] = dataclasses.field(default=(), repr=False)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of JAX's equation, by name."""
        return self.eqn.params

    @property
    def values(self) -> list[Value]:
        """Its inputs that are values, in order: no literals."""
        return [a for a in self.inputs if isinstance(a, Value)]

    @functools.cached_property
    def source(self) -> Source | None:
        """The user's source line of this equation, or None if JAX kept none."""
        return source_of(self.eqn, self.calls)

    @functools.cached_property
    def scope(self) -> str:
        """The module scope: "encoder/layer_3/mlp"; "" at the top. From jax.named_scope and the libraries' modules."""
        return scope_of(self.eqn, self.calls)

    def __repr__(self) -> str:
        outs = ", ".join(map(repr, self.outputs))
        return f"{outs} = {self.primitive} {' '.join(a.name if isinstance(a, Value) else repr(a) for a in self.inputs)}"


def all_nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes and those of their child blocks."""
    for node in nodes:
        yield node
        for block in node.blocks:
            yield from all_nodes(block.nodes)


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


@functools.cache
def dtype_text(dtype: Any) -> str:
    """ "f32", "bf16", "i8", "bool", "key<fry>": JAX's own short spelling."""
    name = str(getattr(dtype, "name", dtype))
    for long, short in sorted(_SHORT.items(), key=lambda kv: -len(kv[0])):
        if name.startswith(long) and name[len(long) :].isdigit():
            return short + name[len(long) :]
    return name


def type_text(aval: Any) -> str:
    """ "f32[64,128]"."""
    if not hasattr(aval, "shape"):
        return str(aval)
    return f"{dtype_text(aval.dtype)}[{','.join(map(str, aval.shape))}]"


def literal_text(val: Any) -> str:
    """A scalar constant as short stable text."""
    arr = np.asarray(val)
    if arr.ndim:
        return f"const[{','.join(map(str, arr.shape))}]"
    item = arr.item() if arr.dtype.kind in "biuc" else float(arr) if arr.dtype.kind in "fV" else val
    return f"{item:.9g}" if isinstance(item, float) else str(item)
