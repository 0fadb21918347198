"""The pages of measurements: one for each card, and their index."""

from __future__ import annotations

from pathlib import Path

from . import models_on_h200, on_h200, on_others
from .markdown import bullets, literal, table, text_of
from .records import CARDS, Record, records_of
from .tables import Measured

TABLES: tuple[Measured, ...] = (*on_h200.TABLES, *models_on_h200.TABLES, *on_others.TABLES)
_PLACES = {
    "h200": "Performance on an NVIDIA H200",
    "h100": "Performance on an NVIDIA H100",
    "cpu": "Performance on CPUs",
}
_NAMES = {"h200": "NVIDIA H200", "h100": "NVIDIA H100", "cpu": "CPU"}
_HOW = (
    "Programs are timed in turns, so that a slow moment of the machine hits all of them. Times are device times on a GPU and wall times on "
    "a CPU, unless a table says otherwise.",
    "A cell is a median. A ratio is the time before over the time after, with its 95 % bootstrap interval; above 1 is faster.",
    "Each table is generated from a record in benchmarks/results when the site is built. The line under it has the device, the versions, "
    "the date and the command that measures it again.",
    "A table holds for its device, its versions and its sizes. `fl.compare(fn, fl.fuse(fn), *args)` measures your own function on your "
    "own device.",
)


def tables_of(card: str) -> list[Measured]:
    return [measured for measured in TABLES if measured.card == card]


def tables_about(pass_name: str) -> list[Measured]:
    """The tables whose difference is due to a pass."""
    return [measured for measured in TABLES if pass_name in measured.passes]


def write_performance(folder: Path) -> None:
    """Writes `performance/index.md` and a page for each card."""
    pages = folder / "performance"
    pages.mkdir(parents=True, exist_ok=True)
    for card in CARDS:
        page = pages / f"{card}.md"
        page.write_text(_page(card, page), encoding="utf-8")
    (pages / "index.md").write_text(_index(), encoding="utf-8")


def _index() -> str:
    rows = [[f"[{t.title}](#{t.anchor})", t.card, _passes(t), *(f"{ratio:.2f}x" for ratio in t.span())] for t in TABLES]
    toc = "\n".join(f"{_NAMES[card]} <{card}>" for card in CARDS)
    return text_of(
        "# Performance",
        "What FusionLab gains on each card on record, and where it gains nothing.",
        bullets(_HOW),
        f"```{{toctree}}\n:maxdepth: 1\n\n{toc}\n```",
        "## All tables",
        "With the smallest and the largest ratio of a table's rows.",
        table(["table", "card", "passes", "smallest", "largest"], rows),
    )


def _passes(measured: Measured) -> str:
    """Links to the passes that a table is about; of several layer passes to the first."""
    layers = [name for name in measured.passes if "multi_transformer" in name]
    pieces = [name for name in measured.passes if name not in layers]
    links = [f"[{name}](../passes/{name}.md)" for name in pieces]
    return ", ".join(links + [f"[layer passes](../passes/{name}.md)" for name in layers[:1]])


def _page(card: str, page: Path) -> str:
    return text_of(
        f"# {_PLACES[card]}",
        f"[How these numbers are measured](index.md) is the same for every card. All records of this one are [below](#records-{card}).",
        *(measured.text(page) for measured in tables_of(card)),
        f"(records-{card})=\n## Records",
        "Each is a JSON file with every sample, the versions, the settings of JAX and the commit.",
        table(["record", "date", "device and versions", "command"], [_record_row(r, page) for r in records_of(card)]),
    )


def _record_row(record: Record, page: Path) -> list[str]:
    command = literal(record.command) if record.command else ""
    return [record.link(page, record.path.name), record.time[:10], record.versions, command]
