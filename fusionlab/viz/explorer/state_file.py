"""The state of an explorer as a file: plain JSON; nothing in it is ever run. `fusionlab.load` reads it back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionlab.errors import ArgumentError, UnknownNameError
from fusionlab.evidence.attribution import SiteShares
from fusionlab.evidence.bisection import Bisection
from fusionlab.evidence.comparison import Evidence
from fusionlab.evidence.instruments.record import load_json, to_json
from fusionlab.evidence.training.curve import FORMAT as CURVE
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.text import block_fingerprint
from fusionlab.showing import Shown, counted

from ..model.setting import Decision, Setting

if TYPE_CHECKING:
    from .session import Session

FORMAT, VERSION = "fusionlab.lab", 1
_KEYS = {"format", "version", "function", "program", "device", "setting", "decisions", "measured"}


@dataclass(frozen=True, eq=False)
class Saved(Shown):
    """The saved state of an explorer.

    Attributes:
      function: name of the program.
      program: digest of its equations, by which a changed program is recognised.
      device: the device of the decisions.
      setting: the saved setting.
      decisions: the ledger.
      measured: setting -> the evidence that was measured with it.
      shares: setting -> the time that each of its sites saves, where that was measured.
      blamed: setting -> which of its sites are to blame for a measurement that is slower ("time") or worse ("error").
    """

    _listed = "decisions"

    function: str
    program: str
    device: str
    setting: Setting
    decisions: tuple[Decision, ...]
    measured: Mapping[Setting, Evidence] = field(default_factory=dict)
    shares: Mapping[Setting, SiteShares] = field(default_factory=dict)
    blamed: Mapping[Setting, Mapping[str, Bisection]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "function": self.function,
            "program": self.program,
            "device": self.device,
            "setting": self.setting.to_dict(),
            "decisions": [d.to_dict() for d in self.decisions],
            "measured": [
                {"setting": s.to_dict(), "evidence": e.to_dict()} | self._sites(s) for s, e in self.measured.items()
            ],
        }

    def _sites(self, setting: Setting) -> dict[str, Any]:
        """What was measured of the sites of a setting."""
        shares, blamed = self.shares.get(setting), self.blamed.get(setting)
        found = {"shares": asdict(shares)} if shares is not None else {}
        return found | ({"blamed": {of: asdict(b) for of, b in blamed.items()}} if blamed else {})

    @classmethod
    def from_dict(cls, data: Any, evidence: type[Evidence] = Evidence) -> Saved:
        """Reads `to_dict` back; `evidence` is the class of what was measured.

        Raises:
          ArgumentError: it is anything else, or of a newer version.
        """
        _check_format(data)
        texts = {k: data[k] for k in ("function", "program", "device")}
        bad = [k for k, v in texts.items() if not isinstance(v, str)]
        bad += [k for k in ("decisions", "measured") if not isinstance(data[k], list)]
        if bad:
            raise ArgumentError(f"{bad[0]}: got {data[bad[0]]!r:.80}, needed what lab.save writes")
        setting, decisions = Setting.from_dict(data["setting"]), tuple(map(Decision.from_dict, data["decisions"]))
        read = [_measured(m, evidence) for m in data["measured"]]
        return cls(
            **texts,
            setting=setting,
            decisions=decisions,
            measured={s: e for s, e, _, _ in read},
            shares={s: shares for s, _, shares, _ in read if shares is not None},
            blamed={s: blamed for s, _, _, blamed in read if blamed},
        )

    @property
    def evidence(self) -> Evidence:
        """What was measured with the saved setting; with another one, where that was the only measurement.

        Raises:
          ArgumentError: nothing was measured.
        """
        found = self.measured.get(self.setting)
        if found is None and len(self.measured) == 1:
            (found,) = self.measured.values()
        if found is None:
            raise ArgumentError(
                f"got {self!r}, needed one with a measurement of the sites that were on: lab.measure(), then lab.save('x.json')"
            )
        return found

    def __repr__(self) -> str:
        on, decisions = counted(len(self.setting.enabled), "site"), counted(len(self.decisions), "decision")
        return (
            f"<saved explorer of {self.function}: {on} on, {decisions}, {counted(len(self.measured), 'measurement')}>"
        )


def _measured(data: Any, evidence: type[Evidence]) -> tuple[Setting, Evidence, SiteShares | None, dict[str, Bisection]]:
    if not isinstance(data, Mapping) or set(data) - {"shares", "blamed"} != {"setting", "evidence"}:
        raise ArgumentError("measured: needed settings, each with its evidence")
    notes = data["evidence"].get("notes") if isinstance(data["evidence"], Mapping) else None
    if not isinstance(notes, list) or not all(isinstance(n, str) for n in notes):
        raise ArgumentError(f"measured: got the notes {notes!r:.80}, needed a list of texts")
    try:
        shares = SiteShares.from_dict(data["shares"]) if "shares" in data else None
        blamed = {b.of: b for b in map(Bisection.from_dict, data.get("blamed", {}).values())}
        return Setting.from_dict(data["setting"]), evidence.from_dict(data["evidence"]), shares, blamed
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ArgumentError | UnknownNameError):
            raise
        raise ArgumentError(f"measured: not a record of a comparison ({type(error).__name__}: {error})") from error


def record_of(
    given: Evidence | Saved | str | os.PathLike[str], evidence: type[Evidence] = Evidence, what: str = "record"
) -> Evidence:
    """The record of a measurement: itself, that of a saved explorer, or what a file of either has.

    Args:
      given: one of these.
      evidence: the class of what is read.
      what: the name of the argument, for errors.

    Raises:
      ArgumentError: it is nothing of the kind, or nothing was measured.
    """
    if isinstance(given, str | os.PathLike):
        data = {"format": CURVE} if Path(given).suffix.lower() == ".npz" else load_json(given)
        if isinstance(data, Mapping) and data.get("format") == CURVE:
            raise ArgumentError(
                f"{what}: got {given}, a file of a loss curve or of arrays; needed the record of a comparison or an explorer: the .json "
                "file that comparison.save or lab.save wrote. fl.load reads a loss curve"
            )
        is_lab = isinstance(data, Mapping) and data.get("format") == FORMAT
        given = Saved.from_dict(data, evidence) if is_lab else evidence.load(given)
    if isinstance(given, Saved):
        return given.evidence
    if not isinstance(given, Evidence):
        raise ArgumentError(
            f"{what}: got {given!r:.80}, needed a comparison, a saved explorer, or the path of a file of one"
        )
    return given


def saved_of(session: Session) -> Saved:
    """The state of a session."""
    return Saved(
        function=session.graph.name,
        program=program_digest(session.graph),
        device=str(getattr(session.findings, "device", "")),
        setting=session.setting,
        decisions=tuple(session.ledger),
        measured=dict(session.measured),
        shares=dict(session.shares),
        blamed=dict(session.blamed),
    )


def saved_text(session: Session) -> str:
    """The state of a session as JSON."""
    return to_json(saved_of(session).to_dict()) + "\n"


def program_digest(graph: Graph) -> str:
    """Distinguishes programs by their equations, shapes and dtypes, not by source lines."""
    return block_fingerprint(graph.top)


def _check_format(data: Any) -> None:
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ArgumentError(f"got no state of an explorer, needed what lab.save('x.json') writes (format {FORMAT!r})")
    if data.get("version") != VERSION:
        raise ArgumentError(
            f"version: got {data.get('version')!r:.40}, needed {VERSION}: save it again with this FusionLab"
        )
    if set(data) != _KEYS:
        raise ArgumentError(
            f"got the keys {', '.join(sorted(map(str, data)))!r:.200}, needed {', '.join(sorted(_KEYS))}"
        )
