"""Pictures of what a reader of a page without a kernel can open: drawn beforehand, compressed, and found by card.

A page shows one picture at a time: that of the card opened last and the cards around it. A card beyond the budget has a note that it
opens in a live kernel.
"""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from fusionlab.graph.program.ir import type_text

from ..cards.album import Album
from ..cards.card import Card

MAX_BYTES = 900_000  # of compressed pictures in one page, as base64
MAX_SECONDS = 5.0  # of drawing them
_MOST_NODES = 60_000  # beyond this the index of all nodes would outweigh the pictures


@dataclass
class Scenes:
    """Pictures by the card they open, packed; `left` are the cards beyond the budget."""

    packed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    size: int = 0


def bake(
    album: Album,
    enabled: Collection[str] | None,
    scene: Callable[[], dict[str, Any]],
    *,
    max_bytes: int = MAX_BYTES,
    max_seconds: float = MAX_SECONDS,
) -> Scenes:
    """Draws what can be opened, outermost cards first and of those the dearest; the album is closed again at the end.

    Args:
      scene: what the page needs to know of the album's picture as it is now: the picture and its texts.
      max_bytes, max_seconds: no further picture is begun beyond these.
    """
    scenes, deadline = Scenes(), time.monotonic() + max_seconds
    for card in _in_order(album, enabled):
        if scenes.size >= max_bytes or time.monotonic() >= deadline:
            scenes.left.append(card.id)
            continue
        album.opened = {card.id, *album.around(enabled, card.id)}
        text = packed_json(scene())
        if scenes.size + len(text) > max_bytes:
            scenes.left.append(card.id)
            continue
        scenes.packed[card.id] = text
        scenes.size += len(text)
    album.opened = set()
    return scenes


def _in_order(album: Album, enabled: Collection[str] | None) -> list[Card]:
    """The cards that open: by depth, then by what they cost."""
    found = [card for card in album.overview(enabled).cards() if card.children]
    return sorted(found, key=lambda card: (len(album.around(enabled, card.id)), -card.cost.bytes, card.id))


def index(album: Album, enabled: Collection[str] | None) -> dict[str, Any]:
    """Every node in columns, for searching and for finding its card: strings once, then numbers into them.

    Keys: `cards` ([id, index of the card around it or -1]), `strings`, `nodes` (rows of node id, index of its card, primitive, value
    name, type, scope, source, and 1 where its card shows a twin of it).
    """
    cards = [*album.overview(enabled).cards()]
    numbers = {card.id: k for k, card in enumerate(cards)}
    strings: dict[str, int] = {}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings))

    homes = album.homes(enabled)
    shown = frozenset(nid for card in cards for nid in card.nodes)
    rows = []
    for node in album.graph.nodes() if album.graph.node_count <= _MOST_NODES else ():
        if node.id not in homes:
            continue
        value = node.outputs[0] if node.outputs else None
        rows.append(
            [
                node.id,
                numbers[homes[node.id]],
                text(node.primitive),
                text(value.name if value else ""),
                text(type_text(value.aval) if value else ""),
                text(node.scope),
                text(node.source.short if node.source else ""),
                int(node.id not in shown),
            ]
        )
    around = ([*album.around(enabled, card.id)] for card in cards)
    parents = [[card.id, numbers[up[0]] if up else -1] for card, up in zip(cards, around, strict=True)]
    return {"cards": parents, "strings": [*strings], "nodes": rows}


def packed_json(data: Any) -> str:
    """JSON, gzip, base64: what the browser's DecompressionStream opens. The same data always gives the same text."""
    text = json.dumps(data, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
