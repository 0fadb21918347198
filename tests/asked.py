"""The passes that are asked where none is named."""

from __future__ import annotations

from typing import Any

import fusionlab as fl


def by_default() -> list[Any]:
    return [p for p in fl.passes() if not getattr(p, "named_only", False)]
