"""The catalogue of passes: what `fl.passes()` shows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ..device import Device
from ..errors import unknown_name
from ..fusers import Pass, find_in
from ..graph.program.trace import trace
from ..showing import Shown


@dataclass(frozen=True)
class Catalogue(Shown):
    """All passes. `str()` lists formula, needs and options; a notebook adds a before/after picture of each."""

    passes: tuple[Pass, ...]
    _listed = "passes"

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __getitem__(self, name: str) -> Pass:
        if name not in self.names:
            raise unknown_name("pass", name, self.names)
        return self.passes[self.names.index(name)]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.names)

    def __len__(self) -> int:
        return len(self.passes)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.passes)

    def __str__(self) -> str:
        return "\n".join(_text(p) for p in self.passes)

    def __repr__(self) -> str:
        return f"<{len(self.passes)} passes: {', '.join(self.names)}>"

    def _repr_html_(self) -> str:
        import html

        parts = []
        for p in self.passes:
            before, after = (_picture(p, applied) for applied in (False, True))
            parts.append(
                f"<h3>{html.escape(p.name)}</h3><p><code>{html.escape(p.formula)}</code><br>needs: {html.escape(p.needs)}</p>"
                f'<div style="display:flex;gap:2em;flex-wrap:wrap"><figure>{before}<figcaption>before</figcaption></figure>'
                f"<figure>{after}<figcaption>after</figcaption></figure></div>"
            )
        return "".join(parts)


def _text(p: Pass) -> str:
    lines = [p.name, f"  fuses  {p.formula}", f"  needs  {p.needs}"]
    lines += [f"  option {key}={o.default!r}: {o.meaning}" for key, o in p.declared.items()]
    return "\n".join(lines)


def _picture(p: Pass, applied: bool) -> str:
    from ..viz.export import to_svg

    fn, args = p.sample()
    graph = trace(fn, *args)
    device, options = p.sample_for
    found = find_in(graph, [(p, options)], Device.of(device))
    return to_svg(found.apply(), show="all") if applied else to_svg(graph, found, show="all")
