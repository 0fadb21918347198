"""`device=` and `implementation=` are judged for the device asked about, from a machine that has no GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.device import Device, asked_about
from fusionlab.errors import BackendError
from fusionlab.fusers import registry
from fusionlab.graph.dtypes import is_float

PASSES = registry()
CASES = [
    (name, device, implementation)
    for name, one in PASSES.items()
    for device in ("sm_80", "sm_90")
    for implementation in one.fused_op.implementations
]


def train_step(fn):
    """Value and gradients of a function, of the arguments that are floats."""

    def step(*args):
        def total(moved):
            leaves, tree = jax.tree.flatten(args)
            fresh = iter(moved)
            outs = fn(*jax.tree.unflatten(tree, [next(fresh) if is_float(a) else a for a in leaves]))
            return sum(jnp.sum(a**2) for a in jax.tree.leaves(outs) if is_float(a))

        return jax.value_and_grad(total)([a for a in jax.tree.leaves(args) if is_float(a.dtype)])

    return step


@pytest.mark.parametrize(("name", "device", "implementation"), CASES)
def test_every_pass_is_asked_for_every_implementation_on_a_card_that_is_not_here(name, device, implementation):
    fn, args = PASSES[name].sample()
    for program in [fn] if PASSES[name].forward_only else [fn, train_step(fn)]:
        found = fl.find(program, *args, passes=name, device=device, implementation=implementation)
        assert found.report()
        assert found.to_dict()
        assert found.apply().node_count
        for site in found.candidates:
            assert site.backend is not None
            assert site.backend.name == implementation
        for site in found.rejections:
            assert site.code == "implementation"
            assert f"implementation {implementation!r} cannot run this call on a CUDA {device} device" in site.sentence
            assert "implementation='xla'" in str(site.edit)


def test_a_kernel_that_runs_there_is_a_candidate_and_one_that_does_not_is_declined():
    fn, args = PASSES["dot_product_attention"].sample()
    asked: Any = {"passes": "dot_product_attention", "implementation": "cuda"}
    assert fl.find(fn, *args, device="sm_90", **asked).candidates
    (told,) = fl.find(fn, *args, device="T4", **asked).rejections
    assert told.code == "implementation"
    assert "cannot run this call on an NVIDIA T4, sm_75 (simulated): sm_75 is older than sm_80" in told.sentence
    (told,) = fl.find(fn, *args, **asked).rejections
    assert "it needs a CUDA device" in told.sentence


def test_what_is_named_runs_or_raises():
    fn, args = PASSES["gemm_epilogue"].sample()
    fused = fl.fuse(fn, implementation="cuda")
    assert fused.findings(*args).rejections[0].code == "implementation"
    with pytest.raises(
        BackendError, match=r"gemm_epilogue's implementation 'cuda' cannot run this call on .*needs a CUDA device"
    ):
        fused(*args)
    left = fl.fuse(fn, implementation="cuda", skip="gemm_epilogue")
    assert jnp.array_equal(left(*args), jax.jit(fn)(*args))


def test_the_fused_graph_is_bound_for_the_device_asked_about():
    fn, args = PASSES["layer_norm"].sample()
    found = fl.find(fn, *args, passes="layer_norm", device="h100", implementation="cuda")
    (node,) = [n for n in found.apply().nodes() if n.primitive == "layer_norm"]
    assert node.params["implementation"] == "cuda"
    with pytest.raises(BackendError, match="needs a CUDA device"):  # as it always has, called here
        found.candidates[0].plan.op.call(*found.candidates[0].plan.operands(*args), implementation="cuda")


def test_only_a_search_is_asked_about_another_device():
    assert Device.asked() == Device.current()
    with asked_about(Device.of("b200")):
        assert Device.asked().arch == "sm_100"
        with pytest.raises(ValueError, match="inside"), asked_about(Device.of("cpu")):
            raise ValueError("inside")
        assert Device.asked().arch == "sm_100"
    assert Device.asked() == Device.current()


def test_the_command_line_takes_a_card(capsys):
    from fusionlab.cli import main

    model = ["fusionlab.models.mlp:apply", "--args", "(init(jax.random.key(0)), jnp.ones((8, 64)))"]
    assert main(["find", *model, "--device", "L4"]) == 0
    assert "an NVIDIA L4, sm_89 (simulated)" in capsys.readouterr().out
    assert main(["find", *model, "--device", "l5"]) == 1
    assert "one of 'a100', 'l4', 'h100', 'h200', 'b200', 'rtx4090', 'rtx5090', 't4'" in capsys.readouterr().err
