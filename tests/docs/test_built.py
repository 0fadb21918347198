"""The checks of the built site, on pages written here; `bash .ci/run docs` runs them on the site."""

import pytest

from tests.docs.built import IN_SCRIPTS, IN_STYLES, LONGEST, Page, broken_links, faults_of

HEAD = "<title>A page</title>"


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example/require.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        '<img src="http://example/x.png" alt="x">',
        "<style>@import 'https://fonts.example/css';</style>",
        '<p style="background: url(https://example/x.png)">x</p>',
        '<script>import("https://cdn.example/x.js")</script>',
    ],
)
@pytest.mark.whole
def test_a_page_that_loads_from_the_network_is_found(html):
    (fault,) = faults_of("index.html", HEAD + html)
    assert "loads " in fault


def test_links_to_read_and_data_are_no_network():
    html = '<a href="https://arxiv.org/abs/1607.06450">x</a><img src="data:image/png;base64,AA" alt="x"><script src="a.js"></script>'
    assert list(faults_of("index.html", HEAD + html)) == []


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ("<p>Error: model not found</p>", "model not found"),
        (f"<p>{'x ' * LONGEST}</p>", "a paragraph of"),
        ('<img src="a.png">', "a picture without"),
        ("<p>nothing</p>", "no picture"),
    ],
)
@pytest.mark.whole
def test_a_notebook_page_without_its_pictures_is_found(html, fault):
    html = html if "img" in html or fault == "no picture" else html + '<img src="a.png" alt="a">'
    (found,) = faults_of("generated/notebooks/00_tour.html", HEAD + html)
    assert fault in found


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").touch()
    pages = {"a.html": Page('<a href="#x">x</a><a href="b.html">b</a><a href="a.html#y">y</a><h1 id="y">y</h1>')}
    assert [fault.partition("link to ")[2] for fault in broken_links(pages, tmp_path)] == [
        "#x, where no such anchor is",
        "b.html, which does not exist",
    ]


def test_styles_and_scripts_of_others_are_found():
    assert IN_STYLES.findall('src: url("https://fonts.example/a.woff2")') == ["https://fonts.example/a.woff2"]
    assert IN_STYLES.findall("background: url(data:image/svg+xml;charset=utf-8,x)") == []
    assert IN_SCRIPTS.findall("s.src = 'https://cdn.example/x.js'") == ["https://cdn.example/x.js"]
