"""The notebooks run from top to bottom, and are committed as they ran."""

import json
import os
import re
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


NAMES = (
    "00_tour",
    "01_gemm_epilogues",
    "02_attention",
    "03_gpt_layers",
    "04_lerp",
    "05_matmul_routes",
    "06_own_pass",
    "07_tensor_parallel",
)


def test_the_notebooks_are_those_that_are_run_here():
    assert sorted(p.stem for p in NOTEBOOKS.glob("*.ipynb")) == sorted(NAMES)


# Without the state of its widgets, which is as large as all the rest: a still picture stands for it.
AGAIN = "jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.store_widget_state=False"
# How exact a time is, is no question here: a comparison samples for seconds, not for a minute.
SOONER = "import functools, fusionlab as fl; fl.compare = functools.partial(fl.compare, budget_s=2)"


def committed(name):
    import nbformat  # takes a second or three, which collection does without

    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def executed(name):
    """The notebook, executed now."""
    from nbclient import NotebookClient

    notebook = committed(name)
    resources = {"metadata": {"path": NOTEBOOKS}}
    lines = [f"--InteractiveShellApp.exec_lines={SOONER}"]
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources, extra_arguments=lines)
    client.execute(env=os.environ | {"PYTHONPATH": str(NOTEBOOKS.parent)})  # the kernel runs this source tree
    return notebook


STORIES = {name: [] for name in NAMES}


def story_of(name):
    """What is asserted of a notebook, as it is committed and as it runs now."""

    def add(check):
        STORIES[name].append(check)
        return check

    return add


def code_cells(notebook):
    return [c for c in notebook.cells if c.cell_type == "code"]


def text_of(cell):
    # One line may come in several messages: nothing is put between them.
    return "".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in cell.outputs)


def pictures_of(cells):
    """The pictures, each an output of its own: what every reader of a notebook draws."""
    return [o.data["image/png"] for c in cells for o in c.outputs if "image/png" in o.get("data", {})]


def headers_of(cells):
    """The sentences above pictures of programs."""
    shown = "".join(o.data.get("text/html", "") for c in cells for o in c.outputs if "data" in o)
    return re.findall(r"<p><b>(.+?)</b>", shown)


@story_of("00_tour")
def the_tour_runs_and_shows_its_story(tour):
    cells = code_cells(tour)
    assert len(cells) == 10
    everything = "\n".join(text_of(c) for c in cells)
    assert "gemm_epilogue: " in everything
    assert "dot_product_attention: 1 subgraph can be fused" in everything
    assert len(pictures_of(cells)) == 3  # the graph, times, the explorer
    widgets = [o for o in cells[-1].outputs if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert len(widgets) == 1


@story_of("01_gemm_epilogues")
def gemm_epilogues_runs_and_shows_its_story(gemm_epilogues):
    cells = code_cells(gemm_epilogues)
    everything = "\n".join(text_of(c) for c in cells)
    for said in (
        "gemm_epilogue: 3 subgraphs can be fused, 1 declined (escapes)",
        "gelu_tanh is not fused: %13:f32[512,1024] = add (In[1]:9) is also returned",
        "edit: let the activation be the only reader",
        "gemm_epilogue: 3 subgraphs can be fused, 0 declined",
        "mask bool[512, 1024], 0.50 MiB for dx, dw, dbias",
        "preactivation f32[512, 1024], 2.00 MiB for dx, dw, dbias",
        "{'gemm_epilogue': 3, 'gemm_epilogue_grad': 3}",
        "edited_model: same code",
        "of its tolerance: ",
        "gelu_tanh(x @ w + b): cublaslt, measured",
        "NVIDIA H200",
        "logged_model: gelu_tanh: 1 not fused, expected 0",
    ):
        assert said in everything, said
    assert len(pictures_of(cells)) == 3  # the graph, errors, what it was worth


@story_of("01_gemm_epilogues")
def the_table_of_gemm_epilogues_is_that_of_its_record(gemm_epilogues):
    path = max((NOTEBOOKS.parent / "benchmarks/results/h200").glob("gemm_epilogue_*.json"))
    record = json.loads(path.read_text(encoding="utf-8"))
    (table,) = [text_of(c) for c in code_cells(gemm_epilogues) if "plot_record(record)" in c.source]
    rows = re.findall(r"^(\w+ \d+x\d+x\d+) +(\d+) [uµ]s +(\d+) [uµ]s +([\d.]+)x", table, re.M)
    assert [name for name, *_ in rows] == list(record["mlp"])
    for name, before, after, ratio in rows:
        medians = [record["mlp"][name][key]["median_s"] for key in ("jax.jit", "fusionlab")]
        assert [f"{m * 1e6:.0f}" for m in medians] == [before, after]
        assert ratio == f"{medians[0] / medians[1]:.2f}"


@story_of("06_own_pass")
def own_pass_runs_and_shows_its_story(own_pass):
    cells = code_cells(own_pass)
    everything = "\n".join(text_of(c) for c in cells)
    for said in (
        "mish: 1 subgraph can be fused, 0 declined",
        "mish@#1: x * tanh(softplus(x)) (In[2]:3)",
        "[escapes] mish@#1",
        "edit: compute the outside use from x again",
        "times 2, where 1 is needed",
        "cuda: unavailable, it needs a CUDA device, this is a CPU (simulated)",
        "cuda: chosen, the first of the pass's own",
        "gated_model: call",
        "of its tolerance: ",
        "its value is nan for inputs as large as 10000",
        "its gradient of x is nan for inputs as large as 10000",
        "unit_rows(x, epsilon), epsilon = 1e-06",
    ):
        assert said in everything, said
    assert text_of(cells[-3]) == "{'mish': 1, 'mish_grad': 1}"
    assert len(pictures_of(cells)) == 3  # the graph, times, errors


@story_of("06_own_pass")
def a_pass_of_one_s_own_is_at_most_forty_lines(own_pass):
    (whole,) = [c.source for c in code_cells(own_pass) if "fl.register(own)" in c.source]
    assert sum(bool(line.strip()) for line in whole.splitlines()) == 20  # as its text says
    assert len(whole.splitlines()) <= 40


@story_of("02_attention")
def attention_runs_and_shows_its_story(attention):
    cells = code_cells(attention)
    everything = "\n".join(text_of(c) for c in cells)
    for said in (
        "softmax(0.125 * q @ k.T, mask) @ v",
        "softmax(0.125 * q @ k.T, causal) @ v",
        "{'dot_product_attention': 1, 'dot_product_attention_grad': 1}",
        "padded_model: call",
        "causal_model: call",
        "of its tolerance: ",
        "[escapes] dot_product_attention@#1",
        "in a call of their own",
        "xla_blockwise: chosen",
        "cudnn: chosen",
        "sm_75 is older than sm_80",
    ):
        assert said in everything, said
    assert len(pictures_of(cells)) == 4  # the graph, times, errors, memory


@story_of("02_attention")
def attention_s_numbers_hold(attention):
    (dropout,) = [text_of(c) for c in code_cells(attention) if "bernoulli" in c.source]
    same, other = map(float, re.findall(r"key: *([\d.e+-]+)", dropout))
    assert same < 1e-5 < 0.05 < other
    (memory,) = [text_of(c) for c in code_cells(attention) if "memory_analysis" in c.source]
    before, after = map(int, re.search(r"'jax.jit': (\d+), 'fl.fuse': (\d+)", memory).groups())
    assert after < before / 6


@story_of("03_gpt_layers")
def gpt_layers_runs_and_shows_its_story(gpt_layers):
    cells = code_cells(gpt_layers)
    everything = "\n".join(text_of(c) for c in cells)
    for said in (
        "multi_transformer_encoder: 3 subgraphs can be fused, 0 declined, nodes 342 -> 44",
        "mlp gelu_tanh, causal (gpt.py:",
        "98 nodes -> 1",
        "multi_transformer_decoder: 3 subgraphs can be fused, 0 declined, nodes 364 -> ",
        "for queries, keys and values, nothing is repacked",
        "[escapes] multi_transformer_encoder@#1",
        "= add (In[7]:3) is also returned",
        "multi_transformer_encoder: 1 subgraph can be fused, 0 declined, nodes 105 -> 1",
        "3 identical layers as one call",
        "of multi_transformer_decoder, which is larger",
        "composed: chosen, each of its pieces chooses for itself",
        "packed (3, 4, 8, 32) and back: True",
        "342 nodes: 2 fused, 1 can be fused, 0 declined; not measured",
        "342 nodes: 1 fused, 0 declined; not measured",
    ):
        assert said in everything, said
    assert len(set(pictures_of(cells))) == 4  # before, after, tokens a second, the explorer
    assert headers_of(cells)[:2] == ["prefill_model · 342 nodes", "prefill_model · 44 nodes"]
    widgets = [o for o in cells[-1].outputs if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert len(widgets) == 1


@story_of("03_gpt_layers")
def gpt_layers_generate_the_same_tokens(gpt_layers):
    (told,) = [text_of(c) for c in code_cells(gpt_layers) if "smallest_margin" in c.source]
    same = re.findall(r": (\d+) of (\d+) tokens are the same", told)
    assert same == [("512", "512")] * 4
    distinct = json.loads(re.search(r"distinct tokens of each: (.*)", told)[1])
    assert min(distinct) >= 50
    assert float(re.search(r"best two logits: ([\d.e-]+)", told)[1]) > 2e-4
    (shared,) = [text_of(c) for c in code_cells(gpt_layers) if "memory_analysis" in c.source]
    cache, alias = re.search(r"cache: (\d+) bytes, shared: (\d+)", shared).groups()
    assert cache == alias
    (speed,) = [text_of(c) for c in code_cells(gpt_layers) if "fl.compare" in c.source]
    assert len(re.findall(r"(?:before|after): [\d,]+ tokens a second", speed)) == 4


@story_of("04_lerp")
def lerp_runs_and_shows_its_story(lerp):
    cells = code_cells(lerp)
    everything = "\n".join(text_of(c) for c in cells)
    for said in (
        "lerp@#1: x + w * (y - x) (In[1]:10), 4 nodes -> 5",
        "is x * (1 - w) + y * w, which rounds differently from x + w * (y - x)",
        "edit: write x + w * (y - x), or allow it: passes=Strategy(lerp=dict(reassociate=True), ...)",
        "written as x * (1 - w) + y * w: the fused op rounds as x + w * (y - x) does",
        "{'lerp': 1, 'lerp_grad': 1}",
        "weighted_model: call",
        "of its tolerance: ",
        "cuda: possible, ",
    ):
        assert said in everything, said
    assert everything.count("[rounding] lerp@#1") == 2
    assert len(pictures_of(cells)) == 4  # the graph, bytes, times, errors


@story_of("04_lerp")
def lerp_s_numbers_hold(lerp):
    (kernels,) = [text_of(c) for c in code_cells(lerp) if "as_text" in c.source]
    count, reading = map(int, re.search(r"(\d+) kernels, of which (\d+) read the cotangent", kernels).groups())
    assert count >= reading >= 2
    (told,) = [text_of(c) for c in code_cells(lerp) if "cost_analysis" in c.source]
    found = re.findall(r"XLA ([\d.]+), plan ([\d.]+) \((.+)\)", told)
    assert len(found) == 5
    for xla, plan, launched in found:
        assert float(plan) < 1.2 < float(xla)
        assert launched in ("lerp_backward_flat", "lerp_backward, lerp_sum")


@story_of("05_matmul_routes")
def matmul_routes_runs_and_shows_its_story(matmul_routes):
    cells = code_cells(matmul_routes)
    everything = "\n".join(text_of(c) for c in cells)
    for said in (
        "6 products on a CUDA sm_90 device (simulated)",
        "evaluate gelu_tanh(a @ b)",
        "kernel: [nothing] without an activation",
        "sin before it",
        "library=True: {'evaluate': 6, 'kernel': 0, 'xla': 0}",
        "library=False: {'evaluate': 0, 'kernel': 0, 'xla': 6}",
        "prefer=None: two products, and the gate",
        "prefer='concatenated': silu(x @ w) * (x @ v) by concatenated",
        "prefer='kernel': silu(x @ w) * (x @ v) by cuda",
    ):
        assert said in everything, said
    assert len(pictures_of(cells)) == 3  # routes, devices, what they were worth
    faster = re.findall(r"([\d.]+) [uµ]s -> +([\d.]+) [uµ]s", text_of(cells[-1]))
    assert len(faster) >= 10
    assert sum(float(before) > 1.03 * float(after) for before, after in faster) >= 3


@story_of("07_tensor_parallel")
def tensor_parallel_runs_and_shows_its_story(tensor_parallel):
    cells = code_cells(tensor_parallel)
    everything = "\n".join(text_of(c) for c in cells)
    for said in (
        "multi_devices_multi_transformer_encoder: 2 subgraphs can be fused, 0 declined",
        "mlp gelu_tanh, causal, summed over tensor",
        *(f"{n} devices: multi_devices_multi_transformer_encoder 2 error below 1e-5: True" for n in (2, 4, 8)),
        "'gemm_epilogue': 12, 'gemm_epilogue_grad': 12, 'dot_product_attention': 2, 'dot_product_attention_grad': 2",
        "largest error of a gradient below 1e-4: True",
        "on 8 devices, mesh data=2 x tensor=4",
        "of its tolerance: ",
    ):
        assert said in everything, said
    sent = re.findall(
        r"collectives (?:of a|per) device, call: all-reduce (\d+) \((.+?)\) -> (\d+) \((.+?)\)", everything
    )
    assert sent == [("4", "65.5 kB", "4", "65.5 kB")] * 2
    assert len(pictures_of(cells)) == 1
    (header,) = headers_of(cells)
    assert header.endswith("· mesh data=2 x tensor=4")


@pytest.mark.notebook
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_shows_its_story(name):
    notebook = executed(name)
    for check in STORIES[name]:
        check(notebook)
    # What does not depend on the machine is as committed.
    compared = 0
    for old, new in zip(code_cells(committed(name)), code_cells(notebook), strict=True):
        assert old.outputs or "def " in old.source, old.source
        if "print(found)" in new.source:
            compared += 1
            assert text_of(old) == text_of(new), f"run: {AGAIN} notebooks/{name}.ipynb"
    assert compared


@pytest.mark.whole
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_committed_with_its_story(name):
    for check in STORIES[name]:
        check(committed(name))


def test_no_cell_defines_a_helper_or_reaches_outside():
    for name in NAMES:
        for cell in code_cells(committed(name)):
            # The last one's subject are functions of the user's own.
            helper = re.search(r"^\s*(def|class) (?!(\w+_)?model\b)", cell.source, re.M)
            assert not helper or name == "06_own_pass", name
            assert "http" not in cell.source


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebooks_are_small_and_name_no_folder_of_their_author(name):
    text = (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    assert not re.search(r"(/home/|/root/|/tmp/|/Users/|[A-Z]:\\\\)", text)
    metadata = json.loads(text)["metadata"]
    assert metadata["kernelspec"]["name"] == "python3"
    assert "widgets" not in metadata, f"run: {AGAIN} notebooks/{name}.ipynb"


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_notebook_keeps_its_pictures_as_a_page(name):
    """As nbviewer makes one."""
    from nbconvert import HTMLExporter

    notebook = committed(name)
    page, _ = HTMLExporter().from_notebook_node(notebook)
    pictures = pictures_of(code_cells(notebook))
    shown = re.findall(r'<img[^>]*src="data:image/png;base64,([^"]+)"', page)
    assert ["".join(p.split()) for p in shown] == ["".join(p.split()) for p in pictures] != []
    assert "widget-view" not in page
    drawn = [o.data for c in code_cells(notebook) for o in c.outputs if "data" in o]
    assert not any("<svg" in d.get("text/html", "") or "image/svg+xml" in d for d in drawn)
