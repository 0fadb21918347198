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
The words that all of them use are defined in docs/concepts.md.
"""

from importlib.metadata import PackageNotFoundError as _NotInstalled
from importlib.metadata import version as _version

from . import errors as errors
from . import ops as ops
from .commands.doctor import doctor as doctor
from .device import Device as Device
from .fusers import Candidate as Candidate
from .fusers import Rejection as Rejection
from .fusers import Strategy as Strategy
from .fusers import pattern_pass as pattern_pass
from .kernels.op.own import CudaKernel as CudaKernel
from .verbs.by_site import bisect as bisect
from .verbs.by_site import errors_by_site as errors_by_site
from .verbs.by_site import time_by_site as time_by_site
from .verbs.explorer import explore as explore
from .verbs.lab import Comparison as Comparison
from .verbs.lab import Findings as Findings
from .verbs.lab import Fused as Fused
from .verbs.lab import Graph as Graph
from .verbs.lab import compare as compare
from .verbs.lab import find as find
from .verbs.lab import fuse as fuse
from .verbs.lab import passes as passes
from .verbs.lab import register as register
from .verbs.lab import trace as trace
from .verbs.lab import unregister as unregister
from .verbs.load import load as load
from .verbs.tuning import share_plan as share_plan
from .verbs.tuning import tune as tune

try:
    __version__ = _version("fusionlab")
except _NotInstalled:  # a source tree that was never installed
    __version__ = "0+unknown"
