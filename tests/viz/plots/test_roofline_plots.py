"""Rooflines and predicted gains as pictures."""

import dataclasses
from xml.etree import ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.device import Device
from fusionlab.errors import ArgumentError
from fusionlab.evidence.roofline import roofline
from fusionlab.models import transformer
from fusionlab.viz.plots import figure_svg
from fusionlab.viz.roofline_plots import plot_predicted, plot_roofline

DEVICE = dataclasses.replace(Device.of("cpu"), copy_bytes_per_s=1e9, gemm_flop_per_s=1e10)


@pytest.fixture(scope="module")
def roof():
    params, x = transformer.init_block(jax.random.key(0), embed=64), jnp.ones((1, 512, 64))
    return roofline(fl.find(transformer.block, params, x), DEVICE, measured=0.1)


def test_every_kernel_that_computes_lies_on_the_roof(roof):
    ax = plot_roofline(roof)
    dots = [line.get_xydata()[0] for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata()) == 1]
    assert len(dots) == sum(p.operations > 0 for p in roof.points)
    for intensity, gflops in dots:
        assert gflops == pytest.approx(min(10.0, intensity), rel=1e-6)
    (measured,) = (line.get_xydata()[0] for line in ax.lines if line.get_marker() == "D")
    assert measured[1] == pytest.approx(roof.whole.operations / 0.1 / 1e9)
    assert "kernels" in ax.get_title(loc="left")
    ET.fromstring(figure_svg(ax.figure))


def test_predicted_savings_are_bars_and_measured_ones_marks(roof):
    (attention,) = (p for p in roof.predictions if p.pass_name == "dot_product_attention")
    ax = plot_predicted(roof.with_measured({attention.site: 2e-3}))
    widths = [bar.get_width() for bar in ax.patches if np.isfinite(bar.get_width())]
    assert widths == pytest.approx([p.saved_s * 1e3 for p in roof.predictions])
    marks = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "D" and len(line.get_xdata())]
    assert marks == [2.0]
    assert [t.get_text() for t in ax.get_yticklabels()] == [p.site for p in roof.predictions]


def test_an_axes_given_is_drawn_into(roof):
    from matplotlib.figure import Figure

    for plot in (plot_roofline, plot_predicted):
        ax = Figure().subplots()
        assert plot(roof, ax=ax) is ax


def test_nothing_to_draw_is_an_error_that_says_so():
    graph = fl.trace(lambda x: x.T, jnp.ones((4, 8)))
    with pytest.raises(ArgumentError, match="computes anything"):
        plot_roofline(roofline(graph, DEVICE))
    with pytest.raises(ArgumentError, match="no candidate"):
        plot_predicted(roofline(graph, DEVICE))
