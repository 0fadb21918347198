"""`python -m benchmarks language_models` at tiny sizes: its programs agree, and every one has its samples; what fails is in the record."""

from __future__ import annotations

import re

import jax
import pytest

from benchmarks.measuring import chosen, compiled_at_once, differences
from benchmarks.programs import language_compile, language_largest, language_rows
from benchmarks.programs import language_models as bench
from benchmarks.programs.language_expert import chunked_loss
from benchmarks.programs.language_steps import PLAIN, _cross_entropy, tokens_of

PEAK = {"flop_per_s": 1e12}


@pytest.mark.dear
@pytest.mark.parametrize("name", [case.name for case in bench.TINY])
def test_the_programs_of_a_model_agree_and_are_timed(name):
    case, found = bench.TINY_ROWS[name], {"failures": {}}
    bench.measure(case, found, 2)
    bench.complete(case, found, 1e12, PEAK)
    assert not found["failures"]
    rivals = bench.programs(case).keys()
    assert {"jax.jit", "by hand", "expert, policy", *language_rows.FUSED} <= rivals
    for rival in rivals:
        assert len(found[rival]["samples_s"]) == 2
        assert found[rival]["difference"] < 0.03  # rounding of bfloat16, in the smallest of the gradients
        assert found[rival]["peak_bytes"] > found[rival]["temporaries_bytes"] > 0
        assert found[rival]["mfu"] == pytest.approx(found["model_flop"] / 1e12 / found[rival]["median_s"])
    ops = {route["activation"] for route in found["fused grad"]["routes"]}
    assert "dot_product_attention" in ops
    text = "\n".join(language_rows.lines(name, found))
    assert re.search(r"fused grad over the expert \((by hand|expert.*)\): ", text)
    assert "fused grad / grad of fused: time " in text


def test_what_fails_is_left_out_and_in_the_record():
    def fails(x):
        raise ValueError("no memory\nfor this")

    failures = {}
    programs = {name: (fn, (1.0,)) for name, fn in {"first": fails, "second": lambda x: x + 1, "third": fails}.items()}
    assert list(compiled_at_once(programs, failures)) == ["second"]
    assert failures == dict.fromkeys(("first", "third"), "ValueError: no memory")
    with pytest.raises(ValueError, match="no memory"):
        compiled_at_once(programs)
    text = "\n".join(language_rows.lines("a row", {"failures": failures}))
    assert text == "a row\n  first: ValueError: no memory\n  third: ValueError: no memory"


@pytest.mark.parametrize(
    "memory", [lambda n: 3 * n + 5, lambda n: 3 * n + n % 3, lambda n: n * n // 4 + n, lambda n: 10**9]
)
def test_the_largest_size_that_fits_is_found_in_few_steps(memory):
    for limit in (10, 100, 3333):
        calls = []
        found = language_largest.largest(lambda n, calls=calls: calls.append(n) or memory(n), limit)
        assert found == max((n for n in range(1, 4097) if memory(n) <= limit), default=0)
        assert len(calls) <= 12


def test_rows_are_chosen_by_their_texts_and_names():
    rows = ["llama scan", "llama unrolled", "llama scan, V 128256"]
    assert chosen(rows, "") == rows
    assert chosen(rows, "llama scan") == ["llama scan"]
    assert chosen(rows, "unrolled|V 128") == rows[1:]


def test_the_peak_of_a_card_and_the_operations_of_a_model():
    assert language_rows.peak_of("NVIDIA H200")["flop_per_s"] == 989.5e12
    assert language_rows.peak_of("an unknown card") is None
    case = bench.ROWS["llama unrolled"]
    weights = 4 * (2048 * 128 * (2 * 16 + 2 * 4) + 3 * 2048 * 5632) + 2048 * 32768
    per_token = 6 * weights + 12 * 4 * 16 * 128 * 2048
    assert language_rows.model_flop(case) == per_token * 4 * 2048


@pytest.mark.dear
def test_an_experts_loss_in_chunks_is_the_plain_one():
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (2, 30, 16)), jax.random.normal(keys[1], (16, 40))
    labels = jax.random.randint(keys[2], (2, 30), 0, 40)
    plain = jax.value_and_grad(lambda x, w: _cross_entropy(x @ w, labels), (0, 1))(x, w)
    chunked = jax.value_and_grad(lambda x, w: chunked_loss(16, x, w, labels), (0, 1))(x, w)
    assert differences(plain, chunked) < 1e-6


@pytest.mark.dear
def test_compiling_is_timed_in_processes_of_its_own(monkeypatch):
    monkeypatch.setattr(language_compile, "PROCESSES", (("jax.jit", "jax.jit"), ("broken", "no such program")))
    found = language_compile.measure("gpt2", True)
    assert 0 < found["jax.jit"]["lower_s"] < found["jax.jit"]["total_s"]
    assert found["jax.jit"]["over_jit"] == 1
    assert "KeyError" in found["broken"]["error"]


@pytest.mark.dear
def test_the_largest_batch_of_a_tiny_model_runs():
    case = bench.TINY_ROWS["llama checkpoint"]
    found = language_largest.measure(case, bench.programs, 2 << 20)
    assert all(found[name]["ran"] for name in language_largest.PROGRAMS)
    assert 1 <= found["by hand"]["batch"] <= found["fused grad"]["batch"]


@pytest.mark.gpu  # where torch is
def test_torch_has_the_same_loss(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    case, found = bench.TINY_ROWS["gpt2"], {"failures": {}}
    bench.measure_torch(case, found, 2)
    loss = jax.jit(case.loss(PLAIN))(case.parameters(), tokens_of(case))
    assert found["torch.compile"]["loss"] == pytest.approx(float(loss), rel=1e-3)
