"""GEMM epilogues: activations, biases, reshapes, convolutions of one point."""
