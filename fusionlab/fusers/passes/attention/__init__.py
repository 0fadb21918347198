"""Pass `dot_product_attention`: softmax(scale * q k^T) v with masks, biases, cap, sink and dropout.

Read `dot_product_attention` first, then `scores` and `forms` (the spellings), `masks` (masks and biases, classified by value),
`proposals` (a site as the op), `plan` (the op's operands from a match), `conditions` (the reasons for declining). The other modules
are about one part each: `weights`, `sinks`, `dropout`, `repeated_heads`, `regions`, `levels`.
"""
