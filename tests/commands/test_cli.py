"""The command line: right output, one clear error line, no partial files, an exit status that tells."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import fusionlab as fl
from fusionlab.cli import WORSE, main
from fusionlab.evidence.instruments.record import hardware
from fusionlab.kernels.choose.plan_files import Choice, Measured, case_text, quickest, write
from fusionlab.models.layers import dense
from fusionlab.verbs import comparison, lab, tuning
from tests.asked import by_default

MODEL = """
import jax, jax.numpy as jnp

def mlp(w, b, x):
    return jax.nn.relu(x @ w + b)

def bare(w, x):
    return x @ w

def declined(w, b, x):
    return jax.nn.leaky_relu(x @ w + b)

def powers(x, n, *, scale):
    return scale * x ** sum(range(n))

def attend(x):
    return jax.nn.dot_product_attention(x, x, x)

def breaks(x):
    return x.no_such_method()

def by_value(x):
    return x if x > 0 else -x

example_args = {
    "mlp": (jnp.ones((16, 8)), jnp.ones((8,)), jnp.ones((4, 16))),
    "declined": (jnp.ones((16, 8)), jnp.ones((8,)), jnp.ones((4, 16))),
    "powers": (jnp.ones(3), 2),
    "bare": (jnp.ones((16, 8)), jnp.ones((4, 16))),
    "breaks": (jnp.ones(3),),
    "by_value": (jnp.ones(()),),
}
"""
SHAPES = "tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 8), (8,), (4, 16)))"


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


@pytest.fixture
def run(capsys):
    def run(*argv):
        """(exit status, standard output, standard error) of one command."""
        capsys.readouterr()
        try:
            status = main([str(a) for a in argv])
        except SystemExit as e:
            status = e.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def error_line(done):
    """The one line of an error: a non-zero status, nothing printed as a result, no traceback."""
    status, out, err = done
    assert status not in (0, None)
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("fusionlab: error: ")
    return err


def test_doctor_prints_a_report_and_json(run):
    status, out, _ = run("doctor")
    assert status == 0
    assert out.rstrip().endswith("fusionlab demo -o demo")
    status, out, _ = run("doctor", "--json")
    assert status == 0
    assert json.loads(out)["versions"]["python"] == sys.version.split()[0]


def test_find_names_the_fused_site_and_counts_every_pass(run, model):
    status, out, _ = run("find", f"{model}:mlp")
    assert status == 0
    assert "gemm_epilogue: 1 subgraph can be fused, 0 declined, nodes " in out
    assert "dot_product_attention: 0 subgraphs can be fused, 0 declined" in out
    data = json.loads(run("find", f"{model}:mlp", "--json")[1])
    assert data["counts"]["gemm_epilogue"] == 1
    assert set(data["counts"]) == {p.name + grad for p in by_default() for grad in ("", "_grad")}
    assert data["candidates"][0]["attrs"]["activation"] == "relu"
    assert data["candidates"][0]["source"].startswith("model.py:")
    assert json.loads(run("find", f"{model}:bare", "--json")[1])["counts"]["gemm_epilogue"] == 0


def test_find_says_why_sites_were_declined_and_what_the_others_would_run_on(run, model):
    out = run("find", f"{model}:declined")[1]
    (r,) = json.loads(run("find", f"{model}:declined", "--json")[1])["rejections"]
    assert f"  [activation] {r['id']} at {r['source']}: {r['sentence']}\n    edit: {r['edit']}" in out
    assert "x @ w + b -> xla (same code): what XLA runs anyway" in out
    there = run("find", f"{model}:mlp", "--device", "sm_90")[1]
    assert (
        "backends on a CUDA sm_90 device (simulated):\n  gemm_epilogue@#1 at model.py:5: relu(x @ w + b) -> xla"
        in there
    )
    assert out.partition("backends on")[2] != there.partition("backends on")[2]


def test_static_and_keyword_arguments_are_given_as_to_jit(run, model):
    how = ("--static-argnums", "1", "--kwargs", "dict(scale=2.0)")
    assert run("trace", f"{model}:powers", *how)[0] == 0
    assert run("find", f"{model}:powers", *how, "--static-argnames", "scale")[0] == 0
    assert run("compare", f"{model}:powers", *how)[0] == 0
    assert "static_argnums" in error_line(run("find", f"{model}:powers", *how[2:]))
    assert "needed whole numbers" in error_line(run("find", f"{model}:powers", "--static-argnums", "n"))
    assert "needed a dict of names" in error_line(run("find", f"{model}:powers", "--kwargs", "3"))


def test_the_version_is_printed(run):
    assert run("--version") == (0, f"fusionlab {fl.__version__}\n", "")


def test_a_page_that_cannot_be_written_is_refused_before_any_work(run, model, tmp_path, monkeypatch):
    for module, name in ((fl, "fuse"), (fl, "compare"), (lab, "fuse"), (comparison, "compare")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("the work was started"))
    assert "cannot write the file '/nodir/x.html'" in error_line(run("compare", f"{model}:mlp", "-o", "/nodir/x.html"))
    assert "ends in .html" in error_line(run("compare", f"{model}:mlp", "-o", tmp_path / "x.pdf"))


def test_a_comparison_is_written_as_a_page(run, model, tmp_path):
    status, out, _ = run("compare", f"{model}:mlp", "-o", tmp_path / "x.html")
    assert status == 0
    assert out.startswith("mlp: same code\n")
    assert "<h1>FusionLab: before and after</h1>" in (tmp_path / "x.html").read_text()


def test_find_takes_passes_a_device_and_shapes(run, model):
    done = run("find", f"{model}:mlp", "--args", SHAPES, "--passes", "gemm_epilogue", "--device", "sm_90", "--json")
    data = json.loads(done[1])
    assert done[0] == 0
    assert data["counts"] == {"gemm_epilogue": 1, "gemm_epilogue_grad": "runs under jax.grad"}
    assert "sm_90" in data["device"]


def test_a_node_or_a_site_is_explained(run, model):
    (r,) = json.loads(run("find", f"{model}:declined", "--json")[1])["rejections"]
    text = json.loads(run("explain", f"{model}:declined", r["id"], "--json")[1])["text"]
    assert r["sentence"] in text
    assert "declined at" not in text
    assert f"declined at {r['origin']}" in run("explain", f"{model}:declined", r["id"], "--origin")[1]
    product = next(line for line in run("trace", f"{model}:mlp")[1].splitlines() if "dot_general" in line)
    name = product.split(":")[0].strip()
    assert "gemm_epilogue@#1" in run("explain", f"{model}:mlp", name)[1]
    assert re.search(r"costs .*flop, reads .*, writes .*flop/byte", run("explain", f"{model}:mlp", name)[1])
    error_line(run("explain", f"{model}:mlp", "gemm_epilogue@#9"))
    error_line(run("explain", f"{model}:mlp", "%999"))


def test_the_difference_that_fusing_makes_is_a_unified_diff(run, model):
    status, out, _ = run("diff", f"{model}:mlp", "--passes", "gemm_epilogue")
    assert status == 0
    lines = out.splitlines()
    assert lines[:2] == ["--- before", "+++ after"]
    assert any(line.startswith("-") and "dot_general" in line for line in lines)
    assert any(line.startswith("+") and "gemm_epilogue" in line for line in lines)
    assert json.loads(run("diff", f"{model}:mlp", "--json")[1])["diff"].startswith("--- before\n")
    assert run("diff", f"{model}:bare")[1] == "nothing is fused\n"


def test_a_graph_is_exported_by_suffix_before_or_after_fusing(run, model, tmp_path):
    for suffix, start in ((".svg", "<svg"), (".dot", "digraph"), (".html", "<!"), (".json", "{"), (".txt", "")):
        file = tmp_path / f"graph{suffix}"
        assert run("export", f"{model}:mlp", "-o", file) == (0, f"written to {file}\n", "")
        assert file.read_text().lstrip().startswith(start)
        assert "x @ w" in file.read_text() or suffix == ".txt"
    assert run("export", f"{model}:mlp", "--fused", "-o", tmp_path / "graph.txt")[0] == 0
    assert "dot_general" not in (tmp_path / "graph.txt").read_text()
    assert "got the suffix '.bmp'" in error_line(run("export", f"{model}:mlp", "-o", tmp_path / "graph.bmp"))
    assert "cannot write the file '/nodir/x.svg'" in error_line(run("export", f"{model}:mlp", "-o", "/nodir/x.svg"))


def test_a_benchmark_is_of_time_alone_and_keeps_every_sample(run, model, tmp_path, monkeypatch):
    monkeypatch.setattr("fusionlab.progress.WAIT_S", 0.0)
    asked = ("--args", "(jnp.ones((1, 256, 2, 64)),)", "--samples", 4, "--no-grad")
    status, out, progress = run("bench", f"{model}:attend", *asked, "-o", tmp_path / "record.json")
    assert status == 0
    assert "call: inconclusive: fewer than 40 samples" in out
    assert "error" not in out
    assert "timing call" in progress
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["timing"]["after"]["samples_s"]) == 4
    assert record["timing"]["after"]["clock"] == "wall time"
    assert record["numerics"] is record["memory"] is record["timing_grad"] is None
    assert "ends in .json" in error_line(run("bench", f"{model}:attend", *asked, "-o", tmp_path / "x.html"))
    assert "needed a whole number above 0" in error_line(run("bench", f"{model}:attend", "--samples", "none"))


def test_tuning_without_a_gpu_says_so_and_writes_nothing(run, model, tmp_path):
    status, out, _ = run("tune", f"{model}:mlp", "-o", tmp_path / "plans.json")
    assert status == 0
    assert "nothing measured, nothing written" in out
    assert not (tmp_path / "plans.json").exists()
    data = json.loads(run("tune", f"{model}:mlp", "--no-grad", "--json")[1])
    assert data["path"] is None
    assert data["cases"] == {}


def test_tuning_is_told_what_to_measure_and_where_to_write(run, model, tmp_path, monkeypatch):
    given = {}

    def tune(fn, *args, **options):
        given.update(options)
        return tuning.tune(fn, *args, **options)

    monkeypatch.setattr(fl, "tune", tune)
    assert run("tune", f"{model}:mlp", "--no-grad", "--passes", "gemm_epilogue", "-o", "plans.json")[0] == 0
    assert callable(given.pop("progress"))
    told = {"grad": False, "passes": ["gemm_epilogue"], "path": "plans.json", "budget_s": None, "again": False}
    assert given == told


def test_plan_files_are_listed_and_joined(run, tmp_path):
    a, b, both = (str(tmp_path / name) for name in ("a.json", "b.json", "both.json"))
    for file, card, times in (
        (a, "NVIDIA L4", {"xla": 2.0, "cuda": 1.0}),
        (b, "NVIDIA A10", {"xla": 1.0, "cuda": 2.0}),
    ):
        text = case_text("lerp", "call", rows=8)
        one = Measured({text: Choice(quickest(times), times)}, {}, card, {"driver": "570.1"})
        write(Path(file), "sm_89", one)
    status, out, _ = run("plans", a, b, "-o", both)
    assert (status, Path(both).exists()) == (0, True)
    said = "NVIDIA L4 (sm_89), 1 call, 1 of them with an implementation faster than XLA's; driver 570.1; another card"
    assert out.splitlines()[0] == f"{a}: {said}"
    assert out.splitlines()[-1] == f"written to {both}"
    data = json.loads(run("plans", both, "--json")[1])
    assert [(one["device"], one["calls"]) for one in data["sets"]] == [("NVIDIA A10", 1), ("NVIDIA L4", 1)]
    assert "does not exist" in error_line(run("plans", a, tmp_path / "none.json", "-o", tmp_path / "c.json"))
    assert not (tmp_path / "c.json").exists()


def test_find_dumps_the_graph_before_and_after_each_pass(run, model, tmp_path):
    folder = tmp_path / "dump"
    assert run("find", f"{model}:mlp", "--passes", "gemm_epilogue", "--dump", folder)[0] == 0
    names = {p.name for p in folder.iterdir()}
    for part in ("before", "after"):
        assert {f"00_gemm_epilogue.{part}.{suffix}" for suffix in ("txt", "dot", "svg")} <= names
    assert "dot_general" in (folder / "00_gemm_epilogue.before.txt").read_text()
    after = (folder / "00_gemm_epilogue.after.txt").read_text()
    assert "gemm_epilogue" in after
    assert "dot_general" not in after
    assert json.loads((folder / "report.json").read_text())["passes"][0]["counts"]["gemm_epilogue"] == 1


def test_trace_prints_the_program(run, model):
    status, out, _ = run("trace", f"{model}:mlp")
    assert status == 0
    assert "dot_general" in out
    assert "f32[4,8]" in out
    view = json.loads(run("trace", f"{model}:mlp", "--json")[1])
    assert {"dot_general", "max"} <= {node["primitive"] for node in view["nodes"]}


def test_records_are_written_read_and_compared(run, model, tmp_path):
    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    assert run("compare", f"{model}:mlp", "-o", old)[0] == 0
    assert run("compare", f"{model}:mlp", "-o", new)[0] == 0
    status, out, _ = run("diff", old, new)
    assert status == 0
    assert out.startswith("mlp: 0 worse, ")
    data = json.loads((tmp_path / "new.json").read_text())
    (tmp_path / "new.json").write_text(json.dumps(data | {"memory": spoilt(data["memory"])}))
    status, out, _ = run("diff", old, new)
    assert status == WORSE
    assert "worse: compiled peak memory of the fused version, call" in out
    page = tmp_path / "both.html"
    assert run("diff", old, new, "-o", str(page))[0] == WORSE
    assert "Are they of the same work?" in page.read_text()
    status, out, _ = run("diff", old, new, "--json")
    assert (status, [c["verdict"] for c in json.loads(out)["changes"]].count("worse")) == (WORSE, 1)


def spoilt(memory):
    return memory | {"after": memory["after"] | {"peak": memory["after"]["peak"] + (1 << 20)}}


@pytest.mark.parametrize("text", ["", "not json", "[]", "{}", '{"name": 1, "environment": {}}'])
def test_what_is_no_record_is_one_error_line(run, tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert f"path: {tmp_path / 'a.json'} is no" in error_line(
        run("diff", str(tmp_path / "a.json"), str(tmp_path / "a.json"))
    )
    assert "is no" in error_line(run("diff", str(tmp_path / "none.json"), str(tmp_path / "a.json")))


@pytest.mark.parametrize("command", ["trace", "find", "diff", "compare", "bench", "tune"])
def test_a_function_that_does_not_trace_is_one_error_line(run, model, command):
    assert "breaks does not trace: AttributeError" in error_line(run(command, f"{model}:breaks"))
    assert "by_value does not trace: TracerBoolConversionError" in error_line(run(command, f"{model}:by_value"))


@pytest.mark.parametrize("shapes", [SHAPES, "f32[16,8], f32[8], f32[4,16]"])
def test_data_are_drawn_where_only_shapes_are_given(run, model, shapes):
    status, out, _ = run("compare", f"{model}:mlp", "--args", shapes, "--json")
    assert status == 0
    leaves = json.loads(out)["numerics"]["leaves"]
    assert [leaf["dtype"] for leaf in leaves] == ["float32"] * 4
    assert leaves[0]["after"]["worst_reference"] != 0


def test_shapes_are_written_as_jaxprs_write_them(run, model):
    status, out, _ = run("trace", f"{model}:attend", "--args", "bf16[2,16,4,8]")
    assert status == 0
    assert "bf16[2,16,4,8]" in out
    assert (
        "f32[3]"
        in run(
            "trace", f"{model}:powers", "--args", "f32[3], 2", "--static-argnums", "1", "--kwargs", "{'scale': f32[]}"
        )[1]
    )


def test_a_misspelt_pass_lists_the_valid_ones(run, model):
    for command in ("find", "compare"):
        line = error_line(run(command, f"{model}:mlp", "--passes", "gemm_epilog"))
        assert "unknown pass 'gemm_epilog'" in line
        assert "Did you mean 'gemm_epilogue'?" in line
        assert all(p.name in line for p in fl.passes())


def test_a_bad_device_is_one_error_line(run, model):
    assert "device: got 'h101'" in error_line(run("find", f"{model}:mlp", "--device", "h101"))


@pytest.mark.parametrize("spec", ["model", "no_such_module:f", "nowhere.py:f", "fusionlab.models.mlp:nope"])
def test_a_bad_module_spec_is_one_error_line(run, spec):
    assert "function: " in error_line(run("find", spec))


def test_wrong_usage_is_one_error_line(run):
    assert "invalid choice: 'fnd'" in error_line(run("fnd"))
    assert "-o/--output" in error_line(run("demo"))
    assert "needed a whole number above 0" in error_line(run("demo", "-o", "x", "--size", "-3"))


@pytest.mark.parametrize("place", ["/proc/demo", "{tmp}/file", "{tmp}/file/demo"])
def test_an_unwritable_folder_is_refused_before_any_work(run, model, tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("a file")
    before = sorted(tmp_path.rglob("*"))
    folder = place.format(tmp=tmp_path)
    started = (
        (fl, "find"),
        (fl, "fuse"),
        (fl, "compare"),
        (fl, "trace"),
        (lab, "find"),
        (lab, "fuse"),
        (lab, "trace"),
        (comparison, "compare"),
    )
    for module, name in started:
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("the work was started"))
    for command in (["demo", "-o", folder], ["find", f"{model}:mlp", "--dump", folder]):
        assert f"cannot write to the folder '{folder}'" in error_line(run(*command))
    assert [p for p in sorted(tmp_path.rglob("*")) if "__pycache__" not in p.parts] == before


def test_a_failing_run_leaves_no_partial_files(run, model, tmp_path):
    error_line(run("find", f"{model}:breaks", "--dump", tmp_path / "out" / "dump"))
    assert not (tmp_path / "out").exists()


def test_the_help_says_where_example_arguments_come_from(run):
    status, out, _ = run("find", "--help")
    assert status == 0
    assert all(word in out for word in ("--args EXPR", "function.example_args", "f32[64,128]"))


# A demo that times for a fifth of a second and draws no picture that a click on its page would open.
QUICK = {"fusionlab.commands.demo.BUDGET_S": 0.2, "fusionlab.viz.html.page.MAX_BYTES": 0}
QUICKLY = f"""
import fusionlab.cli, fusionlab.commands.demo, fusionlab.viz.html.page
{"; ".join(f"{name} = {value}" for name, value in QUICK.items())}
raise SystemExit(fusionlab.cli.main())
"""
STARTED = {"quick": ("-c", QUICKLY), "as a user runs it": ("-m", "fusionlab.cli")}


@pytest.fixture(scope="module", params=STARTED)
def demo(request, tmp_path_factory):
    """A small demo in a process of its own, from another folder. (folder, JSON, standard error)."""
    where = tmp_path_factory.mktemp("demo")
    env = os.environ | {"PYTHONPATH": str(Path(fl.__file__).parents[1])}
    command = [sys.executable, *STARTED[request.param], "demo", "-o", "out", "--size", "512", "--json"]
    done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return where / "out", json.loads(done.stdout), done.stderr


def test_the_demo_finds_fuses_verifies_and_times(demo):
    folder, data, progress = demo
    assert data["sequence"] == 512
    assert data["counts"]["gemm_epilogue"] == 6
    assert data["counts"]["dot_product_attention"] == 1
    for timing in (data["timing"], data["timing_grad"]):
        assert len(timing["before"]["samples_s"]) == len(timing["after"]["samples_s"]) >= 2
        assert timing["hardware"] == data["hardware"]
        assert timing["interval"][0] <= timing["ratio"] <= timing["interval"][1]
    leaves = data["numerics"]["leaves"]
    assert [leaf["kind"] for leaf in leaves].count("gradient") == 17
    assert all(leaf["ok"] for leaf in leaves)
    assert "timing call" in progress
    assert json.loads((folder / "report.json").read_text()) == data


def test_the_demo_leaves_a_self_contained_page_and_pictures(demo):
    folder, data, _ = demo
    page = (folder / "report.html").read_text()
    assert "<svg" in page
    assert "dot_product_attention" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    assert "<h2>On a GPU: NVIDIA H200</h2>" in page
    assert f"commit {data['gpu_record']['environment']['commit'][:12]}." in page
    assert (folder / "found.svg").read_text().lstrip().startswith("<svg")
    assert sorted(data["files"]) == sorted(p.name for p in folder.iterdir())
    assert {"timing.svg", "errors.svg", "fused.svg", "report.json"} <= set(data["files"])


def test_the_demo_says_what_would_fuse_on_an_h100_and_why(demo):
    _, data, _ = demo
    elsewhere = data["elsewhere"]
    assert "sm_90" in elsewhere["device"]
    backends = [b for c in elsewhere["candidates"] for b in c["backends"]]
    assert backends
    assert all(b["reason"] for b in backends)


def test_the_demo_ends_with_what_was_found_what_it_gains_and_what_to_type_next(run, tmp_path, monkeypatch):
    for name, value in QUICK.items():
        monkeypatch.setattr(name, value)
    _, out, _ = run("demo", "-o", tmp_path / "out", "--size", "512")
    short, _, last = out.rstrip().partition("\nIn short\n")[2].partition("\n\n")
    found, here, there = (line.strip() for line in short.splitlines())
    assert found == "found here: 9 sites; 1 runs fused (dot_product_attention), 8 run as XLA compiles them"
    ratio = r"[\d.]+x \[[\d., ]+\]"
    assert re.fullmatch(
        rf"gain here: call {ratio} \(.+\), gradient of the call {ratio} \(.+\); no result worse than before", here
    )
    assert re.fullmatch(
        rf"gain on a GPU: loss and gradients of GPT-2 124M {ratio}, [\d.]+ ms -> [\d.]+ ms \(record of NVIDIA H200, .+\)",
        there,
    )
    page, command = last.splitlines()
    assert Path(page.partition("open ")[2].partition(" in a browser")[0]).exists()
    (tmp_path / "model.py").write_text("import jax\ndef layer(x, w):\n    return jax.nn.relu(x @ w)\n")
    typed = shlex.split(command)[1:]
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(*typed)
    assert (status, out.startswith("gemm_epilogue: 1 subgraph")) == (0, True)


@pytest.mark.dear
@pytest.mark.parametrize("changed", [QUICK, {}], ids=["quick", "as it is"])
def test_a_small_demo_is_timed_and_says_that_its_sites_alone_gain_nothing(run, tmp_path, monkeypatch, changed):
    """At 64 positions every site runs what XLA runs anyway; fused, the block compiles to other instructions all the same."""
    for name, value in changed.items():
        monkeypatch.setattr(name, value)
    status, out, _ = run("demo", "-o", tmp_path / "out", "--size", "64")
    assert status == 0
    assert "time, gradient of the call, median of " in out
    assert "note: every fused site runs XLA's own code, but XLA compiled part of the fused version differently" in out
    assert (tmp_path / "out" / "timing.svg").exists()
    assert len(out.splitlines()) < 40


def test_where_nothing_is_timed_the_demo_says_so(run, tmp_path, monkeypatch):
    """Where both compile to the same instructions the table says it, names the hardware, and there is no timing plot."""
    monkeypatch.setattr(
        "fusionlab.commands.demo.transformer_block", lambda p, x: jax.nn.relu(dense(p["mlp"]["fc1"], x[0]))
    )
    status, out, _ = run("demo", "-o", tmp_path / "out", "--size", "64")
    assert status == 0
    assert "not measured: same code" in out
    assert "note: both compile to the same instructions (call, gradient of the call)" in out
    assert f"Measured on {hardware()}" in out
    assert "Would run on a CUDA sm_90 device (simulated); judged, not run" in out
    assert "worst gradient of 17, " in out
    assert not (tmp_path / "out" / "timing.svg").exists()
    assert len(out.splitlines()) < 40
