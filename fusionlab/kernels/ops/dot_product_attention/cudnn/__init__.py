"""cuDNN's fused attention. Read `backend` first (which calls it takes), then `call` (the one place that touches JAX's internal call of
it) and `probe` with `probe.cu` (what a mask that is data represents).
"""
