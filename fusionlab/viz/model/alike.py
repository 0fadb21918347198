"""Sites that are shown together."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

SiteDict = Mapping[str, Any]


# Sites --------------------------------------------------------------------------------------------------------------
def alike(sites: Iterable[SiteDict], keys: Collection[str]) -> list[list[SiteDict]]:
    """Sites that agree in these keys, together; a model's 24 layers are one line of a report, not 24."""
    together: dict[str, list[SiteDict]] = {}
    for site in sites:
        together.setdefault(json.dumps([site[k] for k in keys], sort_keys=True), []).append(site)
    return list(together.values())
