"""act(x @ w) * (x @ v) as one op."""

from .op import GATED_MATMUL as GATED_MATMUL
from .op import gated_matmul as gated_matmul
