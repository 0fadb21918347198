"""Training with a function and with its fused version: both losses and states, and how far the original is from itself.

Read `result` and `step` first (which results of a step are its next arguments), then `lanes` (runs side by side), `judging` (what is
inside the band) and `curve` (the result).
"""
