"""What an explorer has by name: switches of passes and sites, which the check boxes and scripts share, and the sites themselves."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping

from fusionlab.errors import ArgumentError, unknown_name
from fusionlab.fusers import Candidate, Rejection
from fusionlab.fusers.report.findings import Findings
from fusionlab.showing import Shown, Table
from fusionlab.tracebacks import errors_for_users

Site = Candidate | Rejection


@errors_for_users
class Toggles(MutableMapping[str, bool | None], Shown):
    """Pass name or site id -> switched on?; a pass of which only some sites are on reads as None.

    `toggles["gemm_epilogue"] = False` switches every site of the pass, `toggles[site_id] = True` one site. `changed` is
    called with the new set of enabled site ids after each change that made a difference.
    """

    def __init__(self, findings: Findings, enabled: frozenset[str], changed: Callable[[frozenset[str]], None]):
        self._changed = changed
        self.adopt(findings, enabled)

    def adopt(self, findings: Findings, enabled: frozenset[str]) -> None:
        """Becomes the switches of these findings, with these sites on; `changed` is not called."""
        sites = {c.id: c.pass_name for c in findings.candidates}
        unknown = enabled - sites.keys()
        if unknown:
            raise unknown_name("site", min(unknown), sites)
        self._sites, self._passes, self._enabled = sites, tuple(findings.passes), enabled

    @property
    def enabled(self) -> frozenset[str]:
        """Ids of the sites that are on."""
        return self._enabled

    def sites(self, name: str) -> list[str]:
        """The site ids a name stands for: all of a pass, or the site itself."""
        if name in self._passes:
            return [site for site, of in self._sites.items() if of == name]
        if name in self._sites:
            return [name]
        raise unknown_name("pass or site", name, (*self._passes, *self._sites))

    def __getitem__(self, name: str) -> bool | None:
        states = {site in self._enabled for site in self.sites(name)}
        return None if len(states) == 2 else states == {True}

    def __setitem__(self, name: str, on: bool | None) -> None:
        if not isinstance(on, bool):
            raise ArgumentError(f"toggles[{name!r}]: got {on!r}, needed True or False")
        sites = frozenset(self.sites(name))
        self.set(self._enabled | sites if on else self._enabled - sites)

    def set(self, enabled: frozenset[str]) -> bool:
        """Switches on exactly these sites; whether that changed anything."""
        unknown = enabled - self._sites.keys()
        if unknown:
            raise unknown_name("site", min(unknown), self._sites)
        if enabled == self._enabled:
            return False
        self._enabled = enabled
        self._changed(enabled)
        return True

    def __delitem__(self, name: str) -> None:
        raise ArgumentError(f"toggles: {name!r} cannot be removed, only switched off")

    def __contains__(self, name: object) -> bool:
        return name in self._passes or name in self._sites

    def __iter__(self) -> Iterator[str]:
        yield from self._passes
        yield from self._sites

    def __len__(self) -> int:
        return len(self._passes) + len(self._sites)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def _sentence(self) -> str:
        return f"{len(self._enabled)} of {len(self._sites)} sites on"

    def _table(self) -> Table:
        return Table(("name", "on"), tuple((name, "partly" if self[name] is None else self[name]) for name in self))

    def to_dict(self) -> dict[str, bool | None]:
        """Plain data, JSON-able: name -> on; None of a pass of which some sites are on."""
        return dict(self)

    def __repr__(self) -> str:
        words = {True: "on", False: "off", None: "partly on"}
        return "\n".join(f"{words[self[name]]:>9}  {name}" for name in self) or "no pass was asked"


class Sites(Mapping[str, Site], Shown):
    """Site id -> what was found there: a candidate, or a rejection that says why it is none; prints each with its state."""

    def __init__(self, findings: Callable[[], Findings], enabled: Callable[[], frozenset[str]]) -> None:
        self._findings, self._enabled = findings, enabled

    @property
    def _found(self) -> dict[str, Site]:
        found = self._findings()
        return {site.id: site for site in (*found.candidates, *found.rejections)}

    def __getitem__(self, name: str) -> Site:
        if name not in self._found:
            raise unknown_name("site", name, self._found)
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._found)

    def state(self, name: str) -> str:
        """ "fused", "can be fused" (it is off), or "declined".

        Raises:
          UnknownNameError: there is no such site.
        """
        if isinstance(self[name], Rejection):
            return "declined"
        return "fused" if name in self._enabled() else "can be fused"

    def __repr__(self) -> str:
        return "\n".join([self._sentence(), *(f"  {self.state(name):<12}  {site}" for name, site in self.items())])

    def items(self) -> ItemsView[str, Site]:
        return self._found.items()

    def _sentence(self) -> str:
        on = self._enabled()
        states = [
            "declined" if isinstance(s, Rejection) else "fused" if n in on else "can be fused" for n, s in self.items()
        ]
        return ", ".join(f"{states.count(state)} {state}" for state in ("fused", "can be fused", "declined"))

    def _table(self) -> Table:
        heads = ("state", "site", "what", "source", "why")
        return Table(heads, tuple((self.state(name), name, *_told(site)) for name, site in self.items()))

    def to_dict(self) -> dict[str, object]:
        """Plain data, JSON-able: id -> the site, with its state."""
        return {name: {"state": self.state(name)} | site.to_dict() for name, site in self.items()}


def _told(site: Site) -> tuple[object, object, str]:
    if isinstance(site, Rejection):
        return f"[{site.code}]", site.source, site.sentence
    return site.formula, site.source, site.idle
