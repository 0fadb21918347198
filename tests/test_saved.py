"""An explorer's state as a file and as a program: both bring it back, and a file can only ever be data."""

import dataclasses
import inspect
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError, OutputError, UnknownNameError
from fusionlab.evidence import Runs
from fusionlab.evidence.attribution import SiteShare, SiteShares
from fusionlab.evidence.bisection import Bisection, Cause, Trial
from fusionlab.verbs.saved import SavedLab
from fusionlab.viz.explorer.state_file import FORMAT

RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RNG.normal(size=shape) * 0.3, jnp.float32)


def network(params, x, *, scale):
    for w, b in params:
        x = jax.nn.relu(x @ w + b)
    return x * scale


PARAMS = [(array(16, 16), array(16)), (array(16, 8), array(8))]
X, SCALE = array(4, 16), array(8)


def explorer(**options):
    return fl.explore(network, PARAMS, X, scale=SCALE, budget_s=0.2, **options)


@pytest.fixture(scope="module")
def lab():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusionlab.viz.html.tabs._figures", lambda evidence: {})  # no plots: no file has any
        lab = explorer()
        first = min(lab.enabled)
        lab.toggles[first] = False
        lab.option("lerp", "reassociate", True)
        lab.measure()
        yield lab


@pytest.fixture
def file(lab, tmp_path):
    return lab.save(tmp_path / "x.json")


def changed(file, **parts):
    data = json.loads(file.read_text()) | parts
    file.write_text(json.dumps(data))
    return file


# The file ----------------------------------------------------------------------------------------------------------------------


def test_what_was_saved_comes_back_whole(lab, file):
    saved = fl.load(file)
    assert isinstance(saved, SavedLab)
    assert saved.setting == lab.setting
    again = saved.explore(network, PARAMS, X, scale=SCALE)
    assert again.setting == lab.setting
    assert dict(again.toggles) == dict(lab.toggles)
    assert [d.what for d in again.ledger] == [*(d.what for d in lab.ledger), "loaded"]
    assert again.evidence.to_dict() == lab.evidence.to_dict()
    assert again.problem is None
    assert "1 site on" in repr(saved)


def test_a_saved_state_fuses_without_a_widget(lab, file):
    fused = fl.load(file).fuse(network)
    _, on = fused.selected(PARAMS, X, scale=SCALE)
    assert {c.id for c in on} == lab.enabled
    np.testing.assert_allclose(fused(PARAMS, X, scale=SCALE), network(PARAMS, X, scale=SCALE), rtol=1e-5, atol=1e-6)


def test_a_changed_program_keeps_what_is_still_there_and_says_so(lab, file):
    gone, kept = sorted(explorer().enabled)[1], sorted(explorer().enabled)[0]
    state = json.loads(file.read_text())
    changed(file, setting=state["setting"] | {"enabled": [gone, kept]})
    again = fl.load(file).explore(network, PARAMS[:1], X, scale=array(16))
    assert again.enabled == {kept}
    assert again.evidence is None
    assert again.problem["code"] == "changed_program"
    assert f"1 of 2 sites are not in it: {gone}" in again.problem["sentence"]
    assert "another program" in again.problem["sentence"]


def test_a_comparison_is_read_by_the_same_verb(lab, tmp_path):
    path = lab.evidence.save(tmp_path / "evidence.json")
    read = fl.load(path)
    assert isinstance(read, fl.Comparison)
    assert read.to_dict() == lab.evidence.to_dict()


def deep(levels):
    return "[" * levels + "]" * levels


HOSTILE = {
    "no JSON": "__import__('os').system('true')",
    "a pickle": "\x80\x04cposix\nsystem\n",
    "another format": json.dumps({"format": "other"}),
    "a list": "[]",
    "nested": deep(100_000),
    "a number of many digits": "9" * 10_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_is_something_else_is_refused(text, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"x\.json"):
        fl.load(path)
    with pytest.raises(
        ArgumentError, match=r"there is no file '.*missing\.json'; needed a \.json file that save\(\) wrote"
    ):
        fl.load(tmp_path / "missing.json")


PARTS = {
    "version": [{"version": 2}, {"version": None}],
    "keys": [{"extra": 1}],
    "setting": [
        {"setting": None},
        {"setting": {"enabled": "all", "strategy": None}},
        {"setting": {"enabled": [], "strategy": []}},
    ],
    "strategy": [{"setting": {"enabled": [], "strategy": {"lerp": "rm -rf"}}}],
    "decisions": [{"decisions": {}}, {"decisions": [1]}, {"decisions": [{"what": 1, "setting": {}}]}],
    "measured": [{"measured": [{}]}, {"measured": {}}],
    "function": [{"function": 3}, {"device": []}],
}


@pytest.mark.parametrize("part", [p for parts in PARTS.values() for p in parts], ids=str)
def test_a_damaged_state_is_refused_with_one_sentence(file, part):
    with pytest.raises(ArgumentError, match=r"x\.json"):
        fl.load(changed(file, **part))


@pytest.mark.parametrize("key", ["name", "timing", "numerics", "environment", "notes"])
def test_a_damaged_measurement_is_refused(file, key):
    data = json.loads(file.read_text())
    (measured,) = data["measured"]
    for broken in (None, 7, {"a": 1}):
        if broken is None and key in ("timing", "numerics"):
            continue  # a part that was not measured
        record = measured["evidence"] | {key: broken}
        if key == "name":
            record.pop("name")
        changed(file, measured=[measured | {"evidence": record}])
        with pytest.raises(ArgumentError):
            fl.load(file)


def test_a_pass_that_does_not_exist_is_an_error_when_opened(file):
    saved = fl.load(changed(file, setting={"enabled": [], "strategy": {"nonsense": True}}))
    with pytest.raises(UnknownNameError, match="nonsense"):
        saved.explore(network, PARAMS, X, scale=SCALE)


def test_markup_in_a_file_is_text_in_the_page(lab, file):
    evil = "</script><img src=x onerror=alert(1)>"
    data = json.loads(file.read_text())
    data["decisions"][0]["what"] = evil
    saved = fl.load(changed(file, decisions=data["decisions"], function=evil))
    again = saved.explore(network, PARAMS, X, scale=SCALE)
    shown = next(t["html"] for t in again.tabs if t["name"] == "Ledger")
    assert "<img" not in shown
    assert "&lt;img" in shown


def test_nothing_half_written_is_left(lab, tmp_path):
    with pytest.raises(OutputError):
        lab.save(tmp_path / "missing" / "x.json")
    assert not list(tmp_path.iterdir())
    assert json.loads(lab.save(tmp_path / "x.json").read_text())["format"] == FORMAT


# The program -------------------------------------------------------------------------------------------------------------------


def run(text, **names):
    namespace = dict(names)
    exec(compile(text, "code", "exec"), namespace)
    return namespace


def test_the_code_reproduces_the_state(lab, monkeypatch):
    monkeypatch.setattr(fl, "compare", partial(fl.compare, samples=4))  # how long it takes is no part of the state
    done = run(lab.code(), args=(PARAMS, X), scale=SCALE, network=network)
    _, on = done["fused"].selected(PARAMS, X, scale=SCALE)
    assert {c.id for c in on} == lab.enabled
    assert done["strategy"] == lab.setting.strategy
    assert done["result"].numerics.leaves


def test_the_code_follows_the_toggles_and_names_what_it_cannot_import():
    lab = fl.explore(lambda x, w: jax.nn.relu(x @ w), X, array(16, 4), implementation="xla")
    text = lab.code()
    assert "strategy" not in text
    assert "# fn: the function that was explored" in text
    assert "implementation='xla'" in text
    (site,) = lab.enabled
    assert site in text
    lab.toggles[site] = False
    assert site not in lab.code()
    assert next(t["html"] for t in lab.tabs if t["name"] == "Code").count("sites = []") == 1


def test_errors_of_explore_name_the_argument():
    with pytest.raises(ArgumentError, match="budget_s: got 0"):
        fl.explore(network, PARAMS, X, scale=SCALE, budget_s=0)
    with pytest.raises(ArgumentError, match="measure: got 'yes'"):
        fl.explore(network, PARAMS, X, scale=SCALE, measure="yes")
    with pytest.raises(ArgumentError, match="path: got 3"):
        fl.load(3)


def test_what_each_site_saves_and_which_is_to_blame_come_back(lab, file):
    run = Runs("fused", (1e-3, 1.1e-3), 1, 0.1, 0.1, 0.1)
    site = next(iter(lab.enabled))
    shares = SiteShares((SiteShare(site, run, 1e-4, (1.0, 1.2)),), run, run, "a card", ("lerp@#1",))
    cause = Cause((site,), "call: 2.0 ms -> 3.0 ms")
    found = Bisection("network", "time", (site,), (cause,), (Trial((site,), True, "slower"),), "cancelled")
    state = json.loads(file.read_text())
    (measured,) = state["measured"]
    told = {"shares": dataclasses.asdict(shares), "blamed": {"time": dataclasses.asdict(found)}}
    again = fl.load(changed(file, measured=[measured | told])).explore(network, PARAMS, X, scale=SCALE)
    assert again.session.shares == {again.setting: shares}
    assert again.session.blamed == {again.setting: {"time": found}}
    written = json.loads(again.save(file).read_text())["measured"]
    assert {k: written[0][k] for k in told} == json.loads(json.dumps(told))
    for broken in (7, {"time": 3}, {"time": {"of": "neither"}}):
        with pytest.raises(ArgumentError, match="measured"):
            fl.load(changed(file, measured=[measured | {"blamed": broken}]))
    with pytest.raises(ArgumentError, match="measured"):
        fl.load(changed(file, measured=[measured | {"shares": {"sites": [1]}}]))


def test_a_program_whose_lines_have_moved_is_the_same(lab, file):
    moved = {}
    exec("\n\n\ndef network" + inspect.getsource(network).partition("def network")[2], globals(), moved)
    again = fl.load(file).explore(moved["network"], PARAMS, X, scale=SCALE)
    assert again.problem is None
    assert again.evidence is not None
