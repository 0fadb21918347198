"""What an import costs, and which room may know which."""

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fusionlab

PACKAGE = Path(fusionlab.__file__).parent
# A place may import the places before it, and itself; of several that a name lies in, the longest counts. What stands in no list is
# for all (errors), or for the command line alone.
ORDER = """
errors tracebacks processes progress output showing device
graph.jax_compat graph.dtypes graph.primitives graph.settings graph.unit_cotangent graph.declined graph.calls graph.program
graph.canonical graph.interpret graph.matching graph.cost graph.certify graph.backward graph.rewriting graph.xla graph
kernels.launch kernels.choose kernels.op kernels.ops kernels ops
fusers.engine fusers.strategy fusers.passes.linear fusers.passes.norm fusers.passes.lerp fusers.passes.attention fusers.passes.matmul
fusers.passes.transformer fusers.passes.custom fusers.passes fusers.registry fusers.lints fusers.report fusers.find fusers
testing.tolerances evidence.units evidence.instruments evidence.errors evidence evidence.scopes
viz.palette viz.markup viz.browser viz.convert viz.model viz.cards.card viz.cards.layout viz.parts viz.cards viz.export viz.notebook
viz.plots viz.curve_plots viz.roofline_plots viz.route_plots viz.gpu_record viz.html viz.explorer viz
verbs testing models commands cli __main__
""".split()
MOST_FILES = 18  # of a folder
ROOM_FOR_MORE = 12  # most files of an op's folder: ops grow
OPTIONAL = ("matplotlib", "ipywidgets", "anywidget", "graphviz", "tqdm", "pandas", "cupy")
# Which rooms may import which installed package. anywidget and graphviz draw; nothing below the view draws.
DRAWING = {"ipywidgets", "anywidget", "graphviz", "matplotlib"}


def run(code: str) -> str:
    ours = "PYTHONPROFILEIMPORTTIME", "FUSIONLAB_LAUNCHER"  # set for tests alone
    env = {k: v for k, v in os.environ.items() if k not in ours}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE.parent), env.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_fusionlab_imports_jax_and_numpy_alone():
    code = f"import sys, fusionlab, json; from fusionlab import *; print(json.dumps([m for m in {OPTIONAL!r} if m in sys.modules]))"
    assert json.loads(run(code)) == []
    third_party = "import sys; import jax, jax.extend, jax.experimental, jax.numpy, numpy; before = set(sys.modules)\n"
    third_party += "from fusionlab import *; new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
    third_party += "import json; print(json.dumps(sorted(new - set(sys.stdlib_module_names))))"
    assert set(json.loads(run(third_party))) <= {"fusionlab", "jax", "jaxlib", "numpy"}


def test_importing_fusionlab_prints_nothing_and_starts_no_backend():
    # With a platform that does not exist, the first array or device asked for would raise.
    assert run("import os; os.environ['JAX_PLATFORMS'] = 'nonesuch'; from fusionlab import *") == ""


def test_a_name_loads_what_it_needs_when_it_is_first_used():
    # What an import costs, as counts: its time is the machine's.
    new = "sys.modules.keys() - before"
    code = "import sys, json, jax, jax.numpy, jax.extend, jax.experimental; before = set(sys.modules)\n"
    code += f"import fusionlab; print(json.dumps(sorted({new})))\nfusionlab.fuse; print(json.dumps(sorted({new})))"
    at_once, used = (json.loads(line) for line in run(code).splitlines())
    assert [m for m in at_once if m.partition(".")[0] == "fusionlab"] == ["fusionlab"]
    # What neither matching nor fusing needs.
    late = (
        "viz",
        "evidence",
        "testing",
        "commands",
        "cli",
        "models",
        "verbs.comparison",
        "verbs.saved",
        "verbs.catalogue",
        "verbs.dump",
    )
    assert [m for m in used if m.startswith(tuple(f"fusionlab.{name}" for name in late))] == []
    others = [m for m in used if m.partition(".")[0] != "fusionlab"]
    assert {m.partition(".")[0] for m in others} <= {"jax", "jaxlib", *sys.stdlib_module_names}
    assert len(others) <= 40, sorted(others)


def test_what_is_loaded_late_is_what_type_checkers_read():
    source = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(n for n in source.body if isinstance(n, ast.If))
    typed = {a.asname: n.module or a.name for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert typed == fusionlab._MODULE_OF
    assert sorted(typed) == sorted(fusionlab.__all__) == sorted(name for name in typed if hasattr(fusionlab, name))
    assert set(typed) <= set(dir(fusionlab))
    with pytest.raises(AttributeError, match="module 'fusionlab' has no attribute 'fnd'"):
        fusionlab.fnd  # noqa: B018 - asked for, to see what it raises


def imports_of(path: Path) -> set[str]:
    """Absolute dotted names a module imports, anywhere in it, relative ones resolved."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom))
    return {name for node in nodes for name in imported(node, path)}


def imported(node: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    """The absolute dotted names of one import."""
    if isinstance(node, ast.Import):
        return [a.name for a in node.names]
    package = ("fusionlab", *path.relative_to(PACKAGE).parent.parts)
    base = package[: len(package) - node.level + 1] if node.level else ()
    module = ".".join((*base, *([node.module] if node.module else [])))
    return [f"{module}.{a.name}" for a in node.names]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"}


def place_of(module: str) -> str:
    """The longest entry of ORDER that a module is or lies in."""
    return max((p for p in ORDER if f"{module}.".startswith(f"{p}.")), key=len)


def test_a_module_imports_only_what_stands_before_it():
    """At its top, in its functions, and for types alone."""
    late = {
        (module, edge.to)
        for module in MODULES
        for edge in edges_of(module)
        if ORDER.index(place_of(edge.to)) > ORDER.index(place_of(module))
    }
    assert not late
    assert place_of("graph.program.ir") == "graph.program"  # the longest
    assert place_of("evidence.check") == "evidence"


@dataclass(frozen=True)
class Edge:
    """One import of a module of the package by another; `for_types`: under `if TYPE_CHECKING`."""

    to: str
    for_types: bool


@functools.cache
def edges_of(module: str) -> tuple[Edge, ...]:
    path = MODULES[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for part in ast.walk(node)
    }
    names = [
        (name.removeprefix("fusionlab."), id(node) in types)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported(node, path)
        if name.startswith("fusionlab.")
    ]
    return tuple(Edge(inner, only) for name, only in names if (inner := _module(name)) not in ("", module))


def _module(name: str) -> str:
    """The module that a dotted name is, or is something of."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def circles(for_types: bool) -> list[set[str]]:
    """Sets of modules each of which leads to all others by imports, those for types counted or not."""
    reach = {m: {e.to for e in edges_of(m) if for_types or not e.for_types} for m in MODULES}
    for middle in MODULES:
        for one in MODULES:
            if middle in reach[one]:
                reach[one] |= reach[middle]
    rings = {frozenset(n for n in reach[m] if m in reach[n]) for m in MODULES if m in reach[m]}
    return [set(ring) for ring in rings]


# Two names of one thing, one of which needs the other for its types alone: the data and what reads it.
FOR_TYPES = (
    {"graph.canonical." + m for m in "algebra concatenated einsum fused_nodes given regroup rules view".split()},
    {"graph.program.graph", "graph.program.text"},
    {"kernels.op.description", "kernels.op.labels", "kernels.op.lowering", "kernels.op.op", "kernels.op.primitive"},
    {"fusers.report.findings", "fusers.report.structures"},
    {"fusers.passes.custom.own_pass", "fusers.passes.custom.own_site"},
    {"viz.explorer.session", "viz.explorer.state_file"},
    {"viz.explorer.messages", "viz.explorer.widget"},
)


def test_no_import_leads_back_to_where_it_stands():
    assert circles(for_types=False) == []


def test_imports_for_types_lead_back_only_where_it_is_known():
    assert sorted(map(sorted, circles(for_types=True))) == sorted(map(sorted, FOR_TYPES))


def folders() -> Iterator[Path]:
    for top in (PACKAGE, PACKAGE.parent / "tests", PACKAGE.parent / "benchmarks"):
        for folder in (top, *top.rglob("*")):
            apart = {"__pycache__", "results", "records"} & set(folder.relative_to(top).parts)
            if folder.is_dir() and not apart and any(folder.glob("*.py")):
                yield folder


def test_no_folder_holds_more_than_one_looks_through():
    many = {f: n for f in folders() if (n := sum(p.is_file() for p in f.iterdir())) > MOST_FILES}
    assert not many


def test_the_folders_of_ops_have_room_for_more():
    ops = [f for f in (PACKAGE / "kernels" / "ops").rglob("*") if f.is_dir() and f.name != "__pycache__"]
    assert len(ops) > 8
    assert not {f.name: n for f in ops if (n := sum(p.is_file() for p in f.iterdir())) > ROOM_FOR_MORE}


def test_every_folder_says_what_it_is_for():
    for folder in folders():
        if folder != PACKAGE.parent / "tests":  # no package: its own folders are packages of pytest's
            text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
            assert text, f"{folder} says nothing of itself"


def test_the_tolerances_import_no_assertion():
    """The evidence reads them, and the assertions read the evidence."""
    inner = {n for n in imports_of(PACKAGE / "testing" / "tolerances.py") if n.startswith("fusionlab.")}
    assert {n.split(".")[1] for n in inner} <= {"errors", "showing", "tracebacks"}
    code = "import sys, fusionlab.testing.tolerances; print(*(m for m in sys.modules if m.startswith('fusionlab.testing.')))"
    assert run(code).split() == ["fusionlab.testing.tolerances"]


def test_the_pytest_plugin_imports_pytest_alone():
    """pytest loads it in every run of everybody who has FusionLab installed, before any conftest.py has set up JAX."""
    code = "import sys, pytest; before = set(sys.modules); import fusionlab_pytest; print(*(set(sys.modules) - before))"
    new = {m.partition(".")[0] for m in run(code).split()} - set(sys.stdlib_module_names)
    assert new == {"fusionlab_pytest"}


@pytest.mark.parametrize("room", ["graph", "kernels", "fusers", "evidence"])
def test_nothing_below_the_view_imports_a_drawing_package(room):
    for path in sorted((PACKAGE / room).rglob("*.py")):
        used = {n.partition(".")[0] for n in imports_of(path)}
        assert not used & DRAWING, f"{path.relative_to(PACKAGE)} imports {sorted(used & DRAWING)}"


def test_no_module_imports_private_jax():
    for path in sorted(PACKAGE.rglob("*.py")):
        private = {n for n in imports_of(path) if n.startswith(("jax._src", "jaxlib", "jax.lib"))}
        assert not private, f"{path.relative_to(PACKAGE)} imports {sorted(private)}"


def test_the_models_are_plain_jax():
    for path in sorted((PACKAGE / "models").glob("*.py")):
        names = imports_of(path)
        assert all(n.startswith(("fusionlab.errors", "fusionlab.models")) for n in names if n.startswith("fusionlab"))
