"""An error in a user's cell shows the cell, the user's functions and the error: no line of FusionLab's, as none of JAX's."""

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab import tracebacks
from fusionlab.testing import assert_fused

PACKAGE = str(Path(fl.__file__).parent)
X, W = jnp.ones((8, 16)), jnp.ones((16, 4))


def mlp(x, w):
    return jnp.maximum(x @ w, 0)


def broken(x, w):
    return x @ x


NAMES = {"fl": fl, "jax": jax, "mlp": mlp, "broken": broken, "x": X, "w": W, "assert_fused": assert_fused}
NAMES |= {"found": fl.find(mlp, X, W), "fused": fl.fuse(mlp), "bad": fl.fuse(broken)}
NAMES |= {"mixed": fl.fuse(lambda x, w, kind: mlp(x, w)), "step": fl.fuse(jax.value_and_grad(mlp))}


def text_of(line: str, **names: object) -> str:
    """What Python prints for a cell that raises, without the lines of this test."""
    names = NAMES | names
    if "lab" in line:
        names["lab"] = fl.explore(mlp, X, W)
    try:
        exec(compile(line, "<ipython-input-1-cell>", "exec"), names)
    except Exception as error:
        told = traceback.format_exception(error)
        return "".join(told)
    pytest.fail(f"{line} raised nothing")


def files_in(text: str) -> list[str]:
    return re.findall(r'File "(.*?)", line', text)


@pytest.mark.parametrize(
    ("line", "error", "own"),
    [
        ("fl.find(mlp, x, w, passes='gemm')", "UnknownNameError: unknown pass 'gemm'", []),
        ("fl.find(broken, x, w)", "TraceError: broken does not trace", ["broken"]),
        ("fl.find()", "TypeError: find() missing 1 required positional argument: 'fn'", []),
        ("fl.explore(mlp, x, w, budget_s=-1)", "ArgumentError: budget_s", []),
        ("fl.load('nope.json')", "ArgumentError: path: there is no file 'nope.json'", []),
        ("found.explain('nope')", "ArgumentError: explain: got 'nope'", []),
        ("found['nope']", "UnknownNameError: unknown site 'nope'", []),
        ("found.select('nope')", "UnknownNameError: unknown site or pass 'nope'", []),
        ("lab.select('nope')", "ArgumentError: select: got 'nope'", []),
        ("lab.toggles['nope'] = True", "UnknownNameError: unknown pass or site 'nope'", []),
        ("lab.sites['nope']", "UnknownNameError: unknown site 'nope'", []),
        ("lab.measure(1)", "TypeError: Measuring.measure() takes 1 positional argument", []),
        ("fused(x)", "TypeError: mlp() missing 1 required positional argument: 'w'", []),
        ("fused(x, w, b=x)", "TypeError: mlp() got an unexpected keyword argument 'b'", []),
        ("mixed(x, 'relu')", "TypeError: <lambda>() missing 1 required positional argument: 'kind'", []),
        ("step(x)", "TypeError: mlp() missing 1 required positional argument: 'w'", []),
        ("bad(x, w)", "TypeError: dot_general requires", ["broken"]),
        ("bad.lower(x, w)", "TypeError: dot_general requires", ["broken"]),
        ("jax.jit(lambda a: bad(a, w))(x)", "TypeError: dot_general requires", ["<lambda>", "broken"]),
        ("fl.ops.gemm_epilogue(x, w, activation='rely')", "UnknownNameError: unknown activation 'rely'", []),
        ("fl.Strategy(lerp=3)", "ArgumentError: Strategy: lerp=3", []),
        ("fl.Device.of('h10')", "ArgumentError: device: got 'h10'", []),
        ("assert_fused(mlp, (x, w), expect={'lerp': 1})", "FusionAssertionError: ", []),
    ],
)
def test_a_cell_s_error_shows_no_line_of_ours(line, error, own):
    text = text_of(line)
    assert error in text
    inside = [f for f in files_in(text) if f.startswith((PACKAGE, str(Path(jax.__file__).parent)))]
    assert inside == []
    last = text.rpartition("Traceback (most recent call last):")[2]
    assert last.index("<ipython-input-1-cell>") < last.index(error.partition(":")[0])
    for function in own:
        assert f"in {function}" in text


def test_jax_s_setting_shows_all(request):
    request.addfinalizer(lambda: jax.config.update("jax_traceback_filtering", "auto"))
    jax.config.update("jax_traceback_filtering", "off")
    files = files_in(text_of("fl.find(broken, x, w)"))
    assert any(f.startswith(os.path.join(PACKAGE, "verbs")) for f in files)
    assert any(f.startswith(str(Path(jax.__file__).parent)) for f in files)


def test_a_mistake_of_ours_keeps_its_lines():
    class Listed(list):
        def __iter__(self):
            raise AttributeError("from inside")

    def wrong():
        return sorted({}[0])  # stands for a line of the package

    wrong.__code__ = wrong.__code__.replace(co_filename=os.path.join(PACKAGE, "verbs", "lab.py"))
    assert os.path.join(PACKAGE, "verbs", "lab.py") in files_in(
        text_of("wrong()", wrong=tracebacks.own_lines_hidden(wrong))
    )
    # Where the user's own object raised, it is the user's.
    assert f"{PACKAGE}{os.sep}fusers" not in "".join(
        files_in(text_of("fl.find(mlp, x, w, passes=listed)", listed=Listed(["lerp"])))
    )


CELLS = """\
import jax.numpy as jnp, fusionlab as fl
x, w = jnp.ones((8, 16)), jnp.ones((16, 4))
def broken(x, w): return x @ x
fl.find(broken, x, w)
fl.fuse(broken)(x, w)
fl.explore(lambda x, w: x @ w, x, w).select("nope")
"""


def in_this_process(_folder: Path) -> str:
    """What a shell of IPython's in this process prints for the cells."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell(colors="nocolor")
    with capture_output() as told:
        for cell in CELLS.splitlines():
            shell.run_cell(cell)
    return told.stdout


def as_a_program(folder: Path) -> str:
    """The same of the program `ipython`, which reads them as they are typed."""
    environment = os.environ | {"IPYTHONDIR": str(folder), "PYTHONPATH": str(Path(PACKAGE).parent)}
    shell = [sys.executable, "-m", "IPython", "--no-banner", "--simple-prompt", "--colors=NoColor", "--no-term-title"]
    return subprocess.run(
        shell, input=CELLS, capture_output=True, text=True, env=environment, cwd=folder, check=False
    ).stdout


@pytest.mark.parametrize("shell", [in_this_process, as_a_program])
def test_an_ipython_shell_shows_the_cells_alone(shell, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    text = shell(tmp_path)
    assert "TraceError: broken does not trace" in text
    assert text.count("Traceback (most recent call last)") == 4  # the first has a cause of its own
    files = re.findall(r"^File (\S+)", text, re.MULTILINE)
    assert [f for f in files if not f.startswith("<ipython-input-")] == []
    assert "----> 1 fl.fuse(broken)(x, w)" in text
    assert "fl.explore(lambda x, w: x @ w, x, w).select" in text.rpartition("Traceback")[2]
    assert "skipping hidden" not in text
