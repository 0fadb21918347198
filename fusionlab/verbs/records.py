"""The verb `diff`: two records side by side."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..evidence.comparison import Evidence
from ..evidence.record_diff import RecordDiff as PlainRecordDiff
from ..evidence.record_diff import diff_records
from ..tracebacks import errors_for_users, own_lines_hidden
from ..viz.explorer.state_file import Saved, record_of
from .comparison import Comparison
from .shown import fields_of

Record = Evidence | Saved | str | os.PathLike[str]


@errors_for_users
class RecordDiff(PlainRecordDiff):
    """Two records side by side (see `fusionlab.evidence.record_diff.RecordDiff`), with a page."""

    def _repr_html_(self) -> str:
        from ..viz.html.measured.records import records_summary

        return records_summary(self)

    def _makers(self) -> dict[str, Callable[[], str | bytes]]:
        from ..viz.html.measured.records import records_page

        return super()._makers() | {".html": lambda: records_page(self)}


@own_lines_hidden
def diff(old: Record, new: Record) -> RecordDiff:
    """Puts two records side by side: of two commits, two versions of JAX, two cards.

    First whether they are of the same work, by fingerprints of the program; then environment, times, memory, kernels, sites and
    errors. Speed-ups, memory and errors have a verdict; times of two runs are shown, and not judged against one another.

    Args:
      old, new: what `compare` returned, what `load` read, or the path of a file that `comparison.save("x.json")`,
        `lab.save("x.json")` or `fusionlab bench -o` wrote. Of a saved explorer, the measurement of the sites that were on counts.

    Returns:
      The comparison; it prints what differs, `.regressions` has what became worse, `.save("x.html")` writes a page.

    Raises:
      ArgumentError: there is no such file, it is neither, or nothing was measured in it.
    """
    records = (record_of(old, Comparison, "old"), record_of(new, Comparison, "new"))
    return RecordDiff(**fields_of(diff_records(*records)))
