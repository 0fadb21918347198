"""A step's result as its user sees it, its parts, and which of its numbers is the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from fusionlab.errors import ArgumentError
from fusionlab.graph.calls.parts import CallResult, flattened, keystr
from fusionlab.graph.dtypes import is_float

Loss = str | Callable[[Any], Any] | None
_DEPTH = 3  # how far into a result the state is looked for


@dataclass(frozen=True)
class Leaf:
    """An array's place: its number among the arrays of a call or of its result, its name, shape and dtype."""

    at: int
    name: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def text(self) -> str:
        """ "out[1]: float32[8,4]"."""
        return f"{self.name}: {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class Other:
    """A leaf that is no array: equal to any other."""

    name: str


class Result:
    """A step's result as its user sees it, with a `Leaf` at each array; what is neither array nor number is an `Other`."""

    def __init__(self, shape: Any) -> None:
        rest = shape.rest if isinstance(shape, CallResult) else None
        arrays = shape.arrays if rest is not None else jax.tree.leaves(shape)
        self._structure = rest.tree if rest is not None else jax.tree.structure(shape)
        self._kinds = rest.leaves if rest is not None else ("array",) * len(arrays)
        names = shape.leaf_names if rest is not None else ["out" + keystr(p) for p, _ in flattened(shape)[0]]
        self.leaves = [Leaf(i, n, tuple(x.shape), x.dtype) for i, (n, x) in enumerate(zip(names, arrays, strict=True))]
        self.tree = self.tree_of(self.leaves)

    def tree_of(self, arrays: Sequence[Any]) -> Any:
        values = iter(arrays)
        return jax.tree.unflatten(self._structure, [next(values) if k == "array" else Other("") for k in self._kinds])

    def nodes(self) -> Iterator[tuple[int, str, Any]]:
        """(depth, path, part) of the result, the whole of it first, then what is deeper in it."""
        level: list[tuple[str, Any]] = [("out", self.tree)]
        for depth in range(_DEPTH + 1):
            yield from ((depth, path, node) for path, node in level)
            level = [(path + key, child) for path, node in level for key, child in _children(node)]


def _children(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, Leaf | Other):
        return []
    return [
        (keystr(path), child)
        for path, child in jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    ]


def may_be_loss(tree: Any) -> bool:
    """Whether an argument is one float, as the loss is."""
    return isinstance(tree, Leaf) and tree.shape == () and is_float(tree.dtype)


def leaves_of(tree: Any) -> list[Leaf]:
    """The arrays' places in a tree, in order."""
    return [x for x in jax.tree.leaves(tree) if isinstance(x, Leaf)]


def is_same(a: Any, b: Any) -> bool:
    """Whether two trees agree in structure, shapes and dtypes, and have an array."""
    if isinstance(a, Leaf) != isinstance(b, Leaf) or not leaves_of(a):
        return False
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        (x.shape, x.dtype) == (y.shape, y.dtype) if isinstance(x, Leaf) and isinstance(y, Leaf) else type(x) is type(y)
        for x, y in pairs
    )


def text_of(tree: Any) -> str:
    """ "3 arrays (out[0]: float32[8,4], out[1]: float32[4], ...)"."""
    leaves = leaves_of(tree)
    some = ", ".join(leaf.text for leaf in leaves[:3]) + (", ..." if len(leaves) > 3 else "")
    return f"{len(leaves)} array{'s' if len(leaves) != 1 else ''} ({some})" if leaves else "no arrays"


def loss_of(name: str, loss: Loss, free: Sequence[Leaf]) -> Leaf:
    """The loss among the results that are not of the state: the one asked for, the only number, or the only one that is called so."""
    numbers = [x for x in free if x.shape == () and is_float(x.dtype)]
    if isinstance(loss, str):
        chosen = [x for x in numbers if x.name == loss or _last(x.name) == loss]
        if len(chosen) != 1:
            have = ", ".join(x.name for x in numbers) or "none"
            raise ArgumentError(f"loss: got {loss!r}, needed the name of one number in the result of {name}: {have}")
        return chosen[0]
    called = [x for x in numbers if "loss" in _last(x.name).lower()]
    for some in (numbers, called):
        if len(some) == 1:
            return some[0]
    if not numbers:
        have = ", ".join(x.text for x in free[:6]) or "nothing"
        raise ArgumentError(
            f"{name}: got {have} and its state, needed the loss, one float; return it, or make it of the result: loss=lambda out: ..."
        )
    have = ", ".join(x.name for x in numbers[:6])
    raise ArgumentError(
        f"{name}: got {len(numbers)} numbers that may be the loss ({have}), needed one; name it: loss={numbers[0].name!r}"
    )


def _last(name: str) -> str:
    """The last key of a path: "loss" of "out[1]['loss']"."""
    return name.removesuffix("]").rpartition("[")[2].rpartition(".")[2].strip("'\"")
