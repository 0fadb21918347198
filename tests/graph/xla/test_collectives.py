"""Collectives read from HLO text: by kind, with the bytes of a device, and as often as loops run them."""

from __future__ import annotations

import pytest

from fusionlab.graph.xla.collectives import Traffic, bytes_text, collectives, traffic

TEXT = """
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%body (p: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {
  %h = f32[4,16]{1,0} fusion(%p), kind=kLoop, calls=%fused
  %all-reduce.1 = f32[4,16]{1,0} all-reduce(%h), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(step)/while/body/dot"}
  ROOT %t = (s32[], f32[4,16]{1,0}) tuple(%i, %all-reduce.1)
}

%wrapped (q: bf16[8,32]) -> bf16[4,32] {
  %q = bf16[8,32]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = bf16[4,32]{1,0} reduce-scatter(%q), dimensions={0}, to_apply=%add
}

ENTRY %main (a: f32[4,16], b: bf16[8,32]) -> f32[4,16] {
  %a = f32[4,16]{1,0} parameter(0)
  %b = bf16[8,32]{1,0} parameter(1)
  %loop = (s32[], f32[4,16]{1,0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %all-gather-start = (f32[4,16]{1,0}, f32[8,16]{1,0}) all-gather-start(%a), dimensions={0}
  %all-gather-done = f32[8,16]{1,0} all-gather-done(%all-gather-start)
  %async = ((bf16[8,32]{1,0}), bf16[4,32]{1,0}) async-start(%b), calls=%wrapped
  %async-done = bf16[4,32]{1,0} async-done(%async), calls=%wrapped
  %two = (f32[4,16]{1,0}, pred[8]{0}, /*index=2*/f32[]) all-reduce(%a, %flags, %one), to_apply=%add
  ROOT %moved = f32[4,16]{1,0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}
}
"""


def test_each_kind_with_the_bytes_of_a_device():
    found = {one.name: (one.kind, one.bytes, one.runs) for one in collectives(TEXT)}
    assert found == {
        "all-reduce.1": ("all-reduce", 256, 3),
        "all-gather-start": ("all-gather", 512, 1),  # what a device has in the end
        "reduce-scatter.1": ("reduce-scatter", 512, 1),  # what it had before
        "two": ("all-reduce", 256 + 8 + 4, 1),
        "moved": ("collective-permute", 256, 1),
    }
    (looped,) = (one for one in collectives(TEXT) if one.runs == 3)
    assert (looped.op_name, looped.computation) == ("jit(step)/while/body/dot", "body")


def test_traffic_is_their_sum():
    assert traffic(TEXT) == {
        "all-gather": Traffic(1, 512),
        "all-reduce": Traffic(4, 3 * 256 + 268),
        "collective-permute": Traffic(1, 256),
        "reduce-scatter": Traffic(1, 512),
    }
    assert ", ".join(map(str, traffic(TEXT).values())).startswith("1 of 512 B, 4 of 1.04 kB, ")
    assert traffic("no HLO") == {}


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (999, "999 B"), (1_048_576, "1.05 MB"), (3 * 10**9, "3 GB")])
def test_bytes_are_told_in_three_digits(n, text):
    assert bytes_text(n) == text
