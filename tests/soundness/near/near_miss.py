"""What an entry of the near-miss corpus is, and the arrays that the entries share. Not a test module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

FORMS = ("plain", "scan", "vmap", "remat")


@dataclass(frozen=True, eq=False)
class NearMiss:
    """A program that looks like a site of one pass and breaks one of its conditions.

    Attributes:
      name: what is broken.
      pass_name: the pass it nearly is a site of.
      code: the rejection code it must get; None where the pass fuses a smaller part, which is right, and has nothing to decline.
      fn, args: the program and its arguments (numpy arrays).
      says: what the rejection's sentence must say (a part of it).
      also: the formulas of the sites that are rightly found in it, in program order.
      edit: what the rejection must suggest (a part of it).
      repaired: the program with the suggested edit applied, in which the pass finds one site, another than those of `also`.
      mapped: positions of the arguments that scan and vmap go over.
      forms: the forms in which it is a near-miss (see `FORMS`).
    """

    name: str
    pass_name: str
    code: str | None
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    says: str = ""
    also: tuple[str, ...] = ()
    edit: str = ""
    repaired: Callable[..., Any] | None = None
    mapped: tuple[int, ...] = (0,)
    forms: tuple[str, ...] = FORMS

    def __str__(self) -> str:
        return f"{self.pass_name}: {self.name}"


def normal(*shapes: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Standard normal numpy arrays of the given shapes."""
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=s).astype(dtype) for s in shapes)
