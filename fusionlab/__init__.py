"""FusionLab: shows where a JAX model could run as fused kernels, fuses it, and proves it was worth it.

The verbs below are the public interface. Where the work behind them is done, in the order in which it happens:

    graph/      a function traced into a graph; matching, proving and rewriting in it. Knows no fused op.
    kernels/    the fused ops: what each means, and each way to run it. `kernels/launch` puts a CUDA kernel on XLA's stream.
    fusers/     the passes, each of which turns places in a graph into one fused op: `fusers/passes`, a folder for each.
    evidence/   time, memory and errors of a program and its fused version.
    viz/        graph, plots, explorer and report.
    verbs/      each verb of this page: the rooms above tied together in a few lines.
    testing/    assertions for the tests of libraries that use FusionLab; a plugin of pytest.
    commands/   the command line's own parts; `cli.py` reads its arguments.
    models/     small real models in plain JAX.

A folder imports those above it; tests/house/test_imports.py holds that, down to the folders within them.
The words that all of them use are defined in docs/concepts.md. A public name loads its module when it is first used, so that a library
which only may need FusionLab pays nothing for importing it.
"""

from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _NotInstalled
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from . import errors as errors
    from . import ops as ops
    from .commands.doctor import doctor as doctor
    from .device import Device as Device
    from .fusers import Candidate as Candidate
    from .fusers import Rejection as Rejection
    from .fusers import Strategy as Strategy
    from .fusers import pattern_pass as pattern_pass
    from .kernels.op.own import CudaKernel as CudaKernel
    from .verbs.advice import advise as advise
    from .verbs.by_site import bisect as bisect
    from .verbs.by_site import errors_by_site as errors_by_site
    from .verbs.by_site import time_by_scope as time_by_scope
    from .verbs.by_site import time_by_site as time_by_site
    from .verbs.comparison import Comparison as Comparison
    from .verbs.comparison import compare as compare
    from .verbs.drift import drift as drift
    from .verbs.explorer import explore as explore
    from .verbs.lab import Findings as Findings
    from .verbs.lab import Fused as Fused
    from .verbs.lab import Graph as Graph
    from .verbs.lab import find as find
    from .verbs.lab import fuse as fuse
    from .verbs.lab import passes as passes
    from .verbs.lab import register as register
    from .verbs.lab import trace as trace
    from .verbs.lab import unregister as unregister
    from .verbs.load import load as load
    from .verbs.minimise import minimise as minimise
    from .verbs.records import diff as diff
    from .verbs.training import LossCurve as LossCurve
    from .verbs.tuning import merge_plans as merge_plans
    from .verbs.tuning import share_plan as share_plan
    from .verbs.tuning import tune as tune

_NAMES_OF_MODULES = {
    "commands.doctor": "doctor",
    "device": "Device",
    "errors": "errors",
    "fusers": "Candidate Rejection Strategy pattern_pass",
    "kernels.op.own": "CudaKernel",
    "ops": "ops",
    "verbs.advice": "advise",
    "verbs.by_site": "bisect errors_by_site time_by_scope time_by_site",
    "verbs.comparison": "Comparison compare",
    "verbs.drift": "drift",
    "verbs.explorer": "explore",
    "verbs.lab": "Findings Fused Graph find fuse passes register trace unregister",
    "verbs.load": "load",
    "verbs.training": "LossCurve",
    "verbs.minimise": "minimise",
    "verbs.records": "diff",
    "verbs.tuning": "merge_plans share_plan tune",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF_MODULES.items() for name in names.split()}
__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _Any:
    if name not in _MODULE_OF:
        __tracebackhide__ = True  # in IPython, which shows a module's lines otherwise
        near = "" if name.startswith("_") else _import_module(".errors", __name__).did_you_mean(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near and '.'}{near}")
    module = _import_module(f".{_MODULE_OF[name]}", __name__)
    value = module if name == _MODULE_OF[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


try:
    __version__ = _version("fusionlab")
except _NotInstalled:  # a source tree that was never installed
    __version__ = "0+unknown"
