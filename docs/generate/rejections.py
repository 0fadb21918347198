"""The page of rejections: what each code means, the smallest program that gets it, and the edit where there is one."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import fusionlab as fl
from fusionlab.errors import REJECTIONS, ROUTE_REASONS
from fusionlab.fusers.engine.base import COMMON_CODES

from .by_hand import WITHOUT, programs
from .markdown import code, literal, plain, printed, table, text_of
from .near import NearMiss, near_misses
from .programs import Program, run

_ROUTES = """
import jax.numpy as jnp
import fusionlab as fl

def program(a, b, c):
    return a @ b @ c

a = jnp.zeros((64, 64), jnp.bfloat16)
print(fl.find(program, a, a, a, device="h100").routes())
"""


def write_rejections(folder: Path) -> None:
    """Writes `rejections.md`."""
    (folder / "rejections.md").write_text(_page(), encoding="utf-8")


def _page() -> str:
    routes = run(_ROUTES.lstrip())
    return text_of(
        "# Rejections",
        "A place that looks like a site of a pass but is not one is declined: with a code, a sentence that names the place and the reason, "
        "the source line, and the edit that would make it match if there is one. `print(fl.find(fn, *args))` lists them; "
        '`found.rejections` has them as objects, and `found.explain("%12")` explains one node.',
        "Each program below was run when this page was generated; long lines of output are wrapped.",
        table(
            ["code", "meaning"],
            ([f"[{name}](#rejection-{name})", plain(meaning)] for name, meaning in REJECTIONS.items()),
        ),
        *_codes(),
        "(routes)=\n## Routes of matrix products",
        "`found.routes()` lists every matrix product with the route that it takes. A route that does not take a product says why, with one "
        "of these codes:",
        table(["code", "meaning"], ([literal(name), plain(meaning)] for name, meaning in ROUTE_REASONS.items())),
        code(routes.text, "python"),
        "prints",
        printed(routes.printed),
    )


def _codes() -> Iterator[str]:
    chosen = examples()
    by_hand = programs()
    for name, meaning in REJECTIONS.items():
        yield f"(rejection-{name})=\n## {name}"
        yield f"{meaning[0].upper()}{plain(meaning[1:])}. Passes: {_passes(name)}."
        for near in chosen.get(name, ()):
            yield from _near(near)
        if name in by_hand:
            yield from _shown(by_hand[name])
        elif name not in chosen:
            yield f"There is no small program that gets this code. {WITHOUT[name]}"


@functools.cache
def examples() -> dict[str, list[NearMiss]]:
    """Code -> its smallest near miss of each pass that has one."""
    found: dict[str, dict[str, NearMiss]] = defaultdict(dict)
    for near in near_misses():
        of_code, pass_name = found[near.entry.code], near.entry.pass_name
        if pass_name not in of_code or near.rank < of_code[pass_name].rank:
            of_code[pass_name] = near
    return {name: list(of_pass.values()) for name, of_pass in found.items()}


def _passes(name: str) -> str:
    if name in COMMON_CODES:
        return "all"
    links = [f"[{p.name}](passes/{p.name}.md)" for p in fl.passes() if name in p.codes and not p.whole]
    layers = [p.name for p in fl.passes() if name in p.codes and p.whole]
    links += [f"[{layer} and the other layer passes](passes/{layer}.md)" for layer in layers[:1]]
    return ", ".join(links)


def _near(near: NearMiss) -> Iterator[str]:
    yield f"**{near.entry.pass_name}**: {plain(near.entry.name)}."
    yield from _shown(near.declined)
    repaired = near.repaired
    if repaired is not None:
        yield "With the edit it matches:"
        yield code(repaired.text, "python")
        yield printed(repaired.printed)


def _shown(program: Program) -> Iterator[str]:
    yield code(program.text, "python")
    yield printed(program.printed)
