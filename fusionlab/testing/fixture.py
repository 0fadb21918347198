"""The pytest fixture `fusionlab`: the assertions as methods, with the defaults, the reports and the snapshots of one test."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, FusionLabError
from ..fusers import Rejection, registry
from ..output import write_file
from ..verbs import comparison, lab
from ..viz.html.report import report_html
from . import asserts
from .messages import FusionAssertionError
from .snapshots import DEVICE, check_snapshot, file_name, snapshot_path, snapshot_text


@dataclass
class Context:
    """The plugin's knowledge of the test that requests the fixture.

    Attributes:
      file, name: the test's file; its name with its classes and parameters.
      defaults: keyword arguments of the assertions from the marker and the options.
      update: rewrite snapshots.
      folder: returns the folder for reports; called only if a report is written.
      publish: called with the summary after each assertion.
    """

    file: Path
    name: str
    defaults: Mapping[str, Any]
    update: bool
    folder: Callable[[], Path]
    publish: Callable[[Mapping[str, Any]], None]


@dataclass
class Summary:
    """A test's part of the terminal summary: assertions, fused sites of each function by pass, declined ones by code."""

    assertions: int = 0
    fused: dict[str, int] = field(default_factory=dict)
    declined: dict[str, int] = field(default_factory=dict)
    snapshots: dict[str, int] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)


class FusionLabFixture:
    """The fixture `fusionlab`. Missing arguments of a method are taken from the marker, then from the command line.

    Each method works like the function of its name in `fusionlab.testing`; if it fails, it writes an HTML page of the program
    before and after fusing and ends the message with its path.
    """

    def __init__(self, test: Context) -> None:
        self._test = test
        self._summary = Summary()
        self._seen: set[tuple[str, ...]] = set()
        self._snapshots: set[Path] = set()

    def assert_fused(self, fn: Callable, args: Sequence[Any] = (), **options: Any) -> lab.Findings:
        """See `fusionlab.testing.assert_fused`."""
        __tracebackhide__ = True
        return self._run(asserts.assert_fused, fn, args, options)

    def assert_rejected(self, fn: Callable, args: Sequence[Any] = (), **options: Any) -> tuple[Rejection, ...]:
        """See `fusionlab.testing.assert_rejected`."""
        __tracebackhide__ = True
        return self._run(asserts.assert_rejected, fn, args, options)

    def assert_equivalent(self, fn: Callable, args: Sequence[Any] = (), **options: Any) -> comparison.Comparison:
        """See `fusionlab.testing.assert_equivalent`."""
        __tracebackhide__ = True
        return self._run(asserts.assert_equivalent, fn, args, options)

    def assert_not_slower(self, fn: Callable, args: Sequence[Any] = (), **options: Any) -> comparison.Comparison:
        """See `fusionlab.testing.assert_not_slower`."""
        __tracebackhide__ = True
        return self._run(asserts.assert_not_slower, fn, args, options)

    def snapshot(
        self, fn: Callable, args: Sequence[Any] = (), *, name: str = "", graph: bool = True, **options: Any
    ) -> lab.Findings:
        """Asserts that a program and its findings are those stored in `__fusionlab__/<test module>/<test>.txt` next to the test file.

        With `--fusionlab-update` the file is written instead. The findings are for a plain CPU unless a device is named, so that the file
        is the same on every machine.

        Args:
          fn, args: the function and its example arguments, arrays or `jax.ShapeDtypeStruct`s, in any pytrees.
          name: distinguishes several snapshots of one test.
          graph: include the program's text; False stores only the findings, which change less with JAX's version.
          **options: as for `assert_fused`.

        Returns:
          The findings.

        Raises:
          FusionAssertionError: the file is missing or differs. ArgumentError: a name used twice in one test.
          OutputError: the file cannot be read or written.
        """
        __tracebackhide__ = True
        path = snapshot_path(self._test.file, self._test.name, name)
        if path in self._snapshots:
            raise ArgumentError(f"name: got {name!r} twice in one test, needed a different name for each snapshot")
        self._snapshots.add(path)
        return self._run(
            functools.partial(self._snapshot, path, graph), fn, args, {"device": DEVICE} | self._with(options)
        )

    def _snapshot(self, path: Path, graph: bool, fn: Callable, args: Sequence[Any], **options: Any) -> lab.Findings:
        __tracebackhide__ = True
        found = asserts.Asserted(fn, args, **options).find()
        done = check_snapshot(path, snapshot_text(found, graph), self._test.update, found)
        self._summary.snapshots[done] = self._summary.snapshots.get(done, 0) + 1
        return found

    def _with(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._test.defaults, **options}

    def _run(self, assertion: Callable[..., Any], fn: Callable, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Runs one assertion and counts it in the summary; a failure gets a report."""
        __tracebackhide__ = True
        self._summary.assertions += 1
        try:
            return assertion(fn, args, **self._with(options), on_found=self._tell)
        except FusionAssertionError as failure:
            message = "\n".join([str(failure), *self._report(failure)])
            raise FusionAssertionError(message, failure.found, failure.evidence) from None
        finally:
            self._test.publish(vars(self._summary))

    def _tell(self, found: lab.Findings) -> None:
        """Counts the sites of a program once, however many assertions are made on it."""
        sites = (found.graph.name, *(x.id for x in (*found.candidates, *found.rejections)))
        if sites in self._seen:
            return
        self._seen.add(sites)
        fused, declined = self._summary.fused, self._summary.declined
        for c in found.select():
            fused[c.pass_name] = fused.get(c.pass_name, 0) + 1
        for r in found.rejections:
            declined[r.code] = declined.get(r.code, 0) + 1

    def _report(self, failure: FusionAssertionError) -> list[str]:
        """The line with the path of the HTML report, or with the reason why there is none."""
        if failure.found is None and failure.evidence is None:
            return []
        try:
            page = _page(failure.found, failure.evidence)
            path = self._test.folder() / f"{file_name(f'{self._test.file.stem}.{self._test.name}')}.html"
            if self._summary.reports:
                path = path.with_suffix(f".{len(self._summary.reports) + 1}.html")
            write_file(path, page, folders=True, advice="choose another folder: --fusionlab-report DIR")
        except (FusionLabError, OSError) as error:
            return [f"no report: {error}"]
        self._summary.reports.append(str(path))
        return [f"report: {path}"]


def _page(found: lab.Findings | None, evidence: comparison.Comparison | None) -> str:
    """The page of the program before and after fusing, with the measurements; for two given functions, only the measurements."""
    if found is None:
        return evidence.to_html() if evidence is not None else ""
    after = found.apply() if found.select() else None
    formulas = {name: p.formula for name, p in registry().items()}
    return report_html(found.graph, found, evidence=evidence, after=after, formulas=formulas)
