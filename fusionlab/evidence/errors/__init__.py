"""How far two programs are from a float64 reference: `numerics` by leaf, `reduction_sizes` what a tolerance depends on besides the
dtype.
"""
