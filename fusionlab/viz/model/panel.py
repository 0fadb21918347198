"""The explorer's left side as plain data: passes with their options, identical sites together, declined sites, and lints."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fusionlab.errors import REJECTIONS
from fusionlab.fusers import Strategy, registry

from ..markup import as_on_screen
from .alike import alike

_ALIKE = ("text", "attrs", "nodes_before", "nodes_after", "arithmetic", "backends", "same_code", "idle")


def panel(
    whole: Mapping[str, Any],
    strategy: Strategy | None,
    shares: Mapping[str, Any],
    idle: Collection[str] = (),
    blamed: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The data of the toggles.

    Args:
      whole: a view model, or the summary of one.
      strategy: what is asked of the passes now; None for all of them by default.
      shares: site id -> its `SiteShare`, of those that were measured.
      idle: ids of the sites that are left as they are unless asked for.
      blamed: site id -> what it was found to do, of those that make the program slower or worse.
    """
    sites = {s["id"]: s | {"idle": s["id"] in idle, "blamed": blamed.get(s["id"], "")} for s in whole["sites"]}
    return {
        "passes": [_pass(p, [sites[i] for i in p["site_ids"]], strategy, shares) for p in whole["passes"]],
        "declined": [_code(code, rows) for code, rows in _by_code(whole["sites"]).items()],
        "lints": [_lint(lint) for lint in whole["lints"]],
    }


def _lint(lint: Mapping[str, Any]) -> dict[str, Any]:
    """A lint; `pick` is what selects its place."""
    where = lint["source"]["where"] if lint["source"] else lint["id"]
    return {"id": lint["id"], "pick": lint["node"], "where": where, "text": lint["sentence"], "edit": lint["edit"]}


def _pass(
    row: Mapping[str, Any], sites: list[dict[str, Any]], strategy: Strategy | None, shares: Mapping[str, Any]
) -> dict[str, Any]:
    keys = ("name", "colour", "tint", "formula", "state", "applied", "declined")
    groups = [_group(row["name"], k, group, shares) for k, group in enumerate(alike(sites, _ALIKE))]
    labels = [g["label"] for g in groups]
    for g in groups:
        g["names"] = _names(g["ids"]) if labels.count(g["label"]) > 1 else ""
    return {k: row[k] for k in keys} | {
        "sites": len(sites),
        "options": options_of(row["name"], strategy),
        "groups": groups,
    }


def _group(name: str, number: int, sites: Sequence[Mapping[str, Any]], shares: Mapping[str, Any]) -> dict[str, Any]:
    on = sum(s["state"] == "applied" for s in sites)
    source, rows = sites[0]["source"], [_site(s, shares.get(s["id"])) for s in sites]
    return {
        "key": f"{name}:{number}",
        "label": sites[0]["text"],
        "where": source["where"] if source else "",
        "count": len(sites),
        "ids": [s["id"] for s in sites],
        "state": "on" if on == len(sites) else "partial" if on else "off",
        "losing": any(row["losing"] for row in rows),
        "sites": rows,
    }


def _names(ids: Sequence[str]) -> str:
    """The modules that sites are in, without the common outer ones: these distinguish groups of one formula."""
    scopes = [i.partition("@")[2].rpartition("#")[0].rpartition("/")[2] for i in ids]
    return ", ".join(filter(None, dict.fromkeys(scopes)))


def _label(site: Mapping[str, Any]) -> str:
    """The location of a site: its module, or its line if it is in no module."""
    place = site["id"].partition("@")[2] or site["id"]
    return f"{site['source']['where']} {place}" if place.startswith("#") and site["source"] else place


def _site(site: Mapping[str, Any], share: Any) -> dict[str, Any]:
    losing = bool(site["blamed"]) or (share is not None and share.is_clear and share.saved_s < 0)
    note = ""
    if site["blamed"]:
        note = site["blamed"]
    elif share is not None:
        note = "saves " + as_on_screen(str(share).partition(": ")[2])
    elif site["waits"]:
        note = "not measured here"
    elif site["same_code"]:
        note = "what XLA runs anyway"
    elif site["idle"]:
        note = "left as it is by default"
    return {
        "id": site["id"],
        "label": _label(site),
        "on": site["state"] == "applied",
        "idle": site["idle"],
        "note": note,
        "losing": losing,
    }


def _by_code(sites: Collection[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    codes: dict[str, list[Mapping[str, Any]]] = {}
    for site in sites:
        if site["state"] == "declined":
            codes.setdefault(site["code"], []).append(site)
    return codes


def _code(code: str, sites: list[Mapping[str, Any]]) -> dict[str, Any]:
    keys = ("id", "pass", "text", "edit", "matched", "total")
    rows = [{k: s[k] for k in keys} | {"where": s["source"]["where"] if s["source"] else ""} for s in sites]
    return {"code": code, "doc": REJECTIONS.get(code, ""), "rows": rows}


def options_of(name: str, strategy: Strategy | None) -> list[dict[str, Any]]:
    """The options of a pass, with what they are set to; none for a pass that is not registered (pictures of hand-made findings)."""
    pass_ = registry().get(name)
    if pass_ is None:
        return []
    given = (strategy or {}).get(name, {})
    given = given if isinstance(given, Mapping) else {}
    return [
        {"name": key, "value": given.get(key, option.default), "choices": option.values, "doc": option.meaning}
        for key, option in pass_.declared.items()
    ]


def with_option(strategy: Strategy | None, asked: Collection[str], name: str, option: str, value: Any) -> Strategy:
    """The strategy with one option of one pass changed; `asked` are the passes meant where it names none."""
    passes: dict[str, Any] = dict.fromkeys(asked, True) | dict(strategy or {})
    before = passes.get(name, {})
    passes[name] = (dict(before) if isinstance(before, Mapping) else {}) | {option: value}
    return Strategy(**passes)
