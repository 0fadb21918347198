"""FusionLab: shows where a JAX model could run as fused kernels, fuses it, and proves it was worth it."""

from importlib.metadata import PackageNotFoundError as _NotInstalled
from importlib.metadata import version as _version

from . import errors as errors
from . import ops as ops
from .by_site import bisect as bisect
from .by_site import errors_by_site as errors_by_site
from .by_site import time_by_site as time_by_site
from .device import Device as Device
from .doctor import doctor as doctor
from .fusers import Candidate as Candidate
from .fusers import Rejection as Rejection
from .fusers import Strategy as Strategy
from .fusers import pattern_pass as pattern_pass
from .kernels.own import CudaKernel as CudaKernel
from .lab import Comparison as Comparison
from .lab import Findings as Findings
from .lab import Fused as Fused
from .lab import Graph as Graph
from .lab import compare as compare
from .lab import explore as explore
from .lab import find as find
from .lab import fuse as fuse
from .lab import load as load
from .lab import passes as passes
from .lab import register as register
from .lab import trace as trace
from .lab import unregister as unregister
from .tuning import share_plan as share_plan
from .tuning import tune as tune

try:
    __version__ = _version("fusionlab")
except _NotInstalled:  # a source tree that was never installed
    __version__ = "0+unknown"
