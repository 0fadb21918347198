"""What a cell shows: outputs that every reader of a notebook draws, whatever it leaves out."""

import base64
import dataclasses
import io
import sys

import jax
import jax.numpy as jnp
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display
from IPython.utils.capture import capture_output
from PIL import Image
from traitlets.config import Config

import fusionlab as fl
from fusionlab.viz import notebook
from fusionlab.viz.convert import size_of

WIDGET = "application/vnd.jupyter.widget-view+json"
W, B, X = jnp.ones((16, 8)), jnp.ones(8), jnp.ones((4, 16))


def model(x):
    h = x @ W + B
    return jax.nn.relu(h), h  # the relu is declined: what it reads is returned


@pytest.fixture(scope="module")
def shell():
    """IPython as a kernel has it, without a kernel."""
    config = Config()
    config.HistoryManager.enabled = False
    yield InteractiveShell.instance(config=config)
    InteractiveShell.clear_instance()


@pytest.fixture
def shown(shell, monkeypatch):
    """`shown(value)`: what a cell that ends with this value has below it."""
    monkeypatch.delenv("VSCODE_PID", raising=False)

    def outputs(value):
        with capture_output() as captured:
            display(value)
        assert captured.stdout == captured.stderr == ""
        return captured.outputs

    return outputs


@pytest.fixture(scope="module")
def found():
    return fl.find(model, X)


@pytest.fixture(scope="module")
def lab():
    return fl.explore(model, X)


def kinds(outputs):
    return [set(o.data) - {"text/plain"} for o in outputs]


def image(output):
    return Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))


def plain(html):
    """Whether cleaners leave this HTML whole."""
    return not any(tag in html for tag in ("<svg", "<script", "<style", "<img", "<iframe", "data:"))


def test_findings_are_a_sentence_a_picture_and_what_was_declined(shown, found):
    outputs = shown(found)
    assert kinds(outputs) == [{"text/html"}, {"image/png"}, {"text/html"}]
    sentence, picture, declined = outputs
    assert plain(sentence.data["text/html"])
    assert "1 declined" in sentence.data["text/html"]
    assert sentence.data["text/plain"] == repr(found)
    drawn = image(picture)
    assert picture.metadata["image/png"] == {"width": drawn.width // 2}
    assert drawn.height > 400
    assert plain(declined.data["text/html"])
    for said in (found.rejections[0].id, found.rejections[0].sentence, found.rejections[0].edit):
        assert said in declined.data["text/html"]


def test_a_graph_is_a_sentence_and_a_picture(shown, found):
    assert kinds(shown(found.graph)) == [{"text/html"}, {"image/png"}]
    assert kinds(shown(found.apply())) == [{"text/html"}, {"image/png"}]


def test_what_was_declined_alike_is_one_row_and_no_edit_is_no_word(shown):
    found = fl.find(lambda x: [jax.nn.leaky_relu(x @ W + B) for _ in range(3)], X)
    html = shown(found)[2].data["text/html"]
    assert len(found.rejections) == 3
    assert html.count("<tr>") == 2  # the heads, and one for all
    assert "and 2 more like it" in html
    without = fl.find(lambda x: jax.nn.relu(x @ W + 1.0), X)
    assert without.rejections[0].edit is None
    assert "None" not in shown(without)[2].data["text/html"]


def test_every_pass_of_the_catalogue_is_a_text_and_a_picture(shown):
    passes = dataclasses.replace(fl.passes(), passes=fl.passes().passes[:2])
    outputs = shown(passes)
    assert kinds(outputs) == [{"text/html"}, {"image/png"}] * 2
    for one, text, picture in zip(passes, outputs[::2], outputs[1::2], strict=True):
        assert plain(text.data["text/html"])
        assert f"<h3>{one.name}</h3>" in text.data["text/html"]
        assert image(picture).width > 1.8 * image(picture).height  # as written and fused, beside each other


def test_a_comparison_is_tables_that_need_no_style(shown):
    fused = fl.fuse(model)
    result = fl.compare(model, fused, X, grad=False, samples=2, budget_s=0.1)
    (output,) = shown(result)
    assert kinds([output]) == [{"text/html"}]
    assert plain(output.data["text/html"])
    assert "<table>" in output.data["text/html"]
    assert '<td style="text-align:left;' in output.data["text/html"]
    assert '<td style="white-space:nowrap;text-align:right;' in output.data["text/html"]
    assert "<td>" not in output.data["text/html"]


def test_an_explorer_is_followed_by_a_still_picture_of_itself(shown, lab):
    outputs = shown(lab)
    assert kinds(outputs) == [{WIDGET}, {"text/html"}, {"image/png"}]
    live, note, picture = outputs
    assert live.data["text/plain"] == repr(lab)
    assert live.data[WIDGET]["model_id"] == lab.model_id
    assert 'class="fl-still"' in note.data["text/html"]
    assert lab.head["sentence"] in note.data["text/html"]
    assert plain(note.data["text/html"].partition("<style>")[0] + note.data["text/html"].partition("</style>")[2])
    before = image(picture)
    lab.toggles["gemm_epilogue"] = not lab.toggles["gemm_epilogue"]
    after = image(shown(lab)[2])
    lab.undo()
    assert before.tobytes() != after.tobytes()  # of what is on now


def test_where_each_output_has_a_frame_of_its_own_the_explorer_is_one(shown, shell, lab, monkeypatch):
    def vs_code(patch):
        patch.setenv("VSCODE_PID", "1")

    def vs_code_on_a_remote_machine(patch):
        patch.setitem(shell.user_ns, "__vsc_ipynb_file__", "/home/me/model.ipynb")

    def colab(patch):
        patch.setitem(sys.modules, "google.colab", sys)

    for where in (vs_code, vs_code_on_a_remote_machine, colab):
        with monkeypatch.context() as patch:
            where(patch)
            assert kinds(shown(lab)) == [{WIDGET, "image/png"}], where


def test_in_a_terminal_everything_is_its_text(shown, shell, found, monkeypatch):
    monkeypatch.setattr(shell.display_formatter, "active_types", ["text/plain"])
    for value in (found, found.graph, fl.passes()):
        (output,) = shown(value)
        assert set(output.data) == {"text/plain"}


def test_a_picture_is_sharp_where_it_is_small_and_no_larger_than_a_screen():
    def of_size(width, height):
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"><rect width="9" height="9"/></svg>'
        png, shown = notebook.png_of(svg)
        assert shown == {"width": width}
        return Image.open(io.BytesIO(png)).size

    assert of_size(300, 200) == (600, 400)
    width, height = of_size(3000, 9000)
    assert 3.9e6 < width * height < 4.1e6


def test_pictures_beside_each_other_are_as_wide_as_both():
    small = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="10"></svg>'
    large = '<svg xmlns="http://www.w3.org/2000/svg" width="30" height="50"></svg>'
    assert size_of(notebook.beside(small, large, gap=4)) == (54, 50)
