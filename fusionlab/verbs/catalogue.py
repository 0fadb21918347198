"""The catalogue of passes: what `fl.passes()` shows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..device import Device
from ..errors import unknown_name
from ..fusers import Pass, find_in
from ..graph.program.trace import trace
from ..showing import Shown

if TYPE_CHECKING:
    from ..viz.notebook import Output


@dataclass(frozen=True)
class Catalogue(Shown):
    """All passes. `str()` lists what each replaces, its formula, needs and options; a notebook adds a before/after picture of each."""

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
        """The name of each pass, in the order in which they run."""
        return tuple(p.name for p in self.passes)

    def __str__(self) -> str:
        return "\n".join(_text(p) for p in self.passes)

    def __repr__(self) -> str:
        return f"<{len(self.passes)} passes: {', '.join(self.names)}>"

    def _repr_html_(self) -> str:
        parts = []
        for p in self.passes:
            before, after = _pictures(p)
            parts.append(
                f'{_html(p)}<div style="display:flex;gap:2em;flex-wrap:wrap"><figure>{before}<figcaption>before</figcaption></figure>'
                f"<figure>{after}<figcaption>after</figcaption></figure></div>"
            )
        return "".join(parts)

    def _ipython_display_(self) -> None:
        from ..viz.notebook import beside, picture, show, words

        def outputs() -> Iterator[Output]:
            for p in self.passes:
                yield words(_html(p) + "<p><small>An example site, as written and fused:</small></p>", _text(p))
                yield picture(beside(*_pictures(p)), f"<picture of {p.name}>")

        show(outputs())


def _html(p: Pass) -> str:
    import html

    name, formula, needs, summary, default = map(html.escape, (p.name, p.formula, p.needs, p.summary, p.default))
    spellings = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in p.spellings)
    above = f"<p>{summary}</p>" * bool(summary)
    below = f"<ul>{spellings}</ul>" * bool(spellings) + f"<p>by default: {default}</p>" * bool(default)
    return f"<h3>{name}</h3>{above}<p><code>{formula}</code><br>needs: {needs}</p>{below}"


def _text(p: Pass) -> str:
    lines = [p.name, *[f"  {p.summary}"] * bool(p.summary), f"  fuses  {p.formula}", f"  needs  {p.needs}"]
    lines += [f"  - {sentence}" for sentence in p.spellings]
    lines += [f"  by default  {p.default}"] * bool(p.default)
    lines += [f"  option {key}={o.default!r}: {o.meaning}" for key, o in p.declared.items()]
    return "\n".join(lines)


def _pictures(p: Pass) -> tuple[str, str]:
    """A sample of what it fuses, as written and fused, as SVG."""
    from ..viz.export import album

    fn, args = p.sample()
    graph = trace(fn, *args)
    device, options = p.sample_for
    found = find_in(graph, [(p, options)], Device.of(device))
    whole = album(graph, found, (), show="all"), album(found.apply(), None, (), show="all")
    return whole[0].still(()), whole[1].still(())
