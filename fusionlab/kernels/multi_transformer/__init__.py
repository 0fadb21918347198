"""A row of transformer layers as one op."""

from .op import MULTI_TRANSFORMER as MULTI_TRANSFORMER
