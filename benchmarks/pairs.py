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

2. The jitted step and the jitted `fl.fuse(step)` on random arrays: loss, updated parameters and optimizer state, the largest error of a leaf
   relative to its largest magnitude. Adam's moments are not zero: from zero moments it steps by the sign of a rounding error. The first
   are small, so that what is compared there is the gradient.

3. Every cotangent at the top of a program against differences of the loss in float64 (benchmarks/cotangents.py).

`--no-run` leaves out 2 and 3.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .recall import recomputed, zoo

RESULTS = Path(__file__).parent / "results" / "cpu"
KINDS = ("linear", "linear_activation", "attention", "norm")
FATES = ("paired", "no gradient", "primal half", "stays")
GUISES = {"scan": {"scan"}, "remat": {"remat2", "remat", "checkpoint"}, "shard_map": {"shard_map"}}
# Relative to the largest magnitude of a leaf: some roundings, through a whole forward and backward pass.
TOLERANCE = {"f32": 2e-5, "bf16": 5e-2}
# What is compiled here runs once.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
WORST = 5


@dataclass(frozen=True)
class Site:
    """One forward site: `reason` where it stays; `forward_too` where the forward program declines it as well."""

    id: str
    kind: str
    fate: str
    reason: str = ""
    forward_too: bool = False


@dataclass(frozen=True)
class Equality:
    """The fused step against the original: the largest relative error, where, and how many leaves were compared."""

    error: float
    leaf: str
    leaves: int


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
        if self.equality is not None and not self.equality.error <= TOLERANCE[self.dtype]:
            told.append(f"{self.equality.leaf}: off by {self.equality.error:.1e}")
        return told


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


def kind_of(item: Any) -> str | None:
    """The kind of a candidate or rejection, by what was recognised; None for what is no site, or part of one that is."""
    concepts = set(item.concepts)
    if not concepts or getattr(item, "code", "") == "overlap":
        return None
    if "attention" in concepts:
        return "attention"
    if concepts & {"layer_norm", "rms_norm"}:
        return "norm"
    return "linear" if concepts == {"linear"} else "linear_activation"


def sites_of(program: Any, found: Any) -> tuple[Site, ...]:
    """The fates of the forward sites of a train step of the zoo."""
    items = [x for x in (*found.candidates, *found.rejections) if kind_of(x)]
    again, own = recomputed(found.graph), _Inside(found.graph)
    primal = _primal_halves(items, again, own.operands)
    reached = _reached_by_parameters(found.graph, len(_leaves(program.built.args[0])))
    sites = []
    for item in items:
        pair = item.backward
        if pair is not None and pair.stays is None:
            sites.append((item, "paired"))
        elif pair is None and _is_candidate(item) and not own.read(item) & reached and not own.is_read_back(item):
            sites.append((item, "no gradient"))
        elif pair is None and id(item) in primal and not own.is_read_back(item):
            sites.append((item, "primal half"))
        else:
            sites.append((item, "stays"))
    declined = _declined_forward(program) if any(f == "stays" and not _is_candidate(i) for i, f in sites) else set()
    return tuple(
        Site(i.id, str(kind_of(i)), fate, _reason(i), not _is_candidate(i) and _place(i) in declined)
        if fate == "stays"
        else Site(i.id, str(kind_of(i)), fate)
        for i, fate in sites
    )


def _is_candidate(item: Any) -> bool:
    return hasattr(item, "formula")


def _ids(item: Any) -> frozenset[int]:
    return item.node_ids if _is_candidate(item) else item.site_ids


def _place(item: Any) -> tuple[Any, ...]:
    return item.pass_name, item.concepts, str(item.source)


def _reason(item: Any) -> str:
    if _is_candidate(item):
        return item.backward.stays if item.backward else "no backward pass of it was found"
    return f"[{item.code}] {item.sentence}"


def _primal_halves(items: Sequence[Any], again: frozenset[int], operands_of: Callable[[Any], Any]) -> set[int]:
    """The items (by `id`) of which a twin is computed again in a backward checkpoint; no more of them than there are twins."""

    def key(item: Any) -> tuple[Any, ...]:
        return *_place(item), item.scope, getattr(item, "code", None), operands_of(item)

    twins = Counter(key(x) for x in items if _ids(x) <= again)
    firsts: dict[tuple[Any, ...], list[Any]] = {}
    for x in items:
        if not _ids(x) & again:
            firsts.setdefault(key(x), []).append(x)
    return {id(x) for k, group in firsts.items() if len(group) <= twins[k] for x in group}


def _leaves(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree)


def _reached_by_parameters(graph: Any, parameters: int) -> set[int]:
    """Ids of the float values that hang on the first inputs, but for stop_gradient; a region's body on all it is given if on any of it."""
    import jax.numpy as jnp

    reached = {v.id for v in graph.top.inputs[:parameters]}
    stack = [(graph.top, False)]
    while stack:
        block, whole = stack.pop()
        if whole:
            reached.update(v.id for v in block.inputs)
        for node in block.nodes:
            hangs = any(getattr(a, "id", None) in reached for a in node.inputs) and node.primitive != "stop_gradient"
            stack.extend((child, hangs) for child in node.blocks)
            if hangs:
                reached.update(v.id for v in node.outputs if jnp.issubdtype(v.dtype, jnp.floating))
    return reached


class _Inside:
    """What sites read, and who reads what they make."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.given: dict[int, int] = {}  # input of a region's body -> what stands there outside (the first, of a loop's carry)
        for node in graph.nodes():
            for body in node.blocks:
                atoms = node.inputs[len(node.inputs) - len(body.inputs) :]  # a cond's branches are not given its index
                self.given.update((v.id, a.id) for v, a in zip(body.inputs, atoms, strict=False) if hasattr(a, "id"))

    def operands(self, item: Any) -> tuple[Any, ...]:
        """Shapes of the result and of the float operands, and which of those are inputs of the program. A mask is left out: it may be made
        inside a site, or outside and given to it.
        """
        import jax.numpy as jnp

        result = self.graph.node_by_id[max(_ids(item))].outputs[0]
        leaves = item.leaves.values() if _is_candidate(item) else ()
        floats = [v for v in leaves if jnp.issubdtype(v.dtype, jnp.floating)]
        inputs = {self._outermost(v.id) for v in floats} & {v.id for v in self.graph.top.inputs}
        return result.shape, *sorted(v.shape for v in floats), *sorted(inputs)

    def _outermost(self, value: int) -> int:
        """What a region around is given for a value that its body is given."""
        while value in self.given:
            value = self.given[value]
        return value

    def read(self, item: Any) -> set[int]:
        """Ids of the values that a site reads and does not make."""
        nodes = [self.graph.node_by_id[i] for i in _ids(item)]
        made = {v.id for n in nodes for v in n.outputs}
        return {a.id for n in nodes for a in n.inputs if hasattr(a, "id")} - made

    def is_read_back(self, item: Any) -> bool:
        """Whether a backward node reads an inner value of the site, or its block returns one; the last node's is its result."""
        from fusionlab.graph.scopes import in_backward

        ids = _ids(item)
        for i in ids - {max(ids)}:
            block = self.graph.block_of[i]
            for value in self.graph.node_by_id[i].outputs:
                readers = (u for u in block.users.get(value.id, ()) if u.id not in ids)
                if value.id in block.returned or any(map(in_backward, readers)):
                    return True
        return False


def _declined_forward(program: Any) -> set[tuple[Any, ...]]:
    """The places at which the forward program has a site that is declined and none that is accepted."""
    from dataclasses import replace

    import fusionlab as fl

    function, args = replace(program, variant="forward").make()
    found = fl.find(function, *args)
    return {_place(r) for r in found.rejections} - {_place(c) for c in found.candidates}


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
    from .cotangents import check_cotangents

    return Outcome(*what, equality(step, fused, args), tuple(check_cotangents(found, args)))


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


def equality(step: Any, fused: Any, args: Any) -> Equality:
    """The worst leaf of what two functions return."""
    import jax

    want, got = (jax.jit(lambda *a, f=f: f(*a), compiler_options=QUICK)(*args) for f in (step, fused))
    assert jax.tree.structure(want) == jax.tree.structure(got)
    pairs = zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True)
    errors = [(_error(a, b), jax.tree_util.keystr(path)) for (path, a), b in pairs]
    error, leaf = max(errors)
    jax.clear_caches()
    return Equality(error, leaf, len(errors))


def _error(want: Any, got: Any) -> float:
    """The largest difference relative to the largest magnitude; infinite where types or NaNs and infinities differ."""
    import jax.numpy as jnp
    import numpy as np

    if (want.shape, want.dtype) != (got.shape, got.dtype):
        return float("inf")
    exact = not jnp.issubdtype(want.dtype, jnp.inexact)
    a, b = (np.asarray(x, np.int64 if exact else np.float64) for x in (want, got))
    finite = np.isfinite(a)
    if exact or not finite.all():
        if not np.array_equal(a[~finite] if not exact else a, b[~finite] if not exact else b, equal_nan=not exact):
            return float("inf")
        a, b = a[finite], b[finite]
    apart = float(np.abs(a - b).max(initial=0))
    return apart / max(float(np.abs(a).max(initial=0)), 1e-30) if apart else 0.0


def row(name: str, found: Iterable[Outcome], kinds: Sequence[str] = KINDS) -> Row:
    """The fates of the sites of some programs, of some kinds."""
    found = list(found)
    mine = [s for o in found for s in o.sites if s.kind in kinds]
    fates = Counter(s.fate for s in mine)
    programs = sum(any(s.kind in kinds for s in o.sites) for o in found)
    too = sum(s.forward_too for s in mine)
    return Row(name, programs, len(mine), *(fates[f] for f in FATES), too)


def tables(found: Sequence[Outcome]) -> dict[str, list[Row]]:
    """Rows by kind, by library, and of the programs with scan, remat and shard_map."""
    libraries = dict.fromkeys(o.library for o in found)
    return {
        "kind": [*(row(kind, found, (kind,)) for kind in KINDS), row("all but linear", found, KINDS[1:]), row("all", found)],
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
    for o, s in ((o, s) for o in found for s in o.sites if s.fate == "stays"):
        print(f"stays: {o.program}, {_told(s)}")
    for rows in tables(found).values():
        print(f"\n{text(rows)}")
    print(f"\n{len(found)} programs")
    for o in _worst(found):
        print(f"equality: {o.equality.error:.1e} {o.program}{o.equality.leaf}")  # type: ignore[union-attr]
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
    from fusionlab.evidence.record import environment, save_json

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
        "with": {g: {o.program: dict(Counter(s.fate for s in o.sites)) for o in found if g in o.guises} for g in GUISES},
        "wrong": {o.program: o.wrong for o in found if o.wrong},
        "tolerance": TOLERANCE,
        "equality": {
            "programs": sum(o.equality is not None for o in found),
            "leaves": sum(o.equality.leaves for o in found if o.equality),
            "worst": [{"program": o.program, **asdict(o.equality)} for o in _worst(found) if o.equality],
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
    return [a for i, a in enumerate(argv) if a not in ("-o", "--output") and argv[i - 1 : i] not in (["-o"], ["--output"])]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
