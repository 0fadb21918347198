"""Where a program's time goes, before anything is selected: its dearest places with what is known of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..cards.card import Card, Overview
from ..cards.layout.measure import bytes_text, share_text
from ..markup import pick, quiet, text
from ..palette import colour_of

_MOST = 7
_SAYS = {"applied": "fused", "candidate": "can be fused", "declined": "declined"}


@dataclass
class Place:
    """Equal work in one phase: what it is called, a card that shows it, and the bytes that all of it moves."""

    card: Card
    phase: str
    bytes: int = 0


def dearest_html(overview: Overview) -> str:
    """The dearest places of a program: each with its share of all bytes, its state, and a button that selects it."""
    total = overview.total.bytes
    places = sorted(_places(overview), key=lambda p: -p.bytes)[:_MOST]
    if not total or not places:
        return ""
    told = share_text(sum(p.bytes for p in places) / total)
    head = quiet(
        f"Counted node by node, not measured: {bytes_text(total)}. Nothing is selected; the dearest {len(places)} places move {told} of it:"
    )
    return f'{head}<ol class="fl-dearest">{"".join(_row(p, total) for p in places)}</ol>'


def _places(overview: Overview) -> list[Place]:
    found: dict[tuple[str, str, str], Place] = {}
    for row in overview.rows:
        for phase, card in row.cards.items():
            for leaf, times in _leaves(card, 1):
                state = leaf.site.state if leaf.site is not None else ""
                place = found.setdefault((leaf.name, phase, state), Place(leaf, phase))
                place.bytes += leaf.cost.bytes * times
    return [*found.values()]


def _leaves(card: Card, times: int) -> Iterator[tuple[Card, int]]:
    """The cards that do not open, and how often each stands for itself: children are of one copy."""
    if not card.children:
        yield card, times
    for child in card.children:
        yield from _leaves(child, times * card.count)


def _row(place: Place, total: int) -> str:
    site, share = place.card.site, place.bytes / total
    state = (
        f"{site.pass_name}, {_SAYS[site.state]}"
        if site is not None
        else "not as one site"
        if place.card.strips
        else "no pass looks for it"
    )
    colour = f"--pass:{colour_of(site.pass_name)}" if site is not None else ""
    css = site.state if site is not None else "empty"
    return (
        f'<li><span class="fl-swatch {css}" style="{colour}"></span>{pick(_selects(place.card), place.card.name)}'
        f"<b>{text(share_text(share) or '< 0.1 %')}</b>"
        f'<span class="quiet">{text(place.phase)} · {text(state)}</span>'
        f'<span class="fl-share" style="--share:{share:.4f}"></span></li>'
    )


def _selects(card: Card) -> str:
    """What a click selects: a site, where it says why it is fused or not; else the card."""
    site = card.site
    return site.id if site is not None and site.id and not site.backward else card.id
