"""Programs that break one condition of a pass: declined with that condition's code, and kept as they are in values and gradients."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter

import pytest
from jax.extend import core as jex_core

import fusionlab as fl
from fusionlab.errors import REJECTIONS
from fusionlab.fusers import find_in
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.certify.certify import Certifier
from fusionlab.graph.certify.verdict import TOLERANCE
from fusionlab.kernels import meaning_of
from tests.asked import by_default

from .near.near_miss import NearMiss
from .near_misses import CORPUS, FORMS, NOTORIOUS, UNREACHED, in_form
from .reals import differences, values_and_gradients

CASES = [(entry, form) for form in FORMS for entry in CORPUS if form in entry.forms]
REPAIRED = [entry for entry in CORPUS if entry.repaired is not None]
LINE = re.compile(r"\bnear_\w+\.py:\d+")


CERTIFIER = Certifier(meaning_of)  # one for all: what it remembers of one near-miss must not answer for another


@functools.cache
def findings(entry: NearMiss, form: str = "plain") -> Findings:
    """What all passes find in an entry's program."""
    fn, args = in_form(entry, form)
    passes = [(p, {}) for p in by_default()]
    return find_in(fl.trace(fn, *args), passes, fl.Device.current(), certifier=CERTIFIER)


def same(fn, args, found: Findings) -> None:
    """Asserts that the rewritten program has the values and the gradients of the original, as functions of real numbers."""
    rewritten = jex_core.jaxpr_as_fun(found.rewritten())
    want, got = values_and_gradients(fn, args), values_and_gradients(lambda *a: rewritten(*a), args)
    tolerance = max(TOLERANCE.get(str(a.dtype), 4e-2) for a in args)
    assert not differences(want, got, tolerance)


def declined(entry: NearMiss, found: Findings):
    """The one rejection of the entry's pass, None where it must have none; asserts that everything else is as the entry says."""
    assert tuple(c.formula for c in found.candidates) == entry.also
    mine = [r for r in found.rejections if r.pass_name == entry.pass_name]
    assert [r.code for r in mine] == ([entry.code] if entry.code else []), [str(r) for r in mine]
    return mine[0] if mine else None


@pytest.mark.parametrize(
    ("entry", "form"),
    [pytest.param(e, f, id=f"{e}, {f}", marks=[pytest.mark.whole] * (f == "plain")) for e, f in CASES],
)
def test_a_near_miss_is_declined_for_what_it_breaks_and_computes_what_it_did(entry, form):
    found = findings(entry, form)
    rejection = declined(entry, found)
    if rejection is not None:
        assert entry.says in rejection.sentence
        assert rejection.sentence
        assert LINE.search(f"{rejection.sentence} {rejection.source}")
        assert 0 < rejection.matched <= rejection.total
        assert rejection.site_ids
        assert not any(rejection.site_ids <= site.node_ids for site in found.candidates)
    if found.candidates or form == "plain":  # without one, what is rewritten is what was traced
        same(*in_form(entry, form), found)


@pytest.mark.whole
@pytest.mark.parametrize("entry", REPAIRED, ids=str)
def test_the_edit_that_a_rejection_suggests_makes_the_site_match(entry):
    before = declined(entry, findings(entry))
    assert before is not None
    assert before.edit is not None
    assert entry.edit in before.edit
    found = fl.find(entry.repaired, *entry.args)
    (site,) = [c for c in found.candidates if c.pass_name == entry.pass_name]
    assert site.formula not in entry.also
    same(entry.repaired, entry.args, found)


@pytest.mark.whole
@pytest.mark.parametrize("entry", [e for e in CORPUS if e.code], ids=str)
def test_a_rejection_is_explained_from_its_node_and_told_as_text_and_as_data(entry):
    found = findings(entry)
    rejection = declined(entry, found)
    assert rejection is not None
    for handle in (rejection.id, rejection.node_ids[0], found.graph.node_by_id[rejection.node_ids[0]]):
        text = found.explain(handle)
        assert f"declined [{entry.code}]: {rejection.sentence}" in text
        assert REJECTIONS[rejection.code] in text
    assert any(line.startswith(f"  [{entry.code}] ") for line in found.reasons())
    data = json.loads(json.dumps(rejection.to_dict()))
    assert (data["code"], data["sentence"], data["edit"]) == (entry.code, rejection.sentence, rejection.edit)


def test_every_code_that_a_program_can_get_occurs_and_the_others_say_why_not():
    reached = Counter(entry.code for entry in CORPUS if entry.code)
    assert not reached.keys() & UNREACHED.keys()
    assert reached.keys() | UNREACHED.keys() == REJECTIONS.keys()


def test_the_corpus_is_large_and_names_each_entry_once():
    names = [(entry.pass_name, entry.name) for entry in CORPUS]
    assert len(set(names)) == len(names) >= 60
    assert {name for _, name in names} >= set(NOTORIOUS)
    assert len(REPAIRED) >= 12
    assert all(entry.edit for entry in REPAIRED)
    assert sum(not entry.code for entry in CORPUS) <= 10
