"""Pairs on the zoo: in train steps that are differentiated already, which forward sites are rewritten together with their backward passes.

    python -m benchmarks pairs [--dtype f32|bf16] [--models TEXT] [--no-run] [-o FILE]

1. Every forward site that a search names, fused or declined, has one fate:

   paired        rewritten together with its backward pass.
   no gradient   none is asked: nothing that it reads hangs on a parameter (stop_gradient cuts), and no backward node reads its inside.
   primal half   of a checkpoint: a site of the same concepts, source line, scope, shapes and parameters stands in a backward checkpoint
                 body and computes it again (one for each), and no backward node reads the inside of this one. Its backward pass belongs
                 to that other site, which counts.
   stays         anything else, with the reason.

   rate = paired / (sites - no gradient - primal halves). `of fusable` leaves out what stays that is declined in the forward program too,
   at the same source line: what no pass fuses has no pair. An activation that is not fused with its product is a site of its own here.

2. The jitted step and the jitted `fl.fuse(step)` on random arrays: loss, updated parameters and optimizer state, the largest error of a
   leaf relative to its largest magnitude. Adam's moments are not zero: from zero moments it steps by the sign of a rounding error. The
   first are small, so that what is compared there is the gradient. A leaf beyond the tolerance is wrong unless it is nearer to float64
   than the original's, which is named then.

3. Every cotangent at the top of a program against differences of the loss in float64 (benchmarks/search/cotangents.py).

`--no-run` leaves out 2 and 3.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..search.recall import zoo
from .pair_fates import FATES, KINDS, Site, sites_of

RESULTS = Path(__file__).parents[1] / "results" / "cpu"
GUISES = {"scan": {"scan"}, "remat": {"remat2", "remat", "checkpoint"}, "shard_map": {"shard_map"}}
# Relative to the largest magnitude of a leaf: some roundings, through a whole forward and backward pass.
TOLERANCE = {"f32": 2e-5, "bf16": 5e-2}
# What is compiled here runs once.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
WORST = 5


@dataclass(frozen=True)
class Equality:
    """The fused step against the original: the largest relative error, where, and how many leaves were compared.

    `wrong` leaves differ by more than rounding: beyond the tolerance, and not because the original is the one that is off; `nearer` are
    those beyond it that are nearer to float64 than the original's.
    """

    error: float
    leaf: str
    leaves: int
    wrong: tuple[str, ...] = ()
    nearer: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """One program: its sites, what it is made with, and what running it gave (None: not run)."""

    program: str
    library: str
    dtype: str
    sites: tuple[Site, ...]
    guises: tuple[str, ...] = ()
    equality: Equality | None = None
    cotangents: tuple[Any, ...] = field(default=())

    @property
    def wrong(self) -> list[str]:
        """What is not equal to the original, or to the loss's derivative."""
        told = [f"cotangent of {c.site}: off by {c.error:.1e} of itself" for c in self.cotangents if c.wrong]
        return told + list(self.equality.wrong if self.equality is not None else ())


@dataclass(frozen=True)
class Row:
    """Fates of some sites. The rates are None where nothing could be paired."""

    name: str
    programs: int
    sites: int
    paired: int
    no_gradient: int
    primal_half: int
    stays: int
    declined_forward_too: int

    @property
    def rate(self) -> float | None:
        asked = self.sites - self.no_gradient - self.primal_half
        return self.paired / asked if asked else None

    @property
    def rate_of_fusable(self) -> float | None:
        asked = self.sites - self.no_gradient - self.primal_half - self.declined_forward_too
        return self.paired / asked if asked else None


def outcome(program: Any, run: bool = True) -> Outcome:
    """Searches one train step, and runs it."""
    import fusionlab as fl

    step, shapes = program.make()
    args = arrays(shapes) if run else shapes
    fused = fl.fuse(step)
    found = fused.findings(*args)
    primitives = {n.primitive for n in found.graph.nodes()}
    guises = tuple(name for name, marks in GUISES.items() if marks & primitives)
    what = program.id, program.model.library, program.dtype, sites_of(program, found), guises
    if not run:
        return Outcome(*what)
    from ..search.cotangents import check_cotangents

    return Outcome(*what, equality(step, fused, args, TOLERANCE[program.dtype]), tuple(check_cotangents(found, args)))


def arrays(shapes: Any, seed: int = 0) -> Any:
    """Arrays for a train step's arguments; second moments are positive, first ones small."""
    zoo()
    import jax
    import jax.numpy as jnp
    from zoo.model import concrete  # pyright: ignore[reportMissingImports]

    def moment(path: Any, leaf: Any) -> Any:
        names = {getattr(key, "name", None) for key in path}
        return jnp.abs(leaf) if "nu" in names else leaf * jnp.asarray(1e-3, leaf.dtype) if "mu" in names else leaf

    return jax.tree_util.tree_map_with_path(moment, concrete(shapes, seed))


def equality(step: Any, fused: Any, args: Any, tolerance: float = TOLERANCE["f32"]) -> Equality:
    """The worst leaf of what two functions return. What is beyond the tolerance is judged against numpy's float64."""
    import jax

    want, got = (jax.jit(lambda *a, f=f: f(*a), compiler_options=QUICK)(*args) for f in (step, fused))
    assert jax.tree.structure(want) == jax.tree.structure(got)
    assert [x.dtype for x in jax.tree.leaves(want)] == [x.dtype for x in jax.tree.leaves(got)]
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(want)]
    pairs = list(zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True))
    errors = [_error(a, b) for a, b in pairs]
    beyond = [i for i, error in enumerate(errors) if error > tolerance]
    exact = in_float64(step, args) if beyond else []
    wrong, nearer = [], []
    for i in beyond:
        # A gradient that is zero in theory (a key's bias) is made of rounding alone, in the original as well.
        apart = [_error(exact[i], x) if exact else float("inf") for x in pairs[i]]
        told = (
            f"{names[i]}: off by {errors[i]:.1e}; from float64 the original is {apart[0]:.1e}, the fused {apart[1]:.1e}"
        )
        (nearer if apart[1] <= apart[0] < float("inf") else wrong).append(told)
    jax.clear_caches()
    worst = max(range(len(errors)), key=errors.__getitem__)
    return Equality(errors[worst], names[worst], len(errors), tuple(wrong), tuple(nearer))


def in_float64(step: Any, args: Any) -> list[Any]:
    """The leaves of what a function returns, in numpy's float64; none where it has no meaning there."""
    import jax

    from fusionlab.graph.interpret.evaluate import evaluate
    from fusionlab.graph.interpret.limits import CannotEvaluate

    from ..search.cotangents import wide

    try:
        return evaluate(jax.make_jaxpr(step)(*args), [wide(leaf) for leaf in jax.tree.leaves(args)])
    except CannotEvaluate:
        return []


def _error(want: Any, got: Any) -> float:
    """The largest difference relative to the largest magnitude; infinite where shapes, integers, NaNs or infinities differ."""
    import jax.numpy as jnp
    import numpy as np

    if want.shape != got.shape:
        return float("inf")
    exact = not jnp.issubdtype(want.dtype, jnp.inexact)
    a, b = (np.asarray(x, np.int64 if exact else np.float64) for x in (want, got))
    finite = np.isfinite(a)
    if (
        exact
        or not np.array_equal(finite, np.isfinite(b))
        or not np.array_equal(a[~finite], b[~finite], equal_nan=True)
    ):
        return 0.0 if np.array_equal(a, b) else float("inf")
    apart = float(np.abs(a - b)[finite].max(initial=0))
    return apart / max(float(np.abs(a)[finite].max(initial=0)), 1e-30) if apart else 0.0


def row(name: str, found: Iterable[Outcome], kinds: Sequence[str] = KINDS) -> Row:
    """The fates of the sites of some programs, of some kinds."""
    found = list(found)
    mine = [s for o in found for s in o.sites if s.kind in kinds]
    fates = Counter(s.fate for s in mine)
    programs = sum(any(s.kind in kinds for s in o.sites) for o in found)
    too = sum(s.forward_too for s in mine)
    paired, no_gradient, primal, stays = (fates[f] for f in FATES)
    return Row(name, programs, len(mine), paired, no_gradient, primal, stays, too)


def tables(found: Sequence[Outcome]) -> dict[str, list[Row]]:
    """Rows by kind, by library, and of the programs with scan, remat and shard_map."""
    libraries = dict.fromkeys(o.library for o in found)
    return {
        "kind": [
            *(row(kind, found, (kind,)) for kind in KINDS),
            row("all but linear", found, KINDS[1:]),
            row("all", found),
        ],
        "library": [row(name, [o for o in found if o.library == name]) for name in libraries],
        "guise": [row(f"with {g}", [o for o in found if g in o.guises]) for g in GUISES],
    }


def text(rows: Iterable[Row]) -> str:
    """A table for a reader."""
    head = ("programs", "sites", "paired", "no gradient", "primal half", "stays", "forward too", "rate", "of fusable")
    lines = [f"{'':18}" + "".join(f" {h:>11}" for h in head)]
    for r in rows:
        numbers = (r.programs, r.sites, r.paired, r.no_gradient, r.primal_half, r.stays, r.declined_forward_too)
        rates = ("-" if x is None else f"{100 * x:.1f} %" for x in (r.rate, r.rate_of_fusable))
        lines.append(f"{r.name:18}" + "".join(f" {n:>11}" for n in (*numbers, *rates)))
    return "\n".join(lines)


def outcomes(dtypes: Iterable[str], models: str = "", run: bool = True) -> Iterator[Outcome]:
    """The outcome of every train step of the zoo that is asked for, in order."""
    for program in zoo().programs():
        if program.variant == "train" and program.dtype in dtypes and models in program.model.id:
            yield outcome(program, run)


def main(argv: list[str]) -> int:
    """Prints the tables, what stays, and what running gave; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks pairs", description="Pairs on the zoo's train steps.")
    parser.add_argument("--dtype", choices=("f32", "bf16"), action="append", help="default: f32")
    parser.add_argument("--models", default="", help="only models whose id holds this text; no record by default")
    parser.add_argument("--no-run", action="store_true", help="only the search: nothing is executed")
    parser.add_argument("-o", "--output", type=Path, help="where the JSON record goes")
    options = parser.parse_args(argv)
    dtypes = options.dtype or ["f32"]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    catalogue = zoo()
    from tqdm.auto import tqdm

    total = None if options.models else len(catalogue.MODELS) * len(dtypes)
    found = list(tqdm(outcomes(dtypes, options.models, not options.no_run), total=total, disable=None))
    _print(found)
    output = options.output or (None if options.models else _default(dtypes))
    if output:
        _save(output, found, argv, dict(catalogue.LEFT_OUT))
    return int(any(o.wrong for o in found))


def _print(found: Sequence[Outcome]) -> None:
    for program, lines in _sites(found, "stays").items():
        print(*(f"stays: {program}, {line}" for line in lines), sep="\n")
    for rows in tables(found).values():
        print(f"\n{text(rows)}")
    print(f"\n{len(found)} programs")
    for o in _worst(found):
        print(f"equality: {o.equality.error:.1e} {o.program}{o.equality.leaf}")  # type: ignore[union-attr]
    for o, leaves in ((o, o.equality.nearer) for o in found if o.equality):
        print(*(f"nearer to float64 than the original: {o.program}{leaf}\n" for leaf in leaves), sep="", end="")
    for line in _cotangent_lines(found):
        print(line)
    for o in found:
        print(*(f"WRONG: {o.program}: {w}\n" for w in o.wrong), sep="", end="")


def _worst(found: Iterable[Outcome]) -> list[Outcome]:
    return sorted((o for o in found if o.equality), key=lambda o: -o.equality.error)[:WORST]  # type: ignore[union-attr]


def _cotangents(found: Iterable[Outcome]) -> dict[str, Any]:
    checks = [(o.program, c) for o in found for c in o.cotangents]
    errors = [(c.error, program, c.site) for program, c in checks if c.error is not None]
    return {
        "pairs": len(checks),
        "checked": len(errors),
        "wrong": sum(c.wrong for _, c in checks),
        "worst": sorted(errors, reverse=True)[:WORST],
        "left_out": dict(Counter(c.left_out for _, c in checks if c.error is None)),
    }


def _cotangent_lines(found: Sequence[Outcome]) -> Iterator[str]:
    told = _cotangents(found)
    if told["pairs"]:
        yield f"cotangents: {told['checked']} of {told['pairs']} checked, {told['wrong']} wrong"
        yield from (f"  not checked: {n}: {why}" for why, n in told["left_out"].items())
        yield from (f"  {error:.1e} {program} {site}" for error, program, site in told["worst"])


def _default(dtypes: Sequence[str]) -> Path:
    import jax

    name = "" if list(dtypes) == ["f32"] else "_" + "_".join(dtypes)
    return RESULTS / f"pairs{name}_jax{jax.__version__}.json"


def _save(output: Path, found: Sequence[Outcome], argv: list[str], left_out: dict[str, str]) -> None:
    from fusionlab.evidence.instruments.record import environment, save_json

    run = any(o.equality for o in found)
    record = {
        "benchmark": "pairs",
        "command": " ".join(["python", "-m", "benchmarks", "pairs", *_without_paths(argv)]),
        "environment": environment().to_dict(),
        "programs": len(found),
        "tables": {
            name: [asdict(r) | {"rate": r.rate, "rate_of_fusable": r.rate_of_fusable} for r in rows]
            for name, rows in tables(found).items()
        },
        "stays": _sites(found, "stays"),
        "no_gradient": _sites(found, "no gradient"),
        "primal_halves": _sites(found, "primal half"),
        "with": {
            g: {o.program: dict(Counter(s.fate for s in o.sites)) for o in found if g in o.guises} for g in GUISES
        },
        "wrong": {o.program: o.wrong for o in found if o.wrong},
        "tolerance": TOLERANCE,
        "equality": {
            "programs": sum(o.equality is not None for o in found),
            "leaves": sum(o.equality.leaves for o in found if o.equality),
            "worst": [
                {"program": o.program, "error": e.error, "leaf": e.leaf} for o in _worst(found) if (e := o.equality)
            ],
            "nearer_to_float64_than_the_original": {
                o.program: e.nearer for o in found if (e := o.equality) and e.nearer
            },
        }
        if run
        else None,
        "cotangents": _cotangents(found) if run else None,
        "left_out": left_out,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    save_json(output, record)
    print(f"record: {output}")


def _sites(found: Iterable[Outcome], fate: str) -> dict[str, list[str]]:
    told = {o.program: [_told(s) for s in o.sites if s.fate == fate] for o in found}
    return {program: lines for program, lines in told.items() if lines}


def _told(s: Site) -> str:
    reason = re.sub(r"(%\d+:\S+, ){3,}", "..., ", s.reason)  # a region's many results
    return f"{s.id} ({s.kind})" + (f": {reason}" if reason else "") + (" (forward too)" if s.forward_too else "")


def _without_paths(argv: list[str]) -> list[str]:
    return [
        a for i, a in enumerate(argv) if a not in ("-o", "--output") and argv[i - 1 : i] not in (["-o"], ["--output"])
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
