"""The passes that are asked where none is named."""

from __future__ import annotations

from typing import Any

import fusionlab as fl


def by_default() -> list[Any]:
    return [p for p in fl.passes() if not p.named_only]


def by_name() -> list[str]:
    """The same passes by their names: what is asked for is fused where it would be left as it is, too."""
    return [p.name for p in by_default()]


def counts(**found: int) -> dict[str, int]:
    """Pass -> what it found, none where it is not named."""
    none = dict.fromkeys(by_name(), 0)
    assert found.keys() <= none.keys()
    return none | found
