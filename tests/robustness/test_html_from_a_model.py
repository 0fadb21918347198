"""Pages and pictures of a model whose every name is an attack: no element and no attribute of them is the model's."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from jax import numpy as jnp

import fusionlab as fl
from fusionlab.device import Device
from fusionlab.evidence.comparison import Evidence
from fusionlab.viz.explorer.files import save
from fusionlab.viz.explorer.widget import Explorer
from fusionlab.viz.export import to_dot, to_svg
from fusionlab.viz.html.inspector import inspect
from fusionlab.viz.html.report import evidence_html, evidence_summary_html, graph_html, report_html
from fusionlab.viz.html.tabs import evidence_tabs

EVIL = (
    "</script><script>alert(1)</script>"
    "</title></style><img src=x onerror=alert(2)>"
    "\" onmouseover=alert(3) x=\"' onfocus=alert(4) '"
    "]]><!-- &lt;b&gt; --> <b>$\\frac{</b>${x} \u2028\u2029\x00\x1b {{7*7}} \\N \\l %s"
)
SHORT = '"><script>a</script>\u2028$_{<b>'  # what survives where labels are cut
KNOWN_RATES = dataclasses.replace(Device.of("sm_90"), copy_bytes_per_s=4e12, gemm_flop_per_s=8e14)

MODEL = """
import jax
def layer(params, x):
    with jax.named_scope(SCOPE):
        return {KEY: jax.nn.relu(x @ params[KEY] + params["b"])}  # </script><script>alert("line")</script>
"""


def program(folder, evil):
    """A function whose name, file, source line, scopes, arguments and results are named so."""
    folder.mkdir()
    name = "<img src=x onerror=alert(5)>\u2028" if evil else "model"
    file = folder / f"{name}.py"
    file.write_text(MODEL if evil else MODEL.partition("  #")[0] + "\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("a_model", file)
    module = importlib.util.module_from_spec(spec)
    module.SCOPE, module.KEY = (SHORT.replace("/", ""), EVIL) if evil else ("scope", "key")
    spec.loader.exec_module(module)
    module.layer.__name__ = module.layer.__qualname__ = SHORT if evil else "layer"
    return module.layer, ({module.KEY: jnp.ones((16, 4)), "b": jnp.ones(4)}, jnp.ones((8, 16)))


def told(found, evil):
    """The findings with sentences of the model's beside its own names."""
    text = EVIL if evil else "text"
    candidates = tuple(
        dataclasses.replace(
            c,
            formula=text,
            notes=(text,),
            backends=tuple(dataclasses.replace(b, reason=text) for b in c.backends),
        )
        for c in found.candidates
    )
    return dataclasses.replace(found, candidates=candidates, notes=(text,))


def measured(evidence, evil):
    """As a record says, which anybody may have written."""
    data = json.loads(evidence.to_json())
    text = EVIL if evil else "text"
    data["name"], data["notes"] = text, [text]
    data["environment"] |= {
        "hardware": text,
        "commit": text,
        "driver": text,
        "xla_flags": text,
        "versions": {text: text},
    }
    for timing in (data["timing"], data["timing_grad"]):
        timing |= dict.fromkeys(("what", "hardware", "stopped"), SHORT if evil else "text")  # titles of plots
    for leaf in data["numerics"]["leaves"]:
        leaf |= {"name": text, "dtype": text}
    data["numerics"]["notes"] = [text]
    return Evidence.from_dict(data)


@dataclasses.dataclass
class Case:
    found: object
    evidence: Evidence
    evil: bool


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made = []
    for evil in (False, True):
        fn, args = program(tmp_path_factory.mktemp("models") / "folder", evil)
        found = fl.find(fn, *args, passes="gemm_epilogue")
        evidence = fl.compare(fn, lambda *a, fn=fn: fn(*a), *args, samples=4, budget_s=5.0)
        made.append(Case(told(found, evil), measured(evidence, evil), evil))
    return made


class Page(HTMLParser):
    """What a browser makes of a page: elements, attributes, and the text of scripts."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.attributes, self.scripts, self._inside = set(), set(), [], ""
        self.texts = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self._inside = tag
        self.elements.add(tag)
        self.attributes |= {(tag, name) for name, _ in attrs}
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "src", "xlink:href", "action"):
                assert not re.match(r"\s*(javascript|data|https?):", value or ""), (tag, name, value)
            if name in ("style", "class", "id", "for", "type"):
                assert not re.search(r"[<>\"]|alert\(|expression\(|javascript:", value or ""), (tag, name, value)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        else:
            self.texts.append(data)


PAGES = {
    "report": lambda c: report_html(
        c.found.graph,
        c.found,
        enabled=None,
        evidence=c.evidence,
        after=c.found.apply(),
        environment={EVIL if c.evil else "k": EVIL if c.evil else "v"},
        formulas={"gemm_epilogue": EVIL if c.evil else "f"},
        title=EVIL if c.evil else "title",
    ),
    "report of declined": lambda c: report_html(c.found.graph, declined(c)),
    "graph": lambda c: graph_html(c.found.graph, c.found),
    "graph alone": lambda c: graph_html(c.found.graph),
    "evidence": lambda c: evidence_html(c.evidence, title=EVIL if c.evil else "title"),
    "evidence in short": lambda c: evidence_summary_html(c.evidence),
    "widget": lambda c: widget(c),
    "findings": lambda c: c.found._repr_html_(),
    "inspector": lambda c: inspected(c, c.found),
    "inspector of declined": lambda c: inspected(c, declined(c)),
    "tabs": lambda c: "".join(
        tab["html"]
        for tab in evidence_tabs(c.evidence, c.found, enabled=None, after=c.found.apply(), device=KNOWN_RATES)
    ),
    "tabs of a program alone": lambda c: "".join(tab["html"] for tab in evidence_tabs(None, declined(c))),
}


def inspected(c, found):
    """All that the inspector can be asked."""
    names = [x.id for x in (*found.candidates, *found.rejections)]
    names += [f"n{n.id}" for n in found.graph.nodes()] + [v.name for v in found.graph.top.inputs]
    names += [k.name for k in found.xla().kernels] + [n.source.short for n in found.graph.nodes() if n.source]
    group = [n.id for n in found.graph.nodes()]
    return "".join(inspect(found.graph, found, what, compiled=found.xla()).html for what in (*names, group))


def declined(c):
    from tests.viz.conftest import rejection

    text = EVIL if c.evil else "text"
    one = rejection("gemm_epilogue@a#1", list(c.found.graph.nodes())[:2], sentence=text, edit=text, winner=text)
    other = dataclasses.replace(one, id=f"gemm_epilogue@{SHORT if c.evil else 'b'}#2", code="structure")
    return dataclasses.replace(c.found, candidates=(), rejections=(one, other))


def widget(c):
    """All that the widget shows, whatever is selected and however a measurement ended."""

    def measure(*_):
        raise ValueError(EVIL if c.evil else "text")

    lab = Explorer(c.found.graph, c.found, measure=measure, formulas={"gemm_epilogue": EVIL if c.evil else "f"})
    lab.start().join()
    lab.session.measured[lab.setting] = c.evidence
    shown = []
    for what in [*(x.id for x in c.found.candidates), *(f"n{n.id}" for n in c.found.graph.nodes())]:
        lab.select(what)
        shown.append(lab.inspector["html"])
    lab._message(lab, {"type": "pick", "name": EVIL if c.evil else "nothing of that name"}, [])
    return "".join([*shown, *(t["html"] for t in lab.tabs), lab.scene["svg"]])


@pytest.mark.dear
@pytest.mark.parametrize("make", PAGES.values(), ids=PAGES)
def test_a_page_has_the_elements_attributes_and_scripts_of_a_harmless_models(cases, make):
    plain, evil = (Page(make(c)) for c in cases)
    assert evil.elements <= plain.elements, evil.elements - plain.elements
    assert evil.attributes <= plain.attributes, evil.attributes - plain.attributes
    assert len(evil.scripts) == len(plain.scripts)
    assert any("alert(" in text or "<script>a" in text for text in evil.texts)  # the attack was there


def test_the_data_in_a_page_is_json_that_no_reader_takes_for_anything_else(cases):
    text = PAGES["report"](cases[1])
    data, script = Page(text).scripts
    assert json.loads(data)
    assert script == Page(PAGES["report"](cases[0])).scripts[1]
    assert not set(data) & set("<\u2028\u2029")
    assert "alert(" in data


def test_a_picture_is_xml_with_the_elements_of_a_harmless_models(cases):
    kinds = []
    for c in cases:
        root = ElementTree.fromstring(to_svg(c.found.graph, c.found, show="all"))
        kinds.append({(e.tag, *sorted(e.attrib)) for e in root.iter()})
    assert kinds[1] <= kinds[0], kinds[1] - kinds[0]


def test_dot_text_has_no_more_statements_than_a_harmless_models(cases):
    plain, evil = (to_dot(c.found.graph, c.found, show="all") for c in cases)
    named = plain.replace("digraph layer {", 'digraph "" {')
    bare = [re.sub(r'"(?:[^"\\]|\\.)*"|forward_\w+', '""', text) for text in (named, evil)]
    assert bare[0] == bare[1]
    assert not [c for c in evil if not c.isprintable() and c not in "\n\t"]


@pytest.mark.parametrize("suffix", [".html", ".svg", ".json", ".txt", ".dot"])
def test_every_export_can_be_written(cases, suffix, tmp_path):
    c = cases[1]
    assert save(c.found.graph, tmp_path / f"graph{suffix}", c.found).stat().st_size > 100


@pytest.mark.dear
def test_the_failure_page_of_the_test_plugin(pytester, monkeypatch):
    """`report_html` again, by way of what a user's test writes."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # no other plugin's imports
    (pytester.path / "test_it.py").write_text(
        "import jax, jax.numpy as jnp\n"
        f"EVIL = {EVIL!r}\n"
        "def layer(p, x):\n"
        f"    with jax.named_scope({SHORT.replace('/', '')!r}):\n"
        "        return {EVIL: jnp.tanh(x @ p[EVIL])}  # </script><script>alert(6)</script>\n"
        f"layer.__name__ = {SHORT!r}\n"
        "def test_it(fusionlab):\n"
        "    fusionlab.assert_fused(layer, ({EVIL: jnp.ones((8, 4))}, jnp.ones((2, 8))), expect={'gemm_epilogue': 7})\n",
        encoding="utf-8",
    )
    options = ("-p", "fusionlab_pytest", "--fusionlab-report", "pages")
    pytester.runpytest_subprocess(*options).assert_outcomes(failed=1)
    pages = list(pytester.path.rglob("*.html"))
    assert pages
    for page in pages:
        found = Page(page.read_text(encoding="utf-8"))
        assert not found.elements & {"img", "iframe", "object", "embed", "link"}
        assert len(found.scripts) == 2
        assert any("alert(" in text for text in found.texts)
