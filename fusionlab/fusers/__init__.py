"""The fusion passes. A pass replaces places in a graph with one fused op; each pass is a folder of `passes/`.

    engine/      the steps common to all passes: from an anchor to a candidate, or to a rejection with its reason.
    strategy.py  which passes run, with which options.
    passes/      linear (GEMM epilogues), norm, lerp, attention, matmul (routes, gated pairs), transformer (whole layers), custom.
    registry.py  the table of all passes, in the order in which they run.
    lints/       advice that no fusion gives: edits of the source, as candidates to be measured.
    report/      the findings of a search, as values to print and to assert on.
    find.py      the search: every pass over every block, overlapping sites, backward passes.

May import `graph` and `kernels`. For how matching works, see `graph/matching`.
"""

from .engine.base import Pass as Pass
from .engine.outcomes import Backend as Backend
from .engine.outcomes import Candidate as Candidate
from .engine.outcomes import Rejection as Rejection
from .engine.outcomes import Residual as Residual
from .find import find_in as find_in
from .passes.custom.own_pass import pattern_pass as pattern_pass
from .registry import add_pass as add_pass
from .registry import implementations as implementations
from .registry import registry as registry
from .registry import remove_pass as remove_pass
from .report.findings import Findings as Findings
from .strategy import Strategy as Strategy
from .strategy import is_site as is_site
from .strategy import select as select
from .strategy import site_names as site_names
