"""The cross-entropy of a product with a matrix (a language model's head and its loss) as one op."""

from .op import LINEAR_CROSS_ENTROPY as LINEAR_CROSS_ENTROPY
from .op import linear_cross_entropy as linear_cross_entropy
