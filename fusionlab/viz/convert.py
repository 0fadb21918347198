"""SVG -> PNG and PDF, by vl-convert."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from fusionlab.errors import MissingDependencyError


def to_png(svg: str, *, scale: float = 2.0) -> bytes:
    """PNG bytes of an SVG text; `scale` multiplies its size. Needs the extra `png`.

    Raises:
      MissingDependencyError: the extra is not installed.
    """
    return _converter().svg_to_png(svg, scale=scale)


def to_pdf(svg: str) -> bytes:
    """PDF bytes of an SVG text. Needs the extra `png`.

    Raises:
      MissingDependencyError: the extra is not installed.
    """
    return _converter().svg_to_pdf(svg)


def can_convert() -> bool:
    """Whether PNG and PDF can be made here."""
    return importlib.util.find_spec("vl_convert") is not None


def _converter() -> Any:
    try:
        return importlib.import_module("vl_convert")
    except ImportError as error:
        raise MissingDependencyError(
            "PNG and PDF need vl-convert-python, which is not installed; pip install 'fusionlab[png]'. "
            "SVG and DOT need nothing."
        ) from error


def exported() -> list[str]:
    """The kinds of files that an explorer can be saved as here."""
    return [".svg", *((".png", ".pdf") if can_convert() else ()), ".dot", ".json", ".html"]
