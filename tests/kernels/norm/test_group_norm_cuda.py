"""The suite that the implementations of group_norm are held to on a GPU, held by XLA's and by the CUDA kernels emulated on a CPU; and how
those are tiled."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from fusionlab.device import Device
from fusionlab.kernels.ops.group_norm import GROUP_NORM, cuda, tiling
from fusionlab.kernels.ops.group_norm.plan import Images, backward_pass, forward_pass
from tests.kernels.emulated import kernels_on_the_cpu, poisoned
from tests.kernels.norm.group_norm_suite import CASES, Case, GroupNormSuite, close, exact, operands, turns, wide

CHANNELS = (1, 7, 8, 21, 64, 96, 320, 512, 1023, 1024, 1280, 2560, 4095, 4096)


class TestXla(GroupNormSuite):
    implementation = "xla"
    turns = turns(CASES)
    repeatable = False

    def test_the_gradient_of_a_large_mean_sums_to_nothing_over_its_group(self):
        """Where xhat's own mean is what the mean of x was rounded by."""
        case = Case((4, 50, 8), 2, slots=())
        given, _ = operands(case, "float32", mean=4096.0)
        _, grads = self.step(case)(given, exact(case, given, given["x"])["out"][0].astype(np.float32))
        assert np.abs(wide(grads["dx"]).reshape(4, 50, 2, 4).sum((1, 3))).max() < 2e-4


class TestCudaEmulated(GroupNormSuite):
    """group_norm.cu itself, as C++, launched by XLA's CPU backend, images in several chunks; what no kernel writes stays NaN."""

    implementation = "cuda"
    turns = turns(CASES, every=("320", "odd channels"))

    @pytest.fixture(autouse=True)
    def _on_the_cpu(self, emulator, monkeypatch):
        monkeypatch.setattr(cuda, "launch", poisoned(cuda.launch))
        monkeypatch.setattr(tiling, "LEAST_BYTES", 256)
        monkeypatch.setattr(tiling, "MULTIPROCESSORS", 2)
        with kernels_on_the_cpu(emulator, cuda):
            yield

    @pytest.mark.parametrize("name", ["320", "narrow", "odd channels"])
    def test_the_order_in_which_threads_take_turns_changes_nothing(self, name, emulator, monkeypatch):
        case = CASES[name]
        given, ct = operands(case, "bfloat16")
        first = self.step(case)(given, ct)
        monkeypatch.setattr(emulator, "last_thread_first", True)
        second = self.step(case)(given, ct)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    @pytest.mark.parametrize("splits", [1, 3, 7, 13])
    def test_any_number_of_chunks_gives_the_same(self, splits, monkeypatch):
        case = CASES["one image"]
        monkeypatch.setattr(tiling, "splits_of", lambda *_: splits)
        given, ct = operands(case, "float32")
        out, grads = self.step(case)(given, ct)
        wants = exact(case, given, ct)
        for slot, got in {"out": out, **grads}.items():
            close(slot, got, wants[slot])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("channels", CHANNELS)
def test_every_channel_has_a_thread_and_every_group_a_team(channels, dtype):
    for groups in (n for n in range(1, channels + 1) if channels % n == 0):
        tile = tiling.tile_of(channels, groups, dtype)
        assert channels % tile.vec == 0
        assert tile.vec * tiling.ITEM_BYTES[dtype] <= 16
        assert tile.vec * tile.lanes * (tile.vecs - 1) < channels <= tile.vec * tile.lanes * tile.vecs
        assert tile.threads <= 512
        assert tile.height == 1 or tile.vecs == 1
        assert tile.team == 1 or tile.team * groups <= tile.threads
        # Shared memory: what is merged of channels, teams, and the statistics of groups.
        half = 1 << max(tile.height - 1, 1).bit_length() - 1
        assert 8 * half * channels + 12 * tile.threads <= 48 << 10
        assert 8 * groups + 12 * tile.threads <= 48 << 10


@pytest.mark.parametrize("positions", [1, 5, 64, 1023, 4096, 16384])
def test_no_chunk_is_empty_and_one_wave_of_blocks_is_enough(positions):
    for batch, channels in itertools.product((1, 2, 3, 16, 1000), (1, 8, 320, 4096)):
        images = Images(batch, positions, channels, 1, "bfloat16", "none", ())
        splits, blocks = images.splits, images.tile.blocks
        assert 1 <= blocks * images.tile.threads <= 1024
        assert 1 <= splits <= positions
        assert (splits - 1) * -(-positions // splits) < positions
        assert splits == 1 or splits * batch <= tiling.MULTIPROCESSORS * blocks
    assert Images(16, 4096, 320, 32, "bfloat16", "silu", ()).splits == 24


def test_what_is_absent_is_no_parameter_and_what_is_not_wanted_no_launch():
    images = Images(2, 9, 64, 8, "float32", "none", ())
    made = forward_pass(images, 1e-5, saves=False)
    assert (made.reads, made.gives, made.scratch) == (("x",), ("out",), ((2, 1, 8, 2),))
    params = made.plan.launches[1].params
    assert params[:5] == (("operand", 0), ("null", 0), ("null", 0), ("result", 1), ("result", 0))
    assert np.int32(params[-1][1]).view(np.float32) == np.float32(1e-5)

    vectors = (("bias", "float32"), ("scale", "float32"))
    entries = {
        ("x",): ["gn_grad_sums", "gn_grad_x"],
        ("scale",): ["gn_grad_sums", "gn_grad_vectors"],
        ("x", "scale", "bias"): ["gn_grad_sums", "gn_grad_x", "gn_grad_vectors"],
    }
    for wanted, launches in entries.items():
        for activation in ("none", "silu"):
            made = backward_pass(Images(2, 9, 64, 8, "float32", activation, vectors), wanted)
            assert [one.entry for one in made.plan.launches] == launches
            assert made.gives == wanted
            assert len(made.scratch) == len(wanted)
            assert ("bias" in made.reads) == (activation == "silu")


class TestRefusals:
    def reason(self, shape=(4, 5, 8), dtype="float32", device="sm_90"):
        return GROUP_NORM.implementations["cuda"].refuses(
            {"x": jax.ShapeDtypeStruct(shape, dtype)}, Device.of(device), batch_axes=1
        )

    def test_what_it_takes(self):
        for device in ("sm_75", "sm_80", "sm_90", "sm_120"):
            assert self.reason(device=device) is None

    def test_what_it_does_not(self):
        assert "4104 channels, the kernels take 4096" in self.reason((2, 3, 4104))
        assert "65536 images, the kernels take 65535" in self.reason((65536, 3, 8))
        assert "x is float64" in self.reason(dtype="float64")
        assert self.reason(device="cpu")
