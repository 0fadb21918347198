"""Pass `gemm_epilogue`: act(x @ w + b). Read `gemm_epilogue` first, then `linear_parts` (the example, and which operand is what),
`epilogues` (which activation follows, by value), `linear_groups` (products that share an operand), `beyond` (what stands behind
a product and is no epilogue) and `plan` (the op in the place of a site).
"""
