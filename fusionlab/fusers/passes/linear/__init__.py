"""Pass `gemm_epilogue`: act(x @ w + b). Read `gemm_epilogue` first, then `linear_parts` (the example, and the role of each operand),
`epilogues` (the activation that follows, recognised by value), `linear_groups` (grouping of backward passes), `beyond` (activations of
products that are not epilogues) and `plan` (the op that replaces a site).
"""
