"""Switches by name: a pass or a site, on or off, shared by check boxes and scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping

from fusionlab.errors import ArgumentError, unknown_name
from fusionlab.fusers.report.findings import Findings
from fusionlab.showing import Shown, Table, counted
from fusionlab.tracebacks import errors_for_users


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
        """The site ids of a name: all sites of a pass, or the site itself."""
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
        return f"{len(self._enabled)} of {counted(len(self._sites), 'site')} on"

    def _table(self) -> Table:
        return Table(("name", "on"), tuple((name, "partly" if self[name] is None else self[name]) for name in self))

    def to_dict(self) -> dict[str, bool | None]:
        """Plain data, JSON-able: name -> on; None of a pass of which some sites are on."""
        return dict(self)

    def __repr__(self) -> str:
        words = {True: "on", False: "off", None: "partly on"}
        return "\n".join(f"{words[self[name]]:>9}  {name}" for name in self) or "no pass was asked"
