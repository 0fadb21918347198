from tests.browser.notebooks import open_in_lab, open_in_notebook7, write_notebook

MODEL = """
import functools
import jax
import fusionlab as fl
from fusionlab.models import transformer
params = transformer.init(jax.random.key(0), layers=2, embed=32, ffn=64)
x = transformer.inputs(jax.random.key(1), seq=64, embed=32)
model = functools.partial(transformer.encoder, heads=2)
""".strip()
import pytest

@pytest.mark.parametrize("opener", [open_in_lab, open_in_notebook7])
def test_flow(page, jupyter, problems, artifacts, opener):
    path = write_notebook(jupyter.folder / f"{opener.__name__}.ipynb", [MODEL, "lab = fl.explore(model, params, x)\nlab", "print(fl.__file__, len(lab.enabled))"])
    book = opener(page, jupyter, path)
    book.run_all()
    print(book.output(2))
    pane = page.locator(".fl-pane svg")
    pane.wait_for()
    before = pane.inner_html()
    box = page.locator(".widget-checkbox", has_text="layer_0/mlp#1").locator("input")
    box.uncheck()
    page.wait_for_function("b => document.querySelector('.fl-pane svg').innerHTML !== b", arg=before)
    assert "17" in book.add_and_run("print(len(lab.enabled))")
    page.screenshot(path=artifacts / f"{opener.__name__}.png")
    nb = book.saved()
    assert any("text/html" in o.get("data", {}) for c in nb.cells for o in c.get("outputs", []))
    print(problems)
    assert not problems
