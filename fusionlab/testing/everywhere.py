"""A pytest plugin that compares `fl.fuse` with `jax.jit` in every test of a library, without changes to the tests.

    pytest -p fusionlab.testing.everywhere

While a test runs, each outermost call with concrete arguments of a function under `jax.jit`, `jax.grad`, `jax.value_and_grad`, `jax.vmap`,
`nnx.jit` or a filtered transformation of equinox, of a module of nnx or equinox, and of `apply` or `init_with_output` of a linen module
is run once more under `fl.fuse`, on copies of its arguments. A test fails if that raises and `jax.jit` does not, or if a result or an
in-place change has a different type or an error against float64 beyond rounding (`fusionlab.testing.tolerances`). Calls that `jax.jit`
also refuses, and calls with side effects, are skipped and counted as such. A test's own results are those of its own calls.

The terminal summary counts calls, distinct programs, sites fused and declined, and lists what was not compared and why, also with
pytest-xdist's workers. Options: `--fusionlab-everywhere-passes A,B`, and `--fusionlab-everywhere-seconds N`, after which further programs
of a test are skipped. Functions are traced more often than without the plugin: a count that a test keeps during tracing is restored if
it is a number or a list that the function closes over, and not otherwise.

JAX is imported before any conftest.py runs, so environment variables that it sets (JAX_PLATFORMS, XLA_FLAGS) must be set in the shell.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from ..graph.calls.parts import is_array
from ..graph.calls.state import is_object
from ..graph.calls.wrappers import jit_of
from ..showing import counted
from .beside import CallArguments, CallOutcome, beside
from .closures import put_back
from .watching import Watch

_KEY = "fusionlab_everywhere"  # of a report's user_properties, which pytest-xdist brings from its workers
_SKIPPED = "not compared: "


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusionlab-everywhere", "fl.fuse compared with jax.jit (FusionLab)")
    group.addoption(
        "--fusionlab-everywhere-passes", metavar="A,B", default=None, help="the passes to fuse by (default: all)"
    )
    group.addoption(
        "--fusionlab-everywhere-seconds",
        metavar="N",
        type=float,
        default=120.0,
        help="seconds to spend comparing a test's programs; the rest are skipped (default: 120)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Everywhere(config), "fusionlab-everywhere")


class Everywhere:
    """The state of one pytest run: the watched calls and their outcomes."""

    def __init__(self, config: pytest.Config) -> None:
        passes = config.option.fusionlab_everywhere_passes
        self._passes = None if passes is None else passes.split(",")
        self._most = config.option.fusionlab_everywhere_seconds
        self._watch = Watch(self._on_call)
        self._watch.install()
        self._start()

    def pytest_unconfigure(self) -> None:
        self._watch.uninstall()

    def _start(self) -> None:
        self._counts: Counter[str] = Counter()
        self._faults: list[str] = []
        self._programs: dict[Any, Any] = {}  # with what must live as long as its id tells it
        self._seconds = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._start()
        try:
            with self._watch.on():
                result = yield
        finally:
            if self._counts:
                item.user_properties.append((_KEY, json.dumps(self._counts)))
            text = "\n\n".join(self._faults)
            if text:
                item.add_report_section("call", "fl.fuse compared with jax.jit", text)
            self._programs.clear()
        if text:
            pytest.fail(text, pytrace=False)
        return result

    def _on_call(self, fn: Callable, run: Callable, args: tuple, kwargs: dict) -> Any:
        """The test's own call, then the same call fused."""
        start = time.perf_counter()
        self._counts["calls"] += 1
        given = self._mine(lambda: self._new(fn, args, kwargs))
        self._seconds += time.perf_counter() - start
        try:
            out = run(*args, **kwargs)
        except BaseException:
            self._counts[f"{_SKIPPED}raises in the test itself"] += 1
            raise
        if given is not None:
            start = time.perf_counter()
            with _undisturbed(fn):
                self._mine(lambda: self._count(fn, given, beside(fn, given, (out, (args, kwargs)), self._passes)))
            self._seconds += time.perf_counter() - start
        return out

    def _mine(self, step: Callable[[], Any]) -> Any:
        """The result of one of the plugin's own steps; a failure there is counted and blamed on neither the test nor the fused function."""
        try:
            return step()
        except Exception as error:
            self._counts[f"{_SKIPPED}the plugin failed: {type(error).__name__}"] += 1
            return None

    def _new(self, fn: Callable, args: tuple, kwargs: dict) -> CallArguments | None:
        """A copy of the arguments if the test has not called this program before."""
        donates = (jit := jit_of(fn)) is not None and bool(
            jit.donate_argnums or jit.donate_argnames or jit.donates_rest
        )
        given = CallArguments.of(args, kwargs, donates)
        key = _key(fn, given)
        if key in self._programs:
            return None
        self._programs[key] = (fn, given)
        if self._seconds >= self._most:
            self._counts[f"{_SKIPPED}out of time"] += 1
            return None
        self._counts["programs"] += 1
        return given

    def _count(self, fn: Callable, given: CallArguments, verdict: CallOutcome) -> None:
        self._counts["sites"] += verdict.sites
        self._counts["declined"] += verdict.declined
        if verdict.skipped:
            self._counts[_SKIPPED + verdict.skipped] += 1
        if verdict.fault:
            self._counts["faults"] += 1
            name = getattr(fn, "__qualname__", type(fn).__name__)
            self._faults.append(f"{name}({given.types}): {verdict.fault}\n{_user_line()}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        counts: Counter[str] = Counter()
        tests = 0
        for each in _properties(terminalreporter.stats):
            tests += 1
            counts.update(each)
        terminalreporter.section("fl.fuse compared with jax.jit")
        n = {name: counts[name] for name in ("calls", "programs", "sites", "declined", "faults")}
        terminalreporter.line(
            f"{counted(tests, 'test')}, {counted(n['calls'], 'call')}, {counted(n['programs'], 'program')}: "
            f"{counted(n['sites'], 'site')} fused, {n['declined']} declined, {counted(n['faults'], 'fault')}"
        )
        for name, count in sorted(counts.items()):
            if name.startswith(_SKIPPED):
                terminalreporter.line(f"{name}: {count}")


def _properties(stats: dict[str, list[Any]]) -> Iterator[dict[str, int]]:
    for reports in stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                yield from (json.loads(str(v)) for k, v in report.user_properties if k == _KEY)


def _key(fn: Callable, given: CallArguments) -> Any:
    """The key of a program within a test: the function, the types of arrays, and the fixed arguments."""
    return id(fn), str(given.tree), tuple(_kind(x) for x in given.leaves)


def _kind(x: Any) -> Any:
    if is_object(x):
        nnx = sys.modules["flax.nnx"]
        graph, state = nnx.split(x)
        return repr(graph), tuple(map(_kind, jax.tree.leaves(state)))
    if is_array(x, numbers=False):
        return str(getattr(x, "dtype", "")), getattr(x, "shape", ()), getattr(x, "weak_type", False)
    return type(x), repr(x) if isinstance(x, int | float | complex | str) else id(x)


@contextlib.contextmanager
def _undisturbed(fn: Callable) -> Iterator[None]:
    """Hides the effects of a further run from the test: printed lines, warnings, random numbers drawn, values closed over."""
    states = random.getstate(), np.random.get_state()
    try:
        with put_back(fn), warnings.catch_warnings(record=True), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _user_line() -> str:
    """The line at which the test made the call."""
    frames = [f for f in traceback.extract_stack() if "/fusionlab/testing/" not in f.filename.replace("\\", "/")]
    return f"  at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
