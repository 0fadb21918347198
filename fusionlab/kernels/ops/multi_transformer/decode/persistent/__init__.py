"""All layers of a token in one kernel: `plan` compiles and launches `persistent.cu`. Read `stream.cuh` (weights to
registers), `phases.cuh` and `attention_phase.cuh` (the phases of a block), `exchange.cuh` and `grid.cuh` (communication between
blocks).
"""
