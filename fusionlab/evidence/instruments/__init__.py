"""Measurements of one program: `program` prepares it, `timing` and `turns` time it by the clocks of `device_clock` and
`clocks`, `memory` and `out_of_memory` its bytes, `kernel_counts` and `instructions` read its compiled code, `peaks` measures the
device itself. `record` describes the environment of a measurement.
"""
