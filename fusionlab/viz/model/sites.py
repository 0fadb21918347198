"""Which sites are applied."""

from __future__ import annotations

from collections.abc import Collection

from fusionlab.fusers.engine.outcomes import Candidate


def is_applied(c: Candidate, enabled: Collection[str] | None) -> bool:
    """Whether a candidate is one of those `enabled`, by id (None: all that are not idle)."""
    return not c.idle if enabled is None else c.id in enabled
