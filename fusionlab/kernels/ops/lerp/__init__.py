"""Linear interpolation as one op."""

from .op import LERP as LERP
from .op import lerp as lerp
