"""The base class of a pass, and the search of one block."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ...device import Device, asked_about
from ...errors import ArgumentError, unknown_name
from ...graph.backward.find import Derivatives
from ...graph.canonical.view import CanonicalView
from ...graph.certify.certify import Certifier
from ...graph.program.graph import Graph
from ...graph.program.ir import Node
from ...graph.program.scopes import is_backward
from ...kernels import OPS
from ...kernels.op.op import Op
from ...showing import Shown
from .declining import examined
from .outcomes import Candidate, Rejection

BY_DEFAULT = "_default"  # likewise, that nobody named the pass
LEFT = "left as it is unless asked for: "  # prefix of the note of a site from which a device gains nothing
WIDER_EDIT = "compute in {} there if that is precise enough, or widen all operands of the site"
# What to do where explicit axes stand in the way.
AUTO_AXES = (
    "use mesh axes of type Auto there (jax.sharding.auto_axes, or axis_types= of jax.make_mesh), or use jax.shard_map"
)
# The rejection codes that a site of any pass can get.
COMMON_CODES = (
    "escapes", "dtype", "stop_gradient", "custom_rule", "named_residual", "gradient", "value", "region", "overlap", "order", "sharding",
    "axes", "structure", "symbolic", "uncertified", "device", "unmeasured", "slower", "implementation",
)  # fmt: skip
GRADIENT = "_grad"  # the option by which a search is told that a pass's `_grad` is off; no pass has one of this name


@dataclass(frozen=True, eq=False)
class Search:
    """One pass over one block.

    Attributes: `graph`, `view` (of the block), `device`, `options` of this pass, `certifier`, `implementation` (as given to fuse),
    `derivatives` (of regions, where there is a backward pass in the program), `shared` (a cache for the
    passes, one for all passes and blocks of a search).
    """

    graph: Graph
    view: CanonicalView
    device: Device
    certifier: Certifier
    options: Mapping[str, Any] = field(default_factory=dict)
    implementation: str | None = None
    derivatives: Derivatives | None = None
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def block(self) -> Any:
        return self.view.block

    @property
    def differentiated(self) -> bool:
        """Whether there is a backward pass in the program."""
        return self.derivatives is not None

    @property
    def gradient(self) -> bool:
        """Whether the pass's `_grad` is on; otherwise the gradient is JAX's own gradient of the reference."""
        return self.options.get(GRADIENT, True)

    @property
    def by_default(self) -> bool:
        """Whether neither the pass nor an implementation was named."""
        return bool(self.options.get(BY_DEFAULT, False)) and self.implementation is None


@dataclass(frozen=True, repr=False)
class Option(Shown):
    """An option of a pass: its default, its meaning, and its valid values if they are listed.

    Attributes:
      default: its value where none is given.
      meaning: what it does, in a sentence.
      choices: the values it can have; None where they are not listed.
    """

    _says = "{0.default!r} by default: {0.meaning}"

    default: Any
    meaning: str
    choices: Sequence[Any] | None = None

    @property
    def values(self) -> list[Any] | None:
        """The valid values; None if they are not listed."""
        if self.choices is not None:
            return list(self.choices)
        return [False, True] if isinstance(self.default, bool) else None


class Pass(abc.ABC, Shown):
    """One fusion pass: a name, its documentation, and a search over one block.

    A pass defines which nodes are its anchors and examines each of them; an error raised there becomes a rejection `uncertified`.

    Attributes:
      name: as in `passes=[...]` and `Strategy`.
      op: the fused op it rewrites to.
      formula: the fused formula, in one line.
      needs: its conditions, in one line.
      options: by name; a tuple (default, meaning) or (default, meaning, choices) is an option too.
      summary: the replacement in one sentence.
      spellings: the forms of a site that it recognises, and the limits of each; a sentence each.
      default: where it is on without being asked for, and why it is off elsewhere.
      codes: the rejection codes that it gives, besides `COMMON_CODES`.
      primitives: the primitives of its anchors.
      whole: its sites consist of the sites of other passes, so it is searched after them, whatever the order of the request.
      named_only: it runs only if it is named.
      forward_only: its op dissolves under `jax.grad`: it has no `_grad`.
      sample_for: the device and the options at which its sample has a site.
      routes: for the one pass that has a route for every product: makes the table of routes from the findings and from its searches of
        all blocks, each with the user's derivative rule that the block belongs to.
    """

    _told = ("name", "formula", "needs", "op")

    name: str
    op: str
    formula: str
    needs: str
    options: Mapping[str, Option | tuple[Any, ...]] = MappingProxyType({})
    summary: str = ""
    spellings: Sequence[str] = ()
    default: str = ""
    codes: Collection[str] = ()
    primitives: Collection[str] = ()
    whole: bool = False
    named_only: bool = False
    forward_only: bool = False
    sample_for: tuple[str, Mapping[str, Any]] = ("cpu", MappingProxyType({}))

    def __repr__(self) -> str:
        return f"<pass {self.name}: {self.formula}>"

    @functools.cached_property
    def fused_op(self) -> Op:
        """The op that it rewrites to, by default the one of this package that `op` names."""
        return OPS[self.op]

    @functools.cached_property
    def declared(self) -> dict[str, Option]:
        """The options by name, tuples converted to `Option`."""
        return {key: o if isinstance(o, Option) else Option(*o) for key, o in self.options.items()}

    def option(self, search: Search, key: str) -> Any:
        """An option's value: the given one, or the default."""
        return search.options.get(key, self.declared[key].default)

    def check_names(self, options: Iterable[str]) -> None:
        """Raises UnknownNameError for an option the pass does not have."""
        for key in options:
            if key not in self.options:
                raise unknown_name(f"option of pass {self.name}", key, self.options)

    def check(self, options: Mapping[str, Any]) -> None:
        """Raises ArgumentError or UnknownNameError for an invalid value of an option."""
        for key, value in options.items():
            choices = self.declared[key].choices if key in self.declared else None
            # 0 is no False, and 1 no True, though they are equal
            if choices is None or any(isinstance(value, bool) == isinstance(c, bool) and value == c for c in choices):
                continue
            if all(isinstance(choice, str) for choice in choices):
                raise unknown_name(key, value, choices)
            *needed, last = sorted(map(repr, choices), key=lambda text: text == "None")
            raise ArgumentError(f"{self.name}: {key} is {value!r}, needed {', '.join(needed)} or {last}")

    routes: Callable[[Sequence[tuple[Search, Node | None]], Any], Any] | None = None

    def together(self, found: list[Candidate | Rejection], options: Mapping[str, Any]) -> list[Candidate | Rejection]:
        """The sites of all passes in an already differentiated program, after this pass has combined several of its own."""
        return found

    @abc.abstractmethod
    def sample(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A small function and arguments with one site (for the before/after picture)."""

    def is_anchor(self, node: Node) -> bool:
        """Whether a node may be the anchor of a site."""
        return node.primitive in self.primitives and not is_backward(node.eqn)

    def anchors(self, search: Search) -> Iterable[tuple[Any, ...]]:
        """The anchors of a block, each with the further arguments of `examine`."""
        return [(node,) for node in self.possible_anchors(search)]

    def possible_anchors(self, search: Search) -> list[Node]:
        """The nodes of a block that may be anchors, in order."""
        # Most nodes of a program are of other primitives: no function is called for them.
        return [node for node in search.block.nodes if node.primitive in self.primitives and self.is_anchor(node)]

    def examine(self, search: Search, anchor: Node, *known: Any) -> Any:
        """The outcome at an anchor: a candidate, a rejection with its reason, several of these, or None if there is no site."""
        raise NotImplementedError

    def search(self, search: Search) -> Iterator[Candidate | Rejection]:
        """Every site of the block: a candidate, or a rejection with its reason."""
        for anchor in self.anchors(search):
            yield from examined(self.name, anchor[0], functools.partial(self.examine, search, *anchor))


@dataclass(frozen=True, eq=False)
class Substitution:
    """How a region becomes a call of a fused op.

    Attributes:
      op, attrs: the fused op and its attributes.
      operands: region inputs -> the op's operands (None for an absent one).
      finish: the op's result -> the region's root; a tuple of its roots, where it has several.
      formula: the formula of this site.
      arithmetic: as in Candidate.
      device: the device for which the op is bound; None: the current one.
    """

    op: Op
    attrs: Mapping[str, Any]
    operands: Callable[..., tuple[Any, ...]]
    finish: Callable[[Any], Any]
    formula: str
    arithmetic: str = ""
    device: Device | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The attributes without the name of an implementation."""
        return {k: v for k, v in self.attrs.items() if k != "implementation"}

    def call(self, *inputs: Any) -> Any:
        return self.calling(*inputs)[1]

    def calling(self, *inputs: Any) -> tuple[tuple[Any, ...], Any]:
        """The op's operands, and its result for them."""
        operands = self.operands(*inputs)
        with contextlib.nullcontext() if self.device is None else asked_about(self.device):
            return operands, self.finish(self.result(operands, inputs))

    def result(self, operands: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
        """What is made of the op's result for its operands; `inputs` are the region's."""
        return self.op.call(*operands, **self.attrs)


def found_at(pass_name: str, view: CanonicalView) -> tuple[str, str, str]:
    """The key in `Search.shared` of a pass's outcomes in a block."""
    return "found", pass_name, view.block.path
