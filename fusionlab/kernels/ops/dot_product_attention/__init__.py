"""softmax(scale * query @ key^T) @ value as one op."""

from .op import DOT_PRODUCT_ATTENTION as DOT_PRODUCT_ATTENTION
from .op import dot_product_attention as dot_product_attention
