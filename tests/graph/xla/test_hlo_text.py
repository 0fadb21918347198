"""HLO text as XLA writes it, on CPU and GPU and in older forms, and text that is none.

The samples in hlo/ are written by hand in the format of XLA's HLO text (https://openxla.org/xla/hlo_dumps shows it): names with and without
the sign, operands with and without their types, metadata with lines of its own and with stack frames.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionlab.graph.xla import hlo_text
from fusionlab.graph.xla.hlo_text import calls_in_fusions, inside, instruction_kind, kernel_counts, parse_hlo, running

HERE = Path(__file__).parent / "hlo"
CPU, GPU, SLICED = ((HERE / f"{name}.txt").read_text() for name in ("cpu", "gpu", "sliced"))


def kernels(text):
    return {
        i.name: (instruction_kind(i), i.target or i.fusion_kind or i.opcode)
        for _, i in running(parse_hlo(text))
        if instruction_kind(i)
    }


def test_the_kernels_of_a_cpu_module_are_those_of_the_entry_and_of_loop_bodies():
    assert kernels(CPU) == {
        "while.1": ("loop control", "while"),
        "less": ("unfused", "compare"),
        "copy.1": ("copy", "copy"),
        "next": ("unfused", "add"),
        "ynn_fusion": ("library", "__ynn_fusion"),
        "sums": ("fusion", "kLoop"),
    }
    assert kernel_counts(CPU) == {"unfused": 2, "copy": 1, "library": 1, "fusion": 1}


def test_the_kernels_of_a_gpu_module():
    assert kernels(GPU) == {
        "loop_add_fusion": ("fusion", "kLoop"),
        "gemm_fusion_dot.1": ("fusion", "__triton_gemm"),
        "cublas-gemm.1": ("library", "__cublas$lt$matmul"),
        "cudnn": ("library", "__cudnn$fmhaSoftmax"),
        "own": ("custom", "fusionlab_launch"),
        "all-reduce-start": ("collective", "all-reduce-start"),
        "copy.2": ("copy", "copy"),
    }


def test_a_call_that_gets_slices_is_the_kernel_of_the_fusion_around_it():
    assert calls_in_fusions(parse_hlo(SLICED)) == {"own.3": "dynamic_slice_fusion.2"}
    assert calls_in_fusions(parse_hlo(GPU)) == calls_in_fusions(parse_hlo(CPU)) == {}


def test_a_stack_frame_gives_the_line_and_its_callers():
    module = parse_hlo(CPU)
    assert (module.name, module.entry) == ("jit_f", "main.9")
    origin = module.origin(module.instructions["reduce.1"])
    assert [(s.short, s.function) for s in origin] == [("model.py:12", "layer.<locals>.body"), ("train.py:90", "step")]
    assert [s.short for s in module.origin(module.instructions["dot.1"])] == ["train.py:90"]
    assert module.origin(module.instructions["copy.1"]) == []


def test_callers_that_are_numbered_from_zero_are_the_same():
    shifted = CPU.replace("parent_frame_id=1", "parent_frame_id=0").replace("parent_frame_id=2", "parent_frame_id=1")
    module = parse_hlo(shifted)
    assert [s.short for s in module.origin(module.instructions["sums"])] == ["model.py:12", "train.py:90"]


def test_older_metadata_names_its_line_itself():
    module = parse_hlo(GPU)
    (source,) = module.origin(module.instructions["add.0"])
    assert (source.file, source.line) == ("/home/me/m {1}.py", 7)


def test_an_instruction_has_its_operands_name_and_what_it_calls():
    module = parse_hlo(CPU)
    reduce = module.instructions["reduce.1"]
    assert reduce.operands == ("param_0", "constant.1")
    assert reduce.op_name == "jit(f)/while/body/reduce_sum"
    assert reduce.called == {"to_apply": ("region_0.1",)}
    assert module.instructions["start"].operands == ("zero", "x.1")
    assert module.instructions["while.1"].called == {"condition": ("condition",), "body": ("body",)}
    assert module.instructions["x.1"].op_name == "params['w']"
    assert {i.name for i in inside(module, module.instructions["sums"])} >= {"reduce.1", "add.1"}
    typed = parse_hlo(GPU).instructions["add.0"]
    assert typed.operands == ("p.0", "p.0")


def test_the_short_form_has_no_signs_types_or_signatures():
    module = parse_hlo(
        "HloModule m\n\nadder {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}\n\n"
        "ENTRY main {\n  p = f32[4]{0} parameter(0)\n  c = f32[2,2] constant({ { 1, 2 }, { 3, 4 } })\n"
        '  f = f32[4] fusion(p), kind=kLoop, calls=adder, backend_config="{\\"kind\\":\\"__x\\"}"\n'
        "  ROOT w = f32[4] conditional(p, p, p), branch_computations={adder, other}\n}\n"
    )
    assert module.entry == "main"
    assert module.instructions["s"].operands == ("a", "b")
    assert module.instructions["f"].called == {"calls": ("adder",)}
    assert module.instructions["f"].target == "__x"
    assert module.instructions["w"].called == {"branch_computations": ("adder", "other")}
    assert [i.name for c, i in running(module) if c == "adder"] == ["a", "b", "s"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no HLO at all",
        "HloModule m",
        "ENTRY %e () -> f32[] {",
        "ENTRY %e () -> f32[] {\n  ROOT %x = f32[] add(%a, %b\n",
        "ENTRY %e () -> f32[] {\n  %x = \n  %y = f32[]\n  %z = (f32[], f32[]\n  = add()\n}\n",
        "StackFrames\n1 {file_location_id=9 parent_frame_id=7}\n2 nonsense\n\n" + GPU,
        CPU.replace("}", ""),
        CPU.replace("(", ""),
        CPU.replace('"', ""),
    ],
)
def test_text_that_is_not_understood_is_passed_over(text):
    module = parse_hlo(text)
    assert all(n > 0 for n in kernel_counts(module).values())
    for instruction in module.instructions.values():
        module.origin(instruction)


def test_an_unknown_operation_is_a_kernel_by_its_own_name_and_an_unknown_attribute_is_nothing():
    text = "ENTRY %e (a: f9[2]) -> f9[2] {\n  %a = f9[2] parameter(0)\n"
    text += '  ROOT %q = f9[2]{0:Z(3)} quantum-leap(%a), wormhole={x: (}, m="}"\n}\n'
    assert kernels(text) == {"q": ("unfused", "quantum-leap")}


def test_frames_that_call_each_other_in_circles_end():
    module = parse_hlo(
        CPU.replace("2 {file_location_id=2 parent_frame_id=2}", "2 {file_location_id=2 parent_frame_id=3}")
    )
    assert [s.short for s in module.origin(module.instructions["sums"])] == ["model.py:12"]


def test_the_quick_way_reads_plain_lines_as_the_general_one():
    lines = [line.strip() for text in (CPU, GPU) for line in text.splitlines()]
    lines += [
        '%a.1 = f32[2,3]{1,0} add(%x, %y), metadata={op_name="jit(f)/add" stack_frame_id=3}',
        'ROOT %f.2 = bf16[] fusion(%a.1), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/mul"}',
        "%r = f32[2]{0} reduce(%a.1, %z), dimensions={1}, to_apply=%region_1.2",
        "%c = s32[] constant(-3)",
        "%g = f32[2]{0} get-tuple-element(%t), index=1",
        "%b = (f32[2]{0}, s32[]) tuple(%r, %c)",
        '%d = f32[2]{0} dot(%x, %y), backend_config={"outer_dimension_partitions":["2"]}',
        '%q = f32[2]{0} add(%x, %y), metadata={op_name="a\\"b" stack_frame_id=3}',
    ]
    quick = [hlo_text._plain(line) for line in lines]
    assert [(q, hlo_text._any(line)) for q, line in zip(quick, lines, strict=True) if q] == [(q, q) for q in quick if q]
    assert [q is not None for q in quick[-8:]] == [True, True, True, True, False, False, False, False]
