"""Rows times the matrix of their group, as one op."""

from .op import GROUPED_MATMUL as GROUPED_MATMUL
from .op import grouped_matmul as grouped_matmul
