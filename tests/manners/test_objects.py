"""What public functions return, found by machine: none prints as a raw dataclass, each is a table and a file; docs/objects.md lists all."""

import dataclasses
import json
import re

import pytest

from fusionlab.errors import ArgumentError
from fusionlab.showing import Facts, Records, Shown, Text, cell, counted, head
from tests.manners.objects import OTHERS, PAGE, public_classes, samples, suffixes_of


def prints_raw(cls: type) -> bool:
    """Whether `repr` is what `dataclasses` generates."""
    return dataclasses.is_dataclass(cls) and hasattr(cls.__repr__, "__wrapped__")


def test_the_walk_reaches_what_verbs_give_and_what_is_in_it():
    found = {cls.__name__ for cls in public_classes()}
    verbs = {
        "Findings",
        "Graph",
        "Comparison",
        "Bisection",
        "SiteErrors",
        "SiteShares",
        "Tuned",
        "Doctor",
        "SavedLab",
        "Explorer",
    }
    inside = {
        "Candidate",
        "Rejection",
        "Routes",
        "Costs",
        "CompiledModule",
        "Timing",
        "Numerics",
        "Ledger",
        "Toggles",
        "Setting",
    }
    beside = {
        "Roofline",
        "NodeTimes",
        "KernelTimes",
        "PartTimings",
        "RecordDiff",
        "Tolerance",
        "ResidentGrowth",
        "TransformerLayer",
    }
    assert found >= verbs | inside | beside
    assert len(found) > 70


def test_none_prints_as_a_raw_dataclass_and_all_share_one_mechanism():
    found = public_classes()
    assert [cls.__name__ for cls in found if prints_raw(cls)] == []
    others = {cls.__name__ for cls in found if not issubclass(cls, Shown)}
    assert others <= set(OTHERS), (
        "derive it from fusionlab.showing.Shown, and write docs/objects.md anew: python -m tests.manners.objects"
    )


def test_the_check_knows_a_raw_dataclass():
    @dataclasses.dataclass
    class Raw:
        number: int

    assert prints_raw(Raw)
    assert not prints_raw(dataclasses.dataclass(repr=False)(type("Said", (Shown,), {"__annotations__": {}})))


def test_the_page_lists_every_class_with_the_way_to_it():
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    ways = {}
    for cls, way in public_classes().items():
        ways.setdefault(cls.__name__, way)
    assert dict(rows) == ways, "write it anew: python -m tests.manners.objects"


# What Python writes of a record or of an object without a `repr` of its own.
RAW = re.compile(r"(?<!fl\.)\b[A-Z]\w+\(\w+=|<[\w.]+ object at 0x")


@pytest.mark.parametrize("part", ["whole page"])
def test_every_object_is_a_sentence_a_table_and_files(part, tmp_path):
    values = samples(tmp_path)
    assert set(values) == set(public_classes()), "give a sample of it in tests/manners/objects.py"
    page = PAGE.read_text(encoding="utf-8")
    for cls, value in values.items():
        if cls.__name__ not in ("Strategy", "Setting", "Decision"):  # a Strategy is written as it is made
            assert not RAW.search(f"{value}\n{value!r}"), f"{value!r}"
        if not isinstance(value, Shown):
            continue
        html = value._repr_html_()
        assert re.search("<table|<svg|<pre|<h3", html) or "none" in html or not value._table().rows, cls
        pictures = (".svg", ".html") if cls.__name__ in ("Comparison", "Findings", "Graph") else ()
        for suffix in suffixes_of(value).split(", "):
            if suffix in (".csv", ".json", ".txt", *pictures):
                path = value.save(tmp_path / f"{cls.__name__}{suffix}")
                assert path.stat().st_size, path
                if suffix == ".json":
                    json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
        assert f"| `{cls.__name__}` |" in page
        assert suffixes_of(value) in page


def test_a_wrong_suffix_is_one_error_that_names_those_there_are(tmp_path):
    with pytest.raises(ArgumentError) as caught:
        Facts(a=1).save(tmp_path / "x.jsn")
    text = "needed one of .csv, .html, .json, .txt. Did you mean '.json'?"
    assert str(caught.value) == f"path: got the suffix '.jsn' in {str(tmp_path / 'x.jsn')!r}, {text}"
    with pytest.raises(ArgumentError, match=r"needed one of [^?]*\.txt$"):
        Facts(a=1).save(tmp_path / "x.xml")  # another kind of file, no slip for ".html"
    with pytest.raises(ArgumentError, match="got 3, needed the name of a file"):
        Facts(a=1).save(3)
    assert list(tmp_path.iterdir()) == []


@dataclasses.dataclass(frozen=True, repr=False)
class Sample(Shown):
    """A record of this test."""

    site: str
    saved_s: float
    parts: tuple[float, ...] = ()


def test_what_is_saved_is_what_was_shown(tmp_path):
    several = Records((Sample("a|<b>", 0.1234567, (1.0, float("nan"))), Sample("c", 2.0)))
    assert several[:1] == (several[0],)
    assert isinstance(several[:1], Records)
    assert (
        repr(several)
        == str(several)
        == "2 samples\n  sample: site a|<b>; saved (s) 0.1235; parts 1, nan\n  sample: site c; saved (s) 2"
    )
    assert several.save(tmp_path / "x.csv").read_text() == 'site,saved (s),parts\na|<b>,0.1234567,"1, nan"\nc,2.0,\n'
    data = json.loads(several.save(tmp_path / "x.json").read_text())
    assert data == {
        "records": [
            {"site": "a|<b>", "saved_s": 0.1234567, "parts": [1.0, "nan"]},
            {"site": "c", "saved_s": 2.0, "parts": []},
        ]
    }
    page = several.save(tmp_path / "x.html").read_text()
    assert "<td>a|&lt;b&gt;</td>" in page
    assert several.save(tmp_path / "x.txt").read_text() == f"{several}\n"
    assert repr(Records()) == "none"


def test_a_long_table_is_cut_in_a_notebook_and_whole_in_a_file(tmp_path):
    many = Records(Sample(str(i), 1.0) for i in range(250))
    assert many._repr_html_().count("<tr>") == 101
    assert "150 more" in many._repr_html_()
    assert many.save(tmp_path / "x.csv").read_text().count("\n") == 251


def test_texts_numbers_and_names_are_what_they_were():
    text = Text("one\n<two>")
    assert text == repr(text) == "one\n<two>"
    assert json.dumps(text) == '"one\\n<two>"'
    assert text._repr_html_() == "<pre>one\n&lt;two&gt;</pre>"
    counts = Facts({"lerp": 2})
    assert counts == {"lerp": 2}
    assert (repr(counts), str(counts)) == ("{'lerp': 2}", "lerp 2")
    assert [cell(v) for v in (None, True, 0.5)] == ["", "yes", "0.5"]
    assert cell("x" * 300) == "x" * 200 + "..."
    assert cell(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert [head(n) for n in ("saved_s", "max_abs", "s")] == ["saved (s)", "max abs", "s"]


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (1, "site", "1 site"),
        (0, "site", "0 sites"),
        (2, "launch", "2 launches"),
        (1.0, "launch", "1 launch"),
        (1.5, "launch", "1.5 launches"),
    ],
)
def test_a_number_of_things_is_said_as_the_number_wants_it(number, noun, said):
    assert counted(number, noun) == said
