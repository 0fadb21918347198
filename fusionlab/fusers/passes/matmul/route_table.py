"""The routes of a program's matrix products: a value to print, to read in a notebook, to assert in a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from ....errors import MissingDependencyError
from ....kernels.op.implementation import ChoiceKind
from ....kernels.ops.matmul.routes import ROUTES, Answer
from ....showing import Shown
from ...engine.grouping import nameless
from ...engine.outcomes import Candidate

# `evaluate`: a library computes it; `kernel`: a kernel of ours does.
_TAGS = {"cublaslt": "evaluate", "cudnn": "evaluate", "cuda": "kernel"}
TAGS = ("evaluate", "kernel", "xla")


def tag_of(candidate: Candidate) -> str:
    """The tag of a product that a fusion claims, by the implementation that runs it."""
    return _TAGS.get(candidate.backend.name, "xla") if candidate.backend else "xla"


@dataclass(frozen=True, repr=False)
class ProductRoute(Shown):
    """One product and its route.

    Attributes:
      node, value, scope, source: where it is: the node's number and the value it computes ("%12").
      sizes: batch, rows, columns, inner.
      dtype: of operands and result, "bf16 x bf16 -> f32".
      formula: the product with the operations that its route absorbs.
      tag: "evaluate" (a library computes it), "kernel" or "xla".
      site: the candidate it belongs to, "" for none.
      answers: the answer of each route, in order, up to the one that takes it; none if a larger fusion claims the product.
      reason: why no route was tried, "" if they were.
      split: the operations next to the product that run in kernels of their own.
    """

    _says = "{0.value} {0.formula}, {0.shape}: {0.tag}; {0.why}"
    _told = ("value", "source", "formula", "shape", "dtype", "tag", "site", "why")

    node: int
    value: str
    scope: str
    source: str
    sizes: tuple[int, int, int, int]
    dtype: str
    formula: str
    tag: str = "xla"
    site: str = ""
    answers: tuple[Answer, ...] = ()
    reason: str = ""
    split: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is XLA's, and no site's, because what else can run it was not measured on the device."""
        return not self.site and any(answer.code == ChoiceKind.UNMEASURED for answer in self.answers)

    @property
    def shape(self) -> str:
        """ "8192x768x3072" (rows x inner x columns), of a batch "16 x 128x64x128"."""
        batch, rows, columns, inner = self.sizes
        text = f"{rows}x{inner}x{columns}"
        return text if batch == 1 else f"{batch} x {text}"

    @property
    def why(self) -> str:
        """What each route answered, or the one reason; and how the product is split."""
        reason = "; ".join(map(str, self.answers)) if self.answers else self.reason
        return f"{reason}; split: {self.split}" if self.split else reason

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        answers = [
            {"route": a.route.name, "tag": a.route.tag, "takes": a.takes, "code": a.code, "sentence": a.sentence}
            for a in self.answers
        ]
        plain = {name: getattr(self, name) for name in ("node", "value", "scope", "source", "dtype", "formula", "tag")}
        more = {"sizes": list(self.sizes), "answers": answers, "reason": self.reason, "split": self.split}
        return plain | more | {"site": self.site}


@dataclass(frozen=True)
class Routes(Shown):
    """The routes of all products of a program, in program order; a sequence of `ProductRoute`s.

    Attributes: `device` (for which they were decided), `rows`.
    """

    _listed = "rows"

    device: str
    rows: tuple[ProductRoute, ...]

    def __iter__(self) -> Iterator[ProductRoute]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> ProductRoute:
        return self.rows[index]

    def counts(self) -> dict[str, int]:
        """Tag -> number of products with it, zeros included."""
        found = Counter(row.tag for row in self.rows)
        return {tag: found[tag] for tag in TAGS}

    def __str__(self) -> str:
        """One line per product, similar ones grouped, with the reason for each route."""
        groups: dict[tuple[str, ...], list[ProductRoute]] = {}
        for row in self.rows:
            groups.setdefault((row.tag, row.formula, row.shape, row.dtype, nameless(row.why)), []).append(row)
        counts = ", ".join(f"{n} {tag}" for tag, n in self.counts().items())
        lines = [f"{len(self.rows)} products on {self.device}: {counts}"]
        for alike in groups.values():
            first, count = alike[0], len(alike)
            where = f" ({first.source})" if first.source else ""
            times = f"{count} times, first " if count > 1 else ""
            lines.append(f"  {first.tag:8} {first.formula}, {first.shape}, {first.dtype}: {times}{first.value}{where}")
            lines += [f"           {answer}" for answer in (first.answers or [first.reason])]
            lines += [f"           split: {first.split}"] if first.split else []
        return "\n".join(lines)

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return {"device": self.device, "counts": self.counts(), "products": [row.to_dict() for row in self.rows]}

    def to_dataframe(self) -> Any:
        """One row per product, as a pandas DataFrame.

        Raises:
          MissingDependencyError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingDependencyError("to_dataframe needs pandas: pip install pandas") from error
        columns = ["value", "source", "formula", "shape", "dtype", "tag", "site", "why"]
        return pd.DataFrame([{name: getattr(row, name) for name in columns} for row in self.rows], columns=columns)

    def _repr_html_(self) -> str:
        names = ("product", "shape", "dtypes", "tag", *(route.name for route in ROUTES), "in kernels of their own")
        head = "".join(f"<th style='{_CELL}'>{name}</th>" for name in names)
        body = "".join(f"<tr>{_cells(row)}</tr>" for row in self.rows)
        return f"<table><caption>routes on {escape(self.device)}</caption><tr>{head}</tr>{body}</table>"


_CELL = "text-align:left;vertical-align:top;padding:2px 8px"
_TAKES, _REFUSES = "background:#d9f0d3;color:#1b1b1b", "color:#767676"


def _cells(row: ProductRoute) -> str:
    where = f"{row.value} {row.source}".strip()
    cells = [
        _cell(f"{escape(row.formula)} <small>{{}}</small>", where),
        *(_cell("{}", t) for t in (row.shape, row.dtype, row.tag)),
    ]
    by_route = {answer.route.name: answer for answer in row.answers}
    if not by_route:
        cells.append(_cell("{}", row.reason, more=f" colspan={len(ROUTES)}"))
    for route in ROUTES if by_route else ():
        answer = by_route.get(route.name)
        if answer is None:
            cells.append(_cell("{}", "not asked", _REFUSES))
        elif answer.takes:
            cells.append(_cell("takes it: {}", answer.sentence, _TAKES))
        else:
            cells.append(_cell(f"<b>{answer.code}</b> {{}}", answer.sentence, _REFUSES))
    return "".join([*cells, _cell("{}", row.split)])


def _cell(form: str, text: str, style: str = "", more: str = "") -> str:
    return f"<td style='{_CELL};{style}'{more}>{form.format(escape(text))}</td>"
