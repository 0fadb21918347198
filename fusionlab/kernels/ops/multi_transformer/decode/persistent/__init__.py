"""All layers of a token in one kernel: `plan` says how `persistent.cu` is compiled and launched. Read `stream.cuh` (weights to
registers), `phases.cuh` and `attention_phase.cuh` (what a block does in turn), `exchange.cuh` and `grid.cuh` (what blocks tell each
other).
"""
