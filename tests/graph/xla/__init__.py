"""HLO text, kernels mapped to nodes, collectives."""
