"""A name that is not there: the message proposes the nearest one, wherever a name is taken."""

import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.cli import main
from fusionlab.errors import ArgumentError, FusionLabError, did_you_mean, unknown_name
from fusionlab.fusers import registry


@pytest.mark.parametrize(
    ("got", "near"),
    [
        ("gemm", "'gemm_epilogue'"),  # not gemm_epilogue_grad
        ("GEMM_epilogue", "'gemm_epilogue'"),
        ("attention", "'dot_product_attention'"),
        ("lerpp", "'lerp'"),
        ("multi_devices", "'multi_devices_multi_transformer_decoder' or 'multi_devices_multi_transformer_encoder'"),
        ("nothing like it", None),
        ("", None),
    ],
)
def test_the_nearest_name_starts_with_what_came_or_has_it_inside_or_is_spelt_alike(got, near):
    names = [name for p in registry() for name in (p, f"{p}_grad")]
    assert did_you_mean(got, names) == (f" Did you mean {near}?" if near else "")


def test_of_very_many_names_the_most_alike_are_listed():
    names = [f"lerp@layer_{i}#1" for i in range(300)]
    text = str(unknown_name("site", "lerp@layer_17", names))
    assert "lerp@layer_17#1" in text
    assert "and 290 more. Did you mean 'lerp@layer_17#1' or " in text
    assert text.count("@layer") < 15


def mlp(x, w):
    return jnp.maximum(x @ w, 0)


ARGS = jnp.ones((8, 16)), jnp.ones((16, 4))


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (lambda: fl.find(mlp, *ARGS, passes="gemm"), "'gemm_epilogue'"),
        (lambda: fl.find(mlp, *ARGS, passes=fl.Strategy(gemm=True)), "'gemm_epilogue'"),
        (lambda: fl.find(mlp, *ARGS, passes=fl.Strategy(gemm_epilogue={"rank": True})), "'strict_rank'"),
        (lambda: fl.find(mlp, *ARGS, device="H-10"), "'h100'"),
        (lambda: fl.find(mlp, *ARGS, implementation="blockwise"), "'xla_blockwise'"),
        (lambda: fl.fuse(mlp, skip="gemm"), "'gemm_epilogue'"),
        (lambda: fl.find(mlp, *ARGS).explain("gemm"), "'gemm_epilogue@#1'"),
        (lambda: fl.find(mlp, *ARGS).explain("gemm_epilogue@#2"), "'gemm_epilogue@#1'"),
        (lambda: fl.find(mlp, *ARGS)["gemm"], "'gemm_epilogue@#1'"),
        (lambda: fl.explore(mlp, *ARGS).select("gemm"), "'gemm_epilogue@#1'"),
        (lambda: fl.explore(mlp, *ARGS).toggles["gemm_epilog"], "'gemm_epilogue'"),
        (lambda: fl.unregister("gemm"), "'gemm_epilogue'"),
        (lambda: fl.find(mlp, *ARGS, pases="lerp"), "'passes'"),
        (lambda: fl.explore(mlp, *ARGS, implementatoin="xla"), "'implementation'"),
        (lambda: fl.compare(mlp, fl.fuse(mlp), *ARGS, sample=3), "'samples'"),
    ],
)
def test_every_place_that_takes_a_name_proposes_one(call, near):
    with pytest.raises(FusionLabError, match=f"Did you mean {near}"):
        call()


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("fnd x", "'find'"),
        ("find x --pases a", "'--passes'"),
        ("find fusionlab.models.mlp:aply", "'apply'"),
        ("find fusionlab.models.mlp:dense --args (f32[8,4],f32[4,4],f32[4]) --passes gemm", "'gemm_epilogue'"),
    ],
)
def test_so_does_the_command_line(line, near, capsys):
    try:
        status = main(line.split())
    except SystemExit as end:
        status = end.code
    assert status in (1, 2)
    assert f". Did you mean {near}?" in capsys.readouterr().err


def test_an_option_of_another_command_is_not_proposed_to_itself(capsys):
    with pytest.raises(SystemExit):
        main(["find", "x", "--budget", "2"])
    assert "unrecognized arguments: --budget 2 (see" in capsys.readouterr().err


def test_so_does_the_package():
    with pytest.raises(
        AttributeError, match=r"module 'fusionlab' has no attribute 'exploer'\. Did you mean 'explore'\?"
    ):
        fl.exploer(mlp)
    assert not hasattr(fl, "_ipython_display_")


def test_a_number_is_no_name():
    with pytest.raises(ArgumentError) as caught:
        fl.find(mlp, *ARGS).explain(99)
    assert "Did you mean" not in str(caught.value)
