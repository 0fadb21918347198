"""What every test shares: JAX on the CPU, own warnings as errors, and no silent skip where CI is set."""

from __future__ import annotations

import gc
import importlib.metadata
import math
import os
import shutil
from pathlib import Path

from tests import caches

# Before anything imports jax: tests never depend on an accelerator being there, nor on what this shell has set. Those under tests/gpu run
# where this variable asks for one: FUSIONLAB_TEST_PLATFORMS=cuda,cpu.
os.environ["JAX_PLATFORMS"] = os.environ.get("FUSIONLAB_TEST_PLATFORMS", "cpu")
# A test's programs run once, so what counts is how soon they are compiled: LLVM's passes are left out, a program is one piece of code,
# and loops come from XLA's older emitters, where it still has them (a fifth of the time in all). What XLA fuses is the same.
if os.environ["JAX_PLATFORMS"] == "cpu" and "backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
        f"--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters {os.environ.get('XLA_FLAGS', '')}".strip()
    )
    # What was compiled before is taken from there, by this process and those that it starts; JAX's key leaves the processor out.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(caches.FOLDER / "jax" / caches.processor()))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("FUSIONLAB_RAISE", "1")  # a fault of a search is an error here, and no rejection
# The compiled launcher, which hands to the one in Python what that must do.
if any(shutil.which(name) for name in ("cc", "gcc", "clang")):
    os.environ.setdefault("FUSIONLAB_LAUNCHER", "native")

import hypothesis
import pytest

from tests import durations, tiers
from tests.simulated import on_devices  # noqa: F401 - a fixture

# Traces are large and live long: looking through all of them for garbage at every 700th object would be a tenth of many tests' time.
gc.set_threshold(100_000, 20, 50)

pytest_plugins = ("pytester",)  # runs pytest inside a test, for the tests of the plugin

# How long an example takes to generate or run says how busy the machine is, not what is wrong.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-to", metavar="FILE", help="writes what each test function takes, in processor time")


def _asked_by_name(config: pytest.Config) -> set[str]:
    return {Path(arg).as_posix() for arg in config.args if "[" in arg}


# What a test needs says of which kind it is: a fixture that it asks for, or the folder that it lies in.
KIND_OF_FIXTURE = {"emulator": "emulated", "on_devices": "devices", "nvrtc": "nvrtc", "chromium": "browser"}
KIND_OF_FOLDER = {"browser": "browser", "zoo": "zoo", "zoo_extra": "zoo", "recall": "zoo"}


def _kinds(item: pytest.Item) -> set[str]:
    by_fixture = {KIND_OF_FIXTURE[name] for name in getattr(item, "fixturenames", ()) if name in KIND_OF_FIXTURE}
    return by_fixture | {KIND_OF_FOLDER[part.name] for part in item.path.parents if part.name in KIND_OF_FOLDER}


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what `-m` leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for kind in _kinds(item):
            item.add_marker(kind)
    named = _asked_by_name(config)
    least = {item.nodeid: math.inf if item.nodeid in named else _least(item) for item in items}
    extra = {item.nodeid for item in items if "extra" in item.keywords and item.nodeid not in named}
    dear = {item.nodeid for item in items if "dear" in item.keywords and item.nodeid not in named}
    default = tiers.default_tier(least, least.__getitem__) - extra - dear
    rest = [item for item in items if item.nodeid not in default]
    for item in rest:
        item.add_marker(pytest.mark.rest)
    if tree := os.environ.get(tiers.SLICE_VARIABLE):
        drawn = [item.nodeid for item in rest if item.nodeid not in extra]
        chosen = tiers.slice_of(drawn, tree, tiers.seconds_on_record())
        config.stash[durations.SLICE] = str(chosen)
        for item in rest:
            if item.nodeid in chosen.cases:
                item.add_marker(pytest.mark.slice)


def _least(item: pytest.Item) -> float:
    """How many of a test's first cases run by default."""
    if item.get_closest_marker("whole") or "gpu" in item.keywords:
        return math.inf
    return 2 if item.get_closest_marker("devices") else 1


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("durations_to")
    config.pluginmanager.register(durations.Recorder(config, Path(path) if path else None))
    # A warning that one of our lines causes (a deprecated JAX call, say) is a failure; other libraries' are not.
    config.addinivalue_line("filterwarnings", r"error:::fusionlab(\.|\Z)")


def _fail_skips(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Where CI is set, a skipped test is a failed one: there, everything a test may need has been installed, but for a GPU."""
    if report.skipped and os.environ.get("CI") and "gpu" not in report.keywords:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: {reason}: a skip is a failure where CI is set"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    outcome = yield
    _fail_skips(outcome.get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report():
    outcome = yield
    _fail_skips(outcome.get_result())


@pytest.fixture
def require():
    """`require(present, what)`: without `what` the test is skipped, saying what it needs; where CI is set it fails."""

    def check(present: object, what: str) -> None:
        if not present:
            pytest.skip(f"needs {what}")

    return check


@pytest.fixture(scope="session")
def emulator():
    """Runs CUDA kernels as C++ on the CPU; without a compiler the test is skipped."""
    from tests.kernels.emulated import Emulator  # imports JAX

    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("needs g++")
    return Emulator(compiler)


@pytest.fixture(scope="session")
def plugin_options() -> tuple[str, ...]:
    """What makes pytest load FusionLab's plugin: nothing where the package is installed, whose entry point does, and twice is an error."""
    installed = any(e.name == "fusionlab" for e in importlib.metadata.entry_points(group="pytest11"))
    return () if installed else ("-p", "fusionlab_pytest")
