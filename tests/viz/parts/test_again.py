"""A toggle and a step of a copy do only the work that they call for, and give what a picture made afresh has."""

from __future__ import annotations

import functools

import pytest

from fusionlab.viz.parts import drawing, tree
from fusionlab.viz.parts.tree import Maker

from .test_parts import program


@pytest.fixture
def work(monkeypatch):
    """Names of the costly steps that were taken, in order."""
    done = []

    def counted(where, name):
        real = getattr(where, name)

        @functools.wraps(real, updated=())
        def called(*args, **kwargs):
            done.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(where, name, called)

    for where, name in ((tree, "items_of"), (drawing, "items_of"), (tree, "rows_of"), (tree, "Drawing")):
        counted(where, name)
    return done


def fresh(maker):
    return Maker(maker.graph, maker.findings, maker.costs)


def stack_of(overview):
    return next(c.id for c in overview.cards() if c.count == 3)


def test_a_toggle_makes_no_items_rows_or_cards_again(work):
    maker, _, _ = program("scoped")
    first = maker.findings.candidates[0].id
    maker.overview(())
    work.clear()
    on, chains = maker.overview({first})
    assert work == []
    assert any(c.site and (c.site.id, c.site.state) == (first, "applied") for c in on.cards())
    assert (on, chains) == fresh(maker).overview({first})


def test_another_copy_makes_the_card_that_it_is_in_again(work):
    maker, overview, _ = program("scoped")
    stack = stack_of(overview)
    maker.overview(())
    work.clear()
    shown, chains = maker.overview((), {stack: 2})
    assert work == ["Drawing"]
    assert (shown, chains) == fresh(maker).overview((), {stack: 2})
    assert maker.overview(())[0] == overview
