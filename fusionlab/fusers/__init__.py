"""What may be fused: one pass a file, each with its examples, its conditions and the fused op it becomes."""

from .base import Pass as Pass
from .find import find_in as find_in
from .findings import Backend as Backend
from .findings import Candidate as Candidate
from .findings import Findings as Findings
from .findings import Rejection as Rejection
from .findings import Residual as Residual
from .own_pass import pattern_pass as pattern_pass
from .registry import add_pass as add_pass
from .registry import implementations as implementations
from .registry import op_of as op_of
from .registry import registry as registry
from .registry import remove_pass as remove_pass
from .strategy import Strategy as Strategy
from .strategy import select as select
from .strategy import site_names as site_names
