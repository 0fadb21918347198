"""Everything known about one site, structure or lint, in lines."""

from __future__ import annotations

from typing import Any

from ...errors import REJECTIONS
from ..engine.outcomes import Candidate, Rejection
from ..lints.lint import Lint


def explained(item: Any, origin: bool) -> str:
    """Everything known about a candidate, a rejection, a structure or a lint."""
    if isinstance(item, Rejection):
        where = f"\n  declined at {item.origin}" if origin and item.origin else ""
        return f"{item}\n  {REJECTIONS[item.code]}{where}"
    if isinstance(item, Candidate):
        return _explained_candidate(item)
    if isinstance(item, Lint):
        return f"{item}\n  not measured; fusionlab.advise tries it"
    return "\n".join([f"{item}, {len(item.node_ids)} nodes", *(f"  of {site}" for site in item.sites)])


def _explained_candidate(item: Candidate) -> str:
    lines = [str(item), *(f"  {n}" for n in item.notes)]
    lines += [f"  gives {', '.join(map(repr, item.roots))}"] if item.others else []
    lines += [f"  products in {item.arithmetic}"] if item.arithmetic else []
    lines += [f"  backend {b.name}: {b.verdict}, {b.reason}" for b in item.backends]
    lines += [
        f"  saves {r.name} {r.dtype}{list(r.shape)}, {r.nbytes} bytes, read by {', '.join(r.readers)}"
        for r in item.residuals
    ]
    return "\n".join(lines)
