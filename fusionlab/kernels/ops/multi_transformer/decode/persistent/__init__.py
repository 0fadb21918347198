"""All layers of a token in one kernel: `plan` compiles and launches `persistent.cu`. Read `stream.cuh` (weights to
registers), `phases.cuh` and `attention_phase.cuh` (what a block does in turn), `exchange.cuh` and `grid.cuh` (what blocks tell each
other).
"""
