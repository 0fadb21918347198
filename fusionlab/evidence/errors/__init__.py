"""How far two programs are from a float64 reference: `arrays` of two arrays, `numerics` by leaf, `reduction_sizes` what a tolerance
depends on besides the dtype.
"""
