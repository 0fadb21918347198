"""SVG -> PNG, by resvg, and PDF, by vl-convert."""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from fusionlab.errors import MissingDependencyError

_FAMILY = "DejaVu Sans"
_FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")
_SHARP = 2.0  # pixels to a px of the page, as screens have them
_COLOURS = 256  # of a palette: flat colours and the steps between them at the edges of letters


def to_png(svg: str, *, most: float = 64e6) -> bytes:
    """PNG bytes of one of FusionLab's SVG texts: two pixels to a px, fewer where there would be more than `most`.

    Its font is matplotlib's own, the same on every machine.
    """
    import resvg_py

    width, height = size_of(svg)
    scale = min(_SHARP, math.sqrt(most / (width * height)))
    png = resvg_py.svg_to_bytes(
        svg_string=svg,
        background="#ffffff",
        zoom=scale,
        skip_system_fonts=True,
        font_files=_fonts(),
        font_family=_FAMILY,
        sans_serif_family=_FAMILY,
    )
    return with_palette(png) if width * height * scale**2 <= _MOST_PALETTED else png


_MOST_PALETTED = 16_000_000  # pixels; of more it takes seconds


def with_palette(png: bytes) -> bytes:
    """The same picture with a palette of colours, which takes half the bytes."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    small = io.BytesIO()
    image.save(small, "PNG", optimize=True)
    return small.getvalue()


def size_of(svg: str) -> tuple[float, float]:
    """Width and height that an SVG text of ours names, in px."""
    found = re.search(r'width="([\d.]+)" height="([\d.]+)"', svg)
    assert found is not None
    return float(found[1]), float(found[2])


def to_pdf(svg: str) -> bytes:
    """PDF bytes of an SVG text. Needs the extra `pdf`.

    Raises:
      MissingDependencyError: the extra is not installed.
    """
    try:
        converter: Any = importlib.import_module("vl_convert")
    except ImportError as error:
        raise MissingDependencyError(
            "PDF needs vl-convert-python, which is not installed; pip install 'fusionlab[pdf]'. SVG and PNG need nothing more."
        ) from error
    return converter.svg_to_pdf(svg)


def can_make_pdf() -> bool:
    """Whether PDF can be made here."""
    return importlib.util.find_spec("vl_convert") is not None


@cache
def _fonts() -> list[str]:
    import matplotlib as mpl

    return [str(Path(mpl.get_data_path(), "fonts", "ttf", name)) for name in _FONTS]


def exported() -> list[str]:
    """The kinds of files that an explorer can be saved as here."""
    return [".svg", ".png", *((".pdf",) if can_make_pdf() else ()), ".dot", ".json", ".html"]
