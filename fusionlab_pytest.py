"""FusionLab's pytest plugin: the fixture `fusionlab`, its marker, its options, and what the terminal summary tells of it.

pytest loads this in every run where FusionLab is installed, so it imports pytest alone. It stands outside the package on purpose: importing
the package imports JAX, which reads JAX_PLATFORMS, JAX_ENABLE_X64 and the like then, before any conftest.py could set them.
Everything else is in `fusionlab.testing`, which the fixture imports when a test asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fusionlab.testing.fixture import FusionLabFixture

_KEY = "fusionlab"  # of a report's user_properties, which pytest-xdist brings from its workers
_DEFAULTS = ("passes", "device", "implementation")  # what the marker may set; FusionLab is not imported to ask
_FOLDER = "__fusionlab__"  # of snapshots
_LINES = 20  # of the summary, unless -v asks for all


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusionlab", "fusions locked in tests (FusionLab)")
    group.addoption(
        "--fusionlab-update",
        action="store_true",
        default=False,
        help="write the snapshots that are missing or differ",
    )
    group.addoption(
        "--fusionlab-report",
        metavar="DIR",
        default=None,
        help="folder for the HTML reports of failed assertions (default: a temporary one of pytest's)",
    )
    group.addoption(
        "--fusionlab-device",
        metavar="NAME",
        default=None,
        help="judge for this device where a test names none: cpu, sm_90 and the like, or a card (h100, a100, rtx4090, ...)",
    )
    parser.addini("fusionlab_report", "as --fusionlab-report, relative to this file", type="string", default=None)
    parser.addini("fusionlab_device", "as --fusionlab-device", type="string", default=None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "fusionlab(passes=..., device=..., implementation=...): defaults for the assertions of the fixture `fusionlab`",
    )
    if config.option.fusionlab_report is not None:
        # Made absolute here: pytest-xdist hands options to its workers, whose folder may be another.
        folder = config.invocation_params.dir / config.option.fusionlab_report
        config.option.fusionlab_report = str(folder.absolute())


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Snapshots are no tests: pytest would read test_*.txt for doctests."""
    return True if collection_path.name == _FOLDER else None


@pytest.fixture
def fusionlab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FusionLabFixture:
    """Assertions on what FusionLab fuses: assert_fused, assert_rejected, assert_equivalent, assert_not_slower, snapshot."""
    from fusionlab.testing.fixture import Context, FusionLabFixture

    node, config = request.node, request.config
    device = config.option.fusionlab_device or config.getini("fusionlab_device")
    defaults = {"device": device} if device else {}
    return FusionLabFixture(
        Context(
            file=node.path,
            name=".".join(n.name for n in node.listchain() if isinstance(n, pytest.Class | pytest.Function)),
            defaults=defaults | _marked(node),
            update=config.option.fusionlab_update,
            folder=lambda: _report_folder(config, tmp_path_factory),
            publish=lambda summary: _publish(node, summary),
        )
    )


def _marked(node: pytest.Item) -> dict[str, Any]:
    """What the markers on a test say; the nearest one goes first, argument by argument."""
    marked: dict[str, Any] = {}
    for marker in node.iter_markers("fusionlab"):
        odd = [*map(repr, marker.args), *(name for name in marker.kwargs if name not in _DEFAULTS)]
        if odd:
            took = f"got {', '.join(odd)}, needed {', '.join(_DEFAULTS)}, by name"
            pytest.fail(f"pytest.mark.fusionlab: {took}", pytrace=False)
        marked = {**marker.kwargs, **marked}
    return marked


def _report_folder(config: pytest.Config, temporary: pytest.TempPathFactory) -> Path:
    given = config.option.fusionlab_report
    if given is None and config.getini("fusionlab_report"):
        given = str((config.inipath.parent if config.inipath else config.rootpath) / config.getini("fusionlab_report"))
    return Path(given) if given is not None else temporary.getbasetemp() / "fusionlab"


def _publish(node: pytest.Item, summary: Mapping[str, Any]) -> None:
    """Puts what is to be told of a test where its report takes it from."""
    node.user_properties[:] = [p for p in node.user_properties if p[0] != _KEY]
    node.user_properties.append((_KEY, json.dumps(summary, sort_keys=True)))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A section with a line for each test that used the fixture."""
    told = dict(_told(terminalreporter.stats))
    if not told:
        return
    terminalreporter.section("fusionlab")
    most = len(told) if config.get_verbosity() > 0 else _LINES
    for name, summary in [*told.items()][:most]:
        terminalreporter.line(f"{name}: {_line(summary)}")
    if len(told) > most:
        terminalreporter.line(f"and {len(told) - most} more tests: -v tells all")


def _told(stats: Mapping[str, list[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tests that used the fixture, and what was told of each; one that ran again counts as it ran last."""
    for reports in stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                yield from ((report.nodeid, json.loads(str(v))) for k, v in report.user_properties if k == _KEY)


def _line(summary: Mapping[str, Any]) -> str:
    """ "2 assertions; 3 fused (gemm_epilogue 2, layer_norm 1); 1 declined (escapes 1); report: x.html"."""
    n = summary["assertions"]
    parts = [f"{n} assertion{'s' if n != 1 else ''}"]
    for word in ("fused", "declined"):
        counts = summary[word]
        parts.append(f"{sum(counts.values())} {word}{f' ({_counted(counts)})' if counts else ''}")
    parts += [f"snapshots {_counted(summary['snapshots'])}"] if summary["snapshots"] else []
    parts += [f"report: {path}" for path in summary["reports"]]
    return "; ".join(parts)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items())
