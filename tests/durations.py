"""What each test takes, in seconds of processor time, child processes included.

    python -m tests.durations record [PYTEST ARGUMENT ...]   # runs the default tier, rewrites tests/durations.json
    python -m tests.durations record -m rest                 # the same of the rest: sizes the slices
    python -m tests.durations record tests/graph             # the same of some tests: what is on record of others stays
    python -m tests.durations compare FRESH.json             # where a run differs from the record by more than a factor of two

Any run leaves a record of its own with `pytest --durations-to=FILE`. Processor time is what is written down, since it says
the same on a busy machine; a module's fixture counts for the test that asks for it first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

try:
    import psutil
except ModuleNotFoundError:  # then what children that still run have used is not counted
    psutil = None

from tests.tiers import RECORD, function_of

ROOT = Path(__file__).parents[1]
MOST_SECONDS = 10.0  # of a test on record in the default tier
MOST_SECONDS_OF_A_SCREEN = 60.0  # of one that drives a browser or runs a notebook
SCREENS = ("tests/browser/", "tests/house/test_notebooks.py")
MOST_MINUTES = 13.0
DEAR_FIXTURE = 2.0  # seconds: a fixture of a module or more that is listed
WORTH_TELLING = 2.0  # seconds: what takes less may differ by any factor


def processor_seconds() -> float:
    """What this process, its descendants that have ended and those that run have used so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(u.ru_utime + u.ru_stime for u in used)
    for child in psutil.Process().children(recursive=True) if psutil else ():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


SLICE = pytest.StashKey[str]()  # what is said of the slice that runs; tests/conftest.py chooses it


class Recorder:
    """Adds up what each test function takes, in one process of pytest or in all workers of xdist."""

    def __init__(self, config: pytest.Config, path: Path | None):
        self._config, self._path = config, path
        self.seconds: Counter[str] = Counter()
        self.cases: Counter[str] = Counter()
        self.fixtures: dict[str, float] = {}
        self.collection: list[float] = []
        self.slice = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        begun = processor_seconds()
        result = yield
        if self._runs_tests:
            self.collection.append(round(processor_seconds() - begun, 1))
        return result

    @property
    def _runs_tests(self) -> bool:
        """Whether tests run in this process, and not in workers of it."""
        return hasattr(self._config, "workerinput") or not self._config.getoption("numprocesses", None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if self._runs_tests:
            begun = processor_seconds()
            result = yield
            self.seconds[function_of(item.nodeid)] += processor_seconds() - begun
            self.cases[function_of(item.nodeid)] += 1
            return result
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        begun = processor_seconds()
        result = yield
        self._took(f"{fixturedef.baseid}::{fixturedef.argname}", processor_seconds() - begun)
        return result

    def _took(self, fixture: str, seconds: float) -> None:
        self.fixtures[fixture] = max(seconds, self.fixtures.get(fixture, 0.0))

    def pytest_sessionfinish(self) -> None:
        self.slice = self._config.stash.get(SLICE, self.slice)
        mine = {name: getattr(self, name) for name in ("seconds", "cases", "fixtures", "collection", "slice")}
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["durations"] = json.dumps(mine)
        elif self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(mine), "utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        told = json.loads(getattr(node, "workeroutput", {}).get("durations", "{}"))
        self.seconds.update(told.get("seconds", {}))
        self.cases.update(told.get("cases", {}))
        for fixture, seconds in told.get("fixtures", {}).items():
            self._took(fixture, seconds)
        self.collection += told.get("collection", [])
        self.slice = told.get("slice", self.slice)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        minutes = sum(self.seconds.values()) / 60
        terminalreporter.write_line(
            f"processor time: {minutes:.1f} minutes of {sum(self.cases.values())} cases of {len(self.cases)} functions; "
            f"collection {', '.join(f'{s:.1f} s' for s in self.collection)}"
        )
        if self.slice:
            terminalreporter.write_line(self.slice)


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds[name], 2) for name in sorted(seconds)}


def ran_whole(name: str, arguments: list[str]) -> bool:
    """Whether the file of a test function was run whole, so that the function, if it did not run, is gone or of another tier."""
    path = ROOT / name.partition("::")[0]
    paths = [ROOT / a for a in arguments if (ROOT / a).exists()]
    return "-k" not in arguments and any(p in (path, *path.parents) for p in paths)


def record(arguments: list[str]) -> int:
    """Runs pytest with caches of its own and writes what its tests took into the record; the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "durations.json"
        command = [sys.executable, "-m", "pytest", f"--durations-to={fresh}", *arguments]
        status = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"FUSIONLAB_TEST_CACHE": folder}, check=False
        ).returncode
        if not fresh.exists():
            return status or 1
        told = json.loads(fresh.read_text("utf-8"))
    import jax

    held = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    prefix = "rest_" if "rest" in arguments else ""
    held["what"] = "seconds of processor time of each test function; written by python -m tests.durations record"
    held["machine"] = (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, jax {jax.__version__}"
    )
    some = any((ROOT / a.partition("::")[0]).exists() for a in arguments)
    kept = {name: held[name] if some else {} for name in (f"{prefix}seconds", f"{prefix}cases", "fixtures")}
    for name in [name for name in kept[f"{prefix}seconds"] if ran_whole(name, arguments)]:
        del kept[f"{prefix}seconds"][name], kept[f"{prefix}cases"][name]
    held[f"{prefix}seconds"] = rounded(kept[f"{prefix}seconds"] | told["seconds"])
    cases = kept[f"{prefix}cases"] | told["cases"]
    held[f"{prefix}cases"] = {name: cases[name] for name in sorted(cases)}
    if not prefix:
        dear = {name: s for name, s in told["fixtures"].items() if s > DEAR_FIXTURE}
        # What two workers that share a module's tests may both have to make.
        held["fixtures"] = rounded(kept["fixtures"] | dear)
    RECORD.write_text(json.dumps(held, indent=0) + "\n", "utf-8")
    return status


def differences(held: dict[str, float], fresh: dict[str, float]) -> list[str]:
    """Lines about the tests whose time differs from the record by more than a factor of two, the dearest first."""
    lines = []
    for name in sorted(fresh, key=lambda name: -fresh[name]):
        now, before = fresh[name], held.get(name)
        if max(now, before or 0.0) < WORTH_TELLING:
            continue
        if before is None:
            lines.append(f"{now:7.1f} s, not on record: {name}")
        elif not before / 2 <= now <= before * 2:
            lines.append(f"{now:7.1f} s, {before:.1f} s on record: {name}")
    return lines


def compare(path: Path) -> None:
    held, fresh = (json.loads(p.read_text("utf-8")) for p in (RECORD, path))
    lines = differences(held["seconds"], fresh["seconds"])
    total = [sum(f["seconds"].values()) / 60 for f in (fresh, held)]
    print(
        f"{total[0]:.1f} minutes of processor time, {total[1]:.1f} on record; {len(lines)} tests differ by more than 2x"
    )
    print(*lines, sep="\n")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("record", help="run the tests and rewrite tests/durations.json; further arguments go to pytest")
    verbs.add_parser("compare", help="where a run differs from the record").add_argument("fresh", type=Path)
    asked, rest = parser.parse_known_args(arguments)
    if asked.verb == "record":
        return record(rest)
    compare(asked.fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
