"""What every test shares: JAX on the CPU, own warnings as errors, and no silent skip where CI is set."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import shutil
import zlib

# Before anything imports jax: tests never depend on an accelerator being there, nor on what this shell has set. Those under tests/gpu run
# where this variable asks for one: FUSIONLAB_TEST_PLATFORMS=cuda,cpu.
os.environ["JAX_PLATFORMS"] = os.environ.get("FUSIONLAB_TEST_PLATFORMS", "cpu")
# A test's programs run once: LLVM's passes would take most of its time. What XLA makes of a program, its fusions too, is the same without.
if os.environ["JAX_PLATFORMS"] == "cpu" and "backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}".strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("MPLBACKEND", "agg")
if any(
    shutil.which(name) for name in ("cc", "gcc", "clang")
):  # the compiled launcher, which hands to the one in Python what that must do
    os.environ.setdefault("FUSIONLAB_LAUNCHER", "native")

import hypothesis
import pytest

# Traces are large and live long: looking through all of them for garbage at every 700th object would be a tenth of many tests' time.
gc.set_threshold(100_000, 20, 50)

pytest_plugins = ("pytester",)  # runs pytest inside a test, for the tests of the plugin

# How long an example takes to generate or run says how busy the machine is, not what is wrong.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


def _is_sampled(item: pytest.Item, kept: set[str]) -> bool:
    """Whether a case of a test with the mark `sampled(n)` runs daily: the first, and one in n of the others, by what they are called."""
    one_in = item.get_closest_marker("sampled").args[0]
    name = item.nodeid.partition("[")[0]
    first = name not in kept
    kept.add(name)
    return first or zlib.crc32(item.nodeid.encode()) % one_in == 0


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what `-m` leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("[" in arg for arg in config.args):
        return  # cases were asked for by name
    kept: set[str] = set()
    for item in items:
        if item.get_closest_marker("sampled") and "gpu" not in item.keywords and not _is_sampled(item, kept):
            item.add_marker(pytest.mark.nightly)


def pytest_configure(config: pytest.Config) -> None:
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
def plugin_options() -> tuple[str, ...]:
    """What makes pytest load FusionLab's plugin: nothing where the package is installed, whose entry point does, and twice is an error."""
    installed = any(e.name == "fusionlab" for e in importlib.metadata.entry_points(group="pytest11"))
    return () if installed else ("-p", "fusionlab_pytest")
