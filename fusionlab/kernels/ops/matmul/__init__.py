"""A matrix product with factors, a bias, an activation and a cast behind it; by which route it goes is said call by call."""

from .op import MATMUL as MATMUL
from .op import matmul as matmul
