"""Options of XLA's compiler that make some programs faster and others slower. No estimate decides which, so `fl.advise` tries each.

They are flags of XLA, described in its `xla.proto` (OpenXLA), and may go with a version of it; one that the compiler does not know is
left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...graph.jax_compat import scan_counts
from ...graph.program.ir import Node
from ...graph.rewriting.rewrite import to_jaxpr
from .lint import LEAST, Lint, Program

LEAST_BY_OPTION = 0.01  # of the time: an option changes no source
_DENSE = 8.0  # operations for a byte moved: more than of an operation by element or of a norm, less than of a product of 64 x 64
_SHORT = 8e9  # bytes that a copy moves in the time of a program whose launches may count, about 2 ms on an H200


@dataclass(frozen=True)
class CompilerOption:
    """A rule whose edit is a flag of XLA on a CUDA device; it proposes one lint for a program with nodes that the flag concerns.

    Attributes:
      name: of the flag, and of the rule.
      value: what it is set to.
      text: what the flag does.
      concerns: the nodes that it changes something for.
    """

    name: str
    value: Any
    text: str
    concerns: Callable[[Program], list[Node]]
    before_fusing = False

    def lints(self, program: Program, least: float = LEAST) -> Iterator[Lint]:
        """Its lint, whatever it may save."""
        nodes = self.concerns(program) if program.device.platform == "cuda" else []
        if nodes:
            ids = frozenset(n.id for n in nodes)
            edited = functools.partial(to_jaxpr, program.graph)
            yield _lint(f"{self.name}@", self.name, self.text, ids, edited, {self.name: self.value})


def together(lints: Sequence[Lint]) -> Lint:
    """The options of several lints of a program as one."""
    ids = frozenset().union(*(lint.node_ids for lint in lints))
    options = {name: value for lint in lints for name, value in lint.options.items()}
    return _lint("compiler_options@#1", "compiler_options", "these options together", ids, lints[0].edited, options)


def _lint(
    ident: str, rule: str, text: str, ids: frozenset[int], edited: Callable[[], Any], options: Mapping[str, Any]
) -> Lint:
    edit = f"jax.jit(..., compiler_options={dict(options)})"
    return Lint(ident, rule, text, edit, ids, None, None, edited, options, LEAST_BY_OPTION)


def _products(program: Program) -> list[Node]:
    """Products of matrices, also those in a fused op."""
    each = program.costs.each
    return [n for b in program.graph.blocks() for n in b.nodes if n.id in each and each[n.id].intensity > _DENSE]


def _stacks(program: Program) -> list[Node]:
    """The scans that give more than what they carry."""
    scans = (n for block in program.graph.blocks() for n in block.nodes if n.primitive == "scan")
    return [n for n in scans if len(n.outputs) > scan_counts(n.params)[1]]


def _all_of_a_short_one(program: Program) -> list[Node]:
    return list(program.graph.top.nodes) if program.at_best < _SHORT else []


def _all_of_a_long_one(program: Program) -> list[Node]:
    return list(program.graph.top.nodes) if program.at_best >= _SHORT else []


OPTIONS = (
    CompilerOption(
        "xla_gpu_enable_triton_gemm",
        False,
        "XLA gives each product to cuBLAS or, with the operations around it, to a kernel that Triton makes, by what was faster alone; "
        "without Triton's, neighbouring operations are fused in other ways",
        _products,
    ),
    CompilerOption(
        "xla_gpu_enable_dus_accumulator_zero_init_elimination",
        True,
        "XLA fills what a scan stacks with zeros before its first trip, though each trip writes its own part",
        _stacks,
    ),
    CompilerOption(
        "xla_gpu_graph_min_graph_size",
        1,
        "XLA launches fewer than five kernels in a row one by one; as CUDA graphs they start sooner, and what cuDNN's attention writes "
        "is not filled with zeros before",
        _all_of_a_short_one,
    ),
    CompilerOption(
        "xla_gpu_enable_command_buffer",
        "",
        "XLA puts kernels into CUDA graphs, which it updates for new arrays; where kernels run longer than they take to be launched, the "
        "graphs may cost more than they save",
        _all_of_a_long_one,
    ),
)
