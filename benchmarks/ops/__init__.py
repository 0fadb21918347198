"""Single ops against XLA, against cuDNN and torch by hand, and the resources of their kernels. Each module is a benchmark of its own."""
