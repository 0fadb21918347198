"""A matrix product followed by factors, a bias, an activation and a cast; its route is chosen call by call."""

from .op import MATMUL as MATMUL
from .op import matmul as matmul
