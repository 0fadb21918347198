"""The pages of the passes: an index, and a page for each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import fusionlab as fl
from fusionlab.errors import REJECTIONS
from fusionlab.fusers import Pass
from fusionlab.fusers.engine.base import COMMON_CODES
from fusionlab.kernels import OPS

from .examples import example
from .markdown import bullets, code, literal, plain, printed, table, text_of
from .performance import tables_about
from .records import CARDS, NONE

_GRADIENT = "`fl.Strategy({0}=True, {0}_grad=False)` fuses the forward pass alone and leaves the gradient to JAX."
_NO_GRADIENT = "Forward only: under `jax.grad` the op dissolves into its pieces, and JAX differentiates those."
_NAMED = 'It runs only where it is named: `passes=["{0}"]`, or `fl.Strategy({0}=True)`.'
_NOT_MEASURED = "No record measures this pass by itself."
_ALSO = {"layer_norm": ("group_norm",)}  # ops that a pass rewrites to besides its own


def write_passes(folder: Path) -> None:
    """Writes `passes.md` and a page for each pass."""
    pages = folder / "passes"
    pages.mkdir(parents=True, exist_ok=True)
    for pass_ in fl.passes():
        page = pages / f"{pass_.name}.md"
        page.write_text(_page(pass_, page), encoding="utf-8")
    (folder / "passes.md").write_text(_index(), encoding="utf-8")


def _index() -> str:
    toc = "\n".join(f"passes/{name}" for name in fl.passes().names)
    pieces, layers = ([p for p in fl.passes() if p.whole is whole] for whole in (False, True))
    head = ["pass", "what it does", "by default", *CARDS]
    return text_of(
        "# Passes",
        "A pass finds the places of a program that compute one thing, however they are spelled, and replaces each by a fused op. "
        "`fl.fuse(fn)` runs those that are on by default; `passes=` names others or sets their options. `fl.passes()` prints what these "
        "pages say, in a notebook with pictures before and after.",
        table(
            head,
            [[_link(p), plain(p.summary), plain(_in_short(p)), *(_gain(p, card) for card in CARDS)] for p in pieces],
        ),
        "The last columns are for each card the smallest and the largest ratio of `jax.jit`'s time to FusionLab's, of all "
        "[tables](performance/index.md) about one pass; above 1 is faster.",
        "## Whole layers",
        "Passes for whole transformer layers run only where they are named.",
        bullets(f"{_link(p)}: {plain(p.summary)}{_gains_of_layer(p)}" for p in layers),
        "(common-codes)=\n## What every pass may decline",
        "A place that looks like a site but is not one is declined with a code, a sentence, the source line, and an edit if there is one. "
        "The page of each pass lists its own codes. These can come from any pass:",
        _codes(COMMON_CODES),
        f"```{{toctree}}\n:hidden:\n\n{toc}\n```",
    )


def _link(pass_: Pass) -> str:
    return f"[{pass_.name}](passes/{pass_.name}.md)"


def _in_short(pass_: Pass) -> str:
    """Where it is on, without the reasons."""
    return re.split(r"[.:] |\.$", pass_.default)[0].lower().replace("gpus", "GPUs")


def _gain(pass_: Pass, card: str) -> str:
    """The smallest and the largest ratio of the tables that time a pass by itself on a card."""
    alone = [t for t in tables_about(pass_.name) if t.card == card and t.of_time and t.of_one_pass]
    ratios = sorted(ratio for t in alone for ratio in t.span())
    return " to ".join(dict.fromkeys(f"{r:.2f}x" for r in (ratios[0], ratios[-1]))) if ratios else NONE


def _gains_of_layer(pass_: Pass) -> str:
    measured = [f"{card}: {_gain(pass_, card)}" for card in CARDS if _gain(pass_, card) != NONE]
    return f" Measured on {', '.join(measured)}." if measured else ""


def _page(pass_: Pass, page: Path) -> str:
    shown, ops = example(pass_), (pass_.op, *_ALSO.get(pass_.name, ()))
    return text_of(
        f"# {pass_.name}",
        plain(pass_.summary),
        f"Fuses {literal(pass_.formula)} into {' or '.join(literal(f'fl.ops.{op}') for op in ops)}.",
        f"Needs: {plain(pass_.needs)}.",
        "## What it recognises, and its limits" if pass_.spellings else "",
        bullets(map(plain, pass_.spellings)),
        "## By default",
        plain(pass_.default),
        "## Options",
        *_options(pass_),
        "## Example",
        code(shown.text, "python"),
        "prints",
        printed(shown.printed),
        "## What it declines",
        _codes(pass_.codes) if pass_.codes else "",
        f"{'It can also give' if pass_.codes else 'It gives'} the codes that [every pass may give](#common-codes).",
        "## Implementations",
        "`fl.fuse(fn, implementation=NAME)` asks for one; otherwise the one that was measured fastest on the device runs.",
        table(["op", "implementation", "how"], [row for op in ops for row in _implementations(op)]),
        "## Measured",
        *_measured(pass_, page),
    )


def _implementations(op: str) -> Iterator[list[str]]:
    for name, implementation in OPS[op].implementations.items():
        yield [literal(f"fl.ops.{op}"), literal(name), plain(implementation.summary)]


def _options(pass_: Pass) -> Iterator[str]:
    if pass_.named_only:
        yield _NAMED.format(pass_.name)
    if pass_.declared:
        head = ["option", "default", "values", "meaning"]
        yield table(
            head,
            [
                [literal(k), literal(repr(o.default)), _values(o.values), plain(o.meaning)]
                for k, o in pass_.declared.items()
            ],
        )
        key = next(iter(pass_.declared))
        yield f"Options are given as `fl.Strategy({pass_.name}=dict({key}=...))`."
    yield _NO_GRADIENT if pass_.forward_only else _GRADIENT.format(pass_.name)


def _values(values: list[object] | None) -> str:
    return ", ".join(literal(repr(value)) for value in values or ())


def _codes(codes: object) -> str:
    """A table of codes with links to what they mean."""
    wanted = [name for name in REJECTIONS if name in codes]  # type: ignore[operator]
    return table(["code", "meaning"], [[f"[{name}](#rejection-{name})", plain(REJECTIONS[name])] for name in wanted])


def _measured(pass_: Pass, page: Path) -> Iterator[str]:
    found = tables_about(pass_.name)
    if not found:
        yield _NOT_MEASURED
    for card in CARDS:
        yield from (measured.text(page, level=3) for measured in found if measured.card == card)
