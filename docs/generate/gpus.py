"""The page of GPUs: which kernels of each pass run on each, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fusionlab.commands.kernels_by_gpu import gpus, kernels_by_gpu, refusals
from fusionlab.kernels.launch.architectures import ARCHITECTURES
from fusionlab.kernels.sources import Coverage, State, sources

from .markdown import bullets, literal, plain, table, text_of

_HOW = (
    "**measured**: at least one implementation of the pass was timed against XLA's code on that architecture, so FusionLab knows where it "
    "gains.",
    "**compiled**: the implementations in the cell are built for that GPU. Kernels of FusionLab are compiled for it in the tests, and have "
    "not run on it. They run after `fl.tune` found them faster, or where you name them; attention by cuDNN also by a rule.",
    "**refused**: no implementation other than XLA's code can run there. The reason is known before anything is compiled or launched.",
    "**XLA**: the pass has no kernel of its own. It is JAX code, and runs wherever JAX does.",
)
_LIMITS = (
    "A kernel is also refused for a launch that does not fit the GPU: each block has at most 1,024 threads and the shared memory below. "
    "The sizes of tiles are chosen for what the GPU has."
)


def write_gpus(folder: Path) -> None:
    """Writes `gpus.md`."""
    (folder / "gpus.md").write_text(_page(), encoding="utf-8")


def _page() -> str:
    rows, known = kernels_by_gpu(), gpus()
    heads = [f"{arch}<br>{', '.join(names)}" for arch, names in known.items()]
    return text_of(
        "# GPUs",
        "Which implementations of each pass a GPU has, besides XLA's code. `fl.doctor()` prints this table with the GPU of your machine.",
        table(["pass", *heads], [[literal(name), *map(_cell, row)] for name, row in rows.items()]),
        bullets(_HOW),
        "A GPU that is not in the table runs code for an older one of the same major compute capability: an `sm_103` that for `sm_100`, "
        "an `sm_121` that for `sm_120`. The kernels do not run on Jetson and Drive GPUs (`sm_87`, `sm_110`).",
        "## What is refused",
        table(["pass", "implementation", "where and why"], _reasons(rows)),
        "## What the kernels need",
        table(["source", "instructions", "compiled for"], _needs()),
        _LIMITS,
        table(
            ["architecture", "shared memory of a block", "of a multiprocessor", "resident warps", "resident blocks"],
            [
                [name, f"{one.shared >> 10} KiB", f"{one.shared_of_all >> 10} KiB", str(one.warps), str(one.blocks)]
                for name, one in ARCHITECTURES.items()
            ],
        ),
        "Source: NVIDIA's CUDA Programming Guide, section Compute Capabilities.",
    )


def _cell(one: Coverage) -> str:
    ran = one.state in (State.MEASURED, State.COMPILED)
    return f"{one.state}: {', '.join(map(literal, one.runs))}" if ran else one.state.value


def _reasons(rows: dict[str, tuple[Coverage, ...]]) -> Iterator[list[str]]:
    for name, row in rows.items():
        for (implementation, why), archs in refusals(row).items():
            yield [literal(name), literal(implementation), f"{', '.join(archs)}: {plain(why)}"]


def _needs() -> Iterator[list[str]]:
    for path, source in sources().items():
        needs = ", ".join(one.name for one in source.needs) or "those of every GPU"
        yield [literal(path), needs, ", ".join(source.archs)]
