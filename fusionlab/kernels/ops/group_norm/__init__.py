"""GroupNorm as one op, with SiLU behind it or without."""

from .op import GROUP_NORM as GROUP_NORM
from .op import group_norm as group_norm
