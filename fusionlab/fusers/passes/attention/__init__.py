"""Pass `dot_product_attention`: softmax(scale * q k^T) v with masks, biases, cap, sink and dropout.

Read `dot_product_attention` first, then `scores` and `forms` (the spellings), `masks` (what is done to scores, told by values),
`proposals` (a site as the op), `plan` (the op's operands out of a match), `conditions` (what is said of a site that is none). The others
are each about one part: `weights`, `sinks`, `dropout`, `repeated_heads`, `regions`, `levels`.
"""
