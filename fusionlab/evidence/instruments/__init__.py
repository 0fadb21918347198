"""What is measured of one program: `program` makes it ready to run, `timing` and `turns` time it by the clocks of `device_clock` and
`clocks`, `memory` and `out_of_memory` its bytes, `kernel_counts` and `instructions` what it was compiled to, `peaks` the device
itself. `record` describes the environment of a measurement.
"""
