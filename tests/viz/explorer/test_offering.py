"""What an explorer offers at a prompt: how it prints outside a notebook, what the tab key completes, its sites by name."""

import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.errors import UnknownNameError


def block(x, w, v):
    kept = x @ w
    return jnp.maximum(kept, 0), kept, jnp.tanh(x @ v)  # the first is declined: what it keeps is returned


@pytest.fixture
def lab():
    return fl.explore(block, jnp.ones((8, 16)), jnp.ones((16, 4)), jnp.ones((16, 4)))


def test_outside_a_notebook_it_says_how_to_see_it(lab):
    assert repr(lab) == str(lab)
    assert "\n" not in str(lab)
    nodes, found = lab.graph.node_count, lab.findings
    on, declined = len(lab.enabled), len(found.rejections)
    assert (on, declined) == (len(found.candidates), 1)
    assert str(lab).startswith(
        f"Explorer of 'block', {nodes} nodes: {on} fused, {declined} declined; not measured. In a notebook "
    )
    for way in ("lab.save('x.html')", "lab.measure()", "lab.sites", "lab.code()"):
        assert way in str(lab)
    lab.toggles.set(frozenset())
    assert f"nodes: {len(found.candidates)} can be fused, {declined} declined" in str(lab)


def test_dir_has_what_a_person_calls_and_nothing_of_the_widget_s(lab):
    names = dir(lab)
    assert {"measure", "save", "select", "sites", "toggles", "code", "undo", "findings", "ledger", "observe"} <= set(
        names
    )
    assert {"comm", "keys", "layout", "send_state", "trait_names", "scene", "session", "refresh", "_esm"}.isdisjoint(
        names
    )
    assert len(names) < 45
    assert all(hasattr(lab, name) for name in names)


def test_sites_are_candidates_and_rejections_with_their_state(lab):
    found = lab.findings
    assert list(lab.sites) == [site.id for site in (*found.candidates, *found.rejections)]
    first = found.candidates[0].id
    assert lab.sites[first] is found.candidates[0]
    assert lab.sites.state(first) == "fused"
    lab.toggles[first] = False
    assert lab.sites.state(first) == "can be fused"
    assert f"  can be fused  {found.candidates[0]}" in repr(lab.sites)
    assert found.rejections
    for site in found.rejections:
        assert lab.sites.state(site.id) == "declined"
    assert "<td>can be fused</td>" in lab.sites._repr_html_()
    with pytest.raises(UnknownNameError, match=f"Did you mean '{first}'"):
        lab.sites[first + "x"]


def test_sites_follow_what_an_option_finds(lab):
    sites = lab.sites
    lab.option("gemm_epilogue", "strict_rank", True)
    assert list(sites) == [site.id for site in (*lab.findings.candidates, *lab.findings.rejections)]


def test_the_tab_key_completes_attributes_and_keys(lab):
    from IPython.core.completer import provisionalcompleter
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.user_ns.update(lab=lab, found=lab.findings, passes=fl.passes(), plan=fl.Strategy(lerp=True))

    def completed(text):
        with provisionalcompleter():
            return [c.text for c in shell.Completer.completions(text, len(text))]

    first = lab.findings.candidates[0].id
    assert completed("lab.") == dir(lab)
    assert set(completed('lab.sites["')) == set(lab.sites)
    assert set(completed('lab.toggles["')) == set(lab.toggles)
    assert first in completed('found["')
    assert "lerp" in completed('passes["')
    assert completed('plan["') == ["lerp"]


def test_a_pass_of_the_catalogue_is_found_by_name():
    assert fl.passes()["lerp"].name == "lerp"
    with pytest.raises(UnknownNameError, match="Did you mean 'gemm_epilogue'"):
        fl.passes()["gemm"]
