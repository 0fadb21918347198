"""LayerNorm and RMSNorm as one op."""

from .op import LAYER_NORM as LAYER_NORM
from .op import layer_norm as layer_norm
from .op import layer_norm_and_sum as layer_norm_and_sum
