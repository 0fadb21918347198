from .evidence_view import evidence_dict, evidence_tables
from .html import evidence_pictures
from .sections import table


def evidence_tabs(evidence, findings, *, enabled=(), shares=None, after=None, compiled=None):
    p = evidence_pictures(evidence)
    t = {name: table(h, r, n) for name, h, r, n in evidence_tables(evidence_dict(evidence))}
    return [{"name": k, "html": p.get(k, "") + t.get(k, "") or "Nothing measured"} for k in ("Timing", "Errors")]
