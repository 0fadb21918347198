"""Each pass has a colour of its own: for every eye, and on light and dark paper."""

import itertools

import numpy as np
import pytest

from fusionlab.fusers.registry import BUILT_IN
from fusionlab.viz import palette

from .test_html import contrast, themes

# Linear RGB as it is seen without one of the three kinds of cones (Machado, Oliveira and Fernandes 2009, severity 1).
EYES = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.1191920, 0.9503041]]
WHITE = np.array([0.95047, 1, 1.08883])
pytestmark = pytest.mark.whole
APART = 15  # CIE76; Okabe and Ito's own hues are 16 apart at the nearest

# A pass for each op: forms of one op share its colour.
PASSES = sorted({pass_.op: name for name, pass_ in reversed(BUILT_IN.items())}.values())


def lab(colour, eye="all cones"):
    """A colour in CIE L*a*b*, as an eye sees it."""
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    t = np.array(XYZ) @ np.clip(np.array(EYES[eye]) @ linear, 0, 1) / WHITE
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eye", EYES)
def test_no_two_passes_look_alike(eye):
    near = []
    for one, other in itertools.combinations(PASSES, 2):
        apart = np.linalg.norm(lab(palette.colour_of(one), eye) - lab(palette.colour_of(other), eye))
        near += [(one, other, round(float(apart)))] if apart < APART else []
    assert near == []


def test_neither_a_gradient_nor_a_user_s_pass_has_the_colour_of_another_pass():
    taken = [palette.colour_of(name) for name in PASSES] + [palette.colour_of(f"{name}_grad") for name in PASSES]
    taken.remove(palette.colour_of("multi_transformer_encoder_grad"))  # whole layers have one strength
    assert len({*taken, *palette._SPARE}) == len(taken) + len(palette._SPARE)


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_seen_on_light_and_dark_paper(name):
    light, dark, *_ = themes()
    assert contrast(palette.colour_of(name), light["paper"]) >= 2  # beside shapes, which tell the state, and names
    assert contrast(palette.colour_of(name), dark["paper"]) >= 3
    assert contrast(palette.colour_of(name), dark["box"]) >= 3
