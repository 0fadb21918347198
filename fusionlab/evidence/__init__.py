"""Measured evidence: time, memory and errors of a function and its fused version.

Read `comparison` first (all of it on one pair), then `measuring` (step by step) and `original`. `instruments/` measures one
program, `errors/` its numerical errors. `site_errors`, `subsets`, `bisection`, `attribution` and `reconcile` find the site behind a
difference; `roofline` computes the best possible time; `tuning` finds the fastest implementation; `advice/` tries lints; `check` and
`record_diff` compare two results. May import `graph`, `kernels`, `fusers` and `testing/tolerances.py`; draws nothing.
"""

from .comparison import Evidence, measure
from .errors.arrays import Error, compare_arrays
from .errors.numerics import LeafNumerics, Numerics
from .instruments.memory import Memory, ResidentGrowth, resident_growth
from .instruments.record import Environment, environment, load_json, save_json
from .instruments.timing import Runs, Timing, Verdict, time_pair

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
