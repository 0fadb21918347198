"""What is true: time, memory and errors of a function and its fused version."""

from .comparison import Evidence, measure
from .memory import Memory, ResidentGrowth, resident_growth
from .numerics import Error, LeafNumerics, Numerics, compare_arrays
from .record import Environment, environment, load_json, save_json
from .timing import Runs, Timing, Verdict, time_pair

__all__ = [
    "Environment",
    "Error",
    "Evidence",
    "LeafNumerics",
    "Memory",
    "Numerics",
    "ResidentGrowth",
    "Runs",
    "Timing",
    "Verdict",
    "compare_arrays",
    "environment",
    "load_json",
    "measure",
    "resident_growth",
    "save_json",
    "time_pair",
]
