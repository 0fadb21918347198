"""Where a program's time goes, before anything is selected: its most expensive places with their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fusionlab.fusers.engine.grouping import STATE_WORDS
from fusionlab.showing import seconds_text

from ..cards.card import BESIDE, Amount, Card, Overview
from ..cards.layout.faces import Scale
from ..cards.layout.measure import share_text
from ..markup import pick, quiet, text
from ..palette import colour_of

_MOST = 7
AFTER_LANE = BESIDE[1]
_AT_FLOOR = 0.8  # of the time at best: what is left is no more than a few kernels' starts


@dataclass
class Place:
    """Equal work in one phase: a card that shows it, what all of it costs, and seconds at best where these are known."""

    card: Card
    phase: str
    cost: Amount = field(default_factory=Amount)
    floor: float = 0.0


def dearest_title(overview: Overview) -> str:
    """ "Where the time goes", once times were measured; else of the bytes."""
    return f"Where the {Scale(overview.total).unit} {'goes' if overview.total.seconds else 'go'}"


def dearest_html(overview: Overview, floor: Callable[[Card], float] | None = None, searched: bool = True) -> str:
    """The most expensive places of a program: each with its share of all time or bytes, its state, and a button that selects it.

    Args:
      overview: the program.
      floor: the seconds that one copy of a card takes at best on the device that timed it, as one kernel; 0 where that is not known.
      searched: whether the program was searched, so that other places are known to be no sites.
    """
    scale = Scale(overview.total)
    found = {key: place for key, place in _places(overview, floor).items() if scale.share(place.cost)}
    places = sorted(found.values(), key=lambda p: -scale.share(p.cost))[:_MOST]
    if not places:
        return ""
    told = share_text(sum(scale.share(p.cost) for p in places))
    how = (
        "Measured kernel by kernel; a kernel's time is divided among its operations by the bytes they move"
        if scale.unit == "time"
        else "Counted node by node, not measured"
    )
    does = "take" if scale.unit == "time" else "move"
    which = f"the {len(places)} most expensive places {does}" if len(places) > 1 else f"one place {does}s"
    head = quiet(f"{how}: {scale.said(overview.total)}. Nothing is selected; {which} {told} of that:")
    return f'{head}<ol class="fl-dearest">{"".join(_row(p, scale.share(p.cost), searched) for p in places)}</ol>'


def _places(overview: Overview, floor: Callable[[Card], float] | None) -> dict[tuple[str, str, str], Place]:
    found: dict[tuple[str, str, str], Place] = {}
    for row in overview.rows:
        for phase, card in row.cards.items():
            if phase == AFTER_LANE:  # the same work as before
                continue
            for leaf, times in _leaves(card, 1):
                state = leaf.site.state if leaf.site is not None else ""
                place = found.setdefault((leaf.name, phase, state), Place(leaf, phase))
                place.cost += leaf.cost * times
                place.floor += floor(leaf) * times * leaf.count if floor is not None else 0.0
    return found


def _leaves(card: Card, times: int) -> Iterator[tuple[Card, int]]:
    """The cards that do not open, each with its number of occurrences: children belong to one copy."""
    alone = len(card.children) == 1 and card.count > 1 and card.children[0].site is None
    if not card.children or alone:  # of equal parts without an inside, all together
        yield card, times
        return
    for child in card.children:
        yield from _leaves(child, times * card.count)


def _row(place: Place, share: float, searched: bool) -> str:
    site = place.card.site
    state = (
        f"{site.pass_name}, {STATE_WORDS[site.state]}"
        if site is not None
        else ""
        if not searched
        else "not as one site"
        if place.card.strips
        else "no pass looks for it"
    )
    if place.cost.seconds and place.floor >= _AT_FLOOR * place.cost.seconds:
        state += f", at its floor: no kernel of this device takes less than {seconds_text(place.floor)} for it"
    colour = f"--pass:{colour_of(site.pass_name)}" if site is not None else ""
    css = site.state if site is not None else "empty"
    return (
        f'<li><span class="fl-swatch {css}" style="{colour}"></span>{pick(_selects(place.card), place.card.name)}'
        f"<b>{text(share_text(share) or '< 0.1 %')}</b>"
        f'<span class="quiet">{text(" · ".join(filter(None, (place.phase, state))))}</span>'
        f'<span class="fl-share" style="--share:{share:.4f}"></span></li>'
    )


def _selects(card: Card) -> str:
    """The target of a click: the site, which explains why it is fused or not; else the card."""
    site = card.site
    return site.id if site is not None and site.id and not site.backward else card.id
